"""Which tokens the next call of llama_decode computes."""

from __future__ import annotations

import time
from dataclasses import dataclass

from engines.runtime.llama import Batch, Llama
from engines.runtime.prefix import PrefixCache
from engines.runtime.slots import Slot
from engines.wire import EngineConfig


@dataclass(frozen=True)
class Row:
    """A slot's part of a batch: `count` tokens, the last of them in batch row `last`, drawing a token if `draws`."""

    slot: Slot
    count: int
    last: int
    draws: bool


class StepPlanner:
    """Fills one reusable batch per step. Dense models take everybody's next token and chunks of prompts together; models
    with recurrent state alternate, since llama.cpp splits unequal sequences into several graphs there."""

    def __init__(self, llama: Llama, cache: PrefixCache, config: EngineConfig) -> None:
        self.batch = Batch(max(config.batch_tokens, config.decoding_sequences))
        self._cache = cache
        self._alternates = llama.has_recurrent_state
        self._chunk_was_last = False

    def plan(self) -> list[Row]:
        """The rows of the next step; none when no slot has work. There must be a free cell per decoding slot."""
        busy = self._cache.busy
        decoding = [slot for slot in busy if slot.decoding]
        # The slot served longest ago goes first, so that short prompts pass a long one chunk by chunk.
        filling = sorted((slot for slot in busy if not slot.decoding), key=lambda slot: slot.used_at)
        if self._alternates:
            # One kind a step, one prompt a chunk.
            filling = filling[:1]
            if filling and decoding:
                decoding, filling = (decoding, []) if self._chunk_was_last else ([], filling)
        self.batch.clear()
        rows = [self._add(slot, 1) for slot in decoding]
        for slot in filling:
            count = slot.next_chunk(self.batch.room)
            if count and self._cache.make_room(self.batch.count + count):
                rows.append(self._add(slot, count))
                slot.used_at = time.monotonic()
        self._chunk_was_last = bool(filling)
        return rows

    def plan_alone(self, slot: Slot) -> list[Row]:
        """The slot's part as a batch of its own."""
        self.batch.clear()
        return [self._add(slot, slot.next_chunk(self.batch.capacity))]

    def _add(self, slot: Slot, count: int) -> Row:
        assert slot.generation is not None
        start = len(slot.sequence)
        draws = count == slot.todo_tokens
        tokens = slot.generation.tokens[start : start + count]
        last = self.batch.add(slot.sequence.index, start, tokens, output_last=draws)
        return Row(slot, count, last, draws)
