"""Which tokens the next call of llama_decode computes."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from engines.config import EngineConfig
from engines.runtime.llama import Batch, Llama
from engines.runtime.prefix import PrefixCache
from engines.runtime.slots import Slot

# How long one chunk of a prompt may take: a cancel waits for its end, and so does everybody's next token.
CHUNK_ALONE_S = 2.0
CHUNK_SHARED_S = 0.4
MIN_CHUNK_TOKENS = 32
OLDEST_EVERY_CHUNKS = 4
# Computing this much again is cheaper than stopping a prompt for a checkpoint, which costs a call of llama_decode.
CHECKPOINT_WORTH_S = 0.15
MAX_CHECKPOINT_MIN_TOKENS = 512
WARM_UP_TOKENS = (16, 64)

log = logging.getLogger("hydra.engine.planner")


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
        self._llama = llama
        self._alternates = llama.has_recurrent_state
        self._chunk_was_last = False
        self._decoded_last = False
        self._chunks = 0
        self.alone_tokens = self.shared_tokens = self.batch.capacity
        self.checkpoint_min_tokens = max(config.checkpoint_min_tokens, 1)
        self._measures_checkpoints = config.checkpoint_min_tokens < 0

    def warm_up(self) -> None:
        """Runs two small prompts, which reads the weights in, and sets the chunks' sizes from the second one's speed.

        Powers of two, so that the sizes (and with them the low bits of answers) do not change from start to start.
        """
        elapsed_s, tokens = 0.0, 0
        for tokens in (min(tokens, self.batch.capacity) for tokens in WARM_UP_TOKENS):
            self.batch.clear()
            self.batch.add(0, 0, [0] * tokens, output_last=True)
            started = time.monotonic()
            status = self._llama.decode(self.batch)
            # The result is asked for, since a GPU's decode returns before it has computed.
            self._llama.synchronize()
            elapsed_s = time.monotonic() - started
            self._llama.clear(0)
            if status != 0:
                log.warning("the warm-up was refused (llama_decode: %d)", status)
                return
        rate = tokens / max(elapsed_s, 1e-6)
        self.alone_tokens = _chunk(rate * CHUNK_ALONE_S, self.batch.capacity)
        self.shared_tokens = _chunk(rate * CHUNK_SHARED_S, self.batch.capacity)
        if self._measures_checkpoints:
            self.checkpoint_min_tokens = _chunk(rate * CHECKPOINT_WORTH_S, MAX_CHECKPOINT_MIN_TOKENS)
        log.info("prompts run at %.0f tokens/s: chunks of %d, shared %d", rate, self.alone_tokens, self.shared_tokens)

    def plan(self) -> list[Row]:
        """The rows of the next step; none when no slot has work. There must be a free cell per decoding slot."""
        busy = self._cache.busy
        decoding = [slot for slot in busy if slot.decoding]
        filling = self._in_order([slot for slot in busy if not slot.decoding])
        if self._alternates and filling and decoding:
            decoding, filling = (decoding, []) if self._chunk_was_last else ([], filling)
        self.batch.clear()
        rows = [self._add(slot, 1) for slot in decoding]
        room = self.shared_tokens if decoding or self._decoded_last else self.alone_tokens
        for slot in filling:
            count = slot.next_chunk(min(room, self.batch.room))
            if count and self._cache.make_room(self.batch.count + count):
                rows.append(self._add(slot, count))
                slot.used_at = time.monotonic()
                room -= count
        self._decoded_last = bool(decoding)
        self._chunk_was_last = bool(filling)
        return rows

    def _in_order(self, filling: list[Slot]) -> list[Slot]:
        """Who is nearest to a first token comes first, so that a short prompt passes a long one and equal ones end one after
        another; every few chunks the one that came first, so that nobody waits for ever."""
        self._chunks += bool(filling)
        if self._chunks % OLDEST_EVERY_CHUNKS == 0:
            return sorted(filling, key=lambda slot: slot.generation.queued_at if slot.generation else 0.0)
        return sorted(filling, key=lambda slot: slot.todo_tokens)

    def plan_alone(self, slot: Slot) -> list[Row]:
        """The slot's part as a batch of its own."""
        self.batch.clear()
        return [self._add(slot, slot.next_chunk(self.shared_tokens))]

    def _add(self, slot: Slot, count: int) -> Row:
        assert slot.generation is not None
        start = len(slot.sequence)
        draws = count == slot.todo_tokens
        tokens = slot.generation.tokens[start : start + count]
        last = self.batch.add(slot.sequence.index, start, tokens, output_last=draws)
        return Row(slot, count, last, draws)


def _chunk(tokens: float, most: int) -> int:
    """The largest power of two within `tokens`, but no less than MIN_CHUNK_TOKENS and no more than the batch holds."""
    size = MIN_CHUNK_TOKENS
    while size * 2 <= tokens:
        size *= 2
    return min(size, most)
