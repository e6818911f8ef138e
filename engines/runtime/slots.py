"""Slots: the sequences that run generations, and what /slots tells about them."""

from __future__ import annotations

import time

from engines.config import SlotView
from engines.runtime.cells import Sequence
from engines.runtime.generation import Generation
from engines.runtime.media_span import PlacedSpan


class Slot:
    """A place for one running generation; afterwards its sequence keeps the tokens for reuse."""

    def __init__(self, index: int, sequence: Sequence, *, has_raw_logits: bool) -> None:
        self.index = index
        self.sequence = sequence
        self.has_raw_logits = has_raw_logits
        self.generation: Generation | None = None
        self.used_at = 0.0
        # "export" or "restore" while its state leaves or enters; no generation begins meanwhile.
        self.transfer = ""
        # It stands at a cut, whose checkpoint has no place yet; nothing of it is computed until then.
        self.waits_at_cut = False
        # Cells that a restore has been promised and not filled yet.
        self.awaited_cells = 0

    @property
    def idle(self) -> bool:
        return self.generation is None and not self.transfer

    @property
    def todo_tokens(self) -> int:
        """Tokens of the generation that must still be decoded before the next one can be drawn."""
        return len(self.generation.tokens) - len(self.sequence.tokens) if self.generation else 0

    @property
    def decoding(self) -> bool:
        # Asked of every slot at every step, so without calls.
        generation = self.generation
        if generation is None:
            return False
        count = len(generation.tokens)
        return count > len(generation.prompt) and count == len(self.sequence.tokens) + 1

    @property
    def span(self) -> PlacedSpan | None:
        """The span that the next token belongs to; it is decoded by a call of its own."""
        generation = self.generation
        return generation.spans.covering(len(self.sequence)) if generation and generation.spans else None

    def begin(self, generation: Generation) -> None:
        """Takes the generation; its sequence already holds what can be reused."""
        if generation.started_at is None:
            generation.cached_tokens = len(self.sequence)
        self.generation = generation
        self.sequence.origin = generation.origin
        self.used_at = time.monotonic()

    def release(self) -> None:
        """Ends the generation's stay; its tokens remain for reuse, but for the beginning of a span."""
        self.generation, self.waits_at_cut = None, False
        if self.sequence.spans:
            self.sequence.drop_part_of_span()
        self.used_at = time.monotonic()

    def next_chunk(self, room: int) -> int:
        """How many tokens to decode next: at most `room`, and up to the next span or place where a checkpoint is wanted."""
        assert self.generation is not None
        done = len(self.sequence)
        until_cut = next((cut - done for cut in self.generation.cuts if cut > done), room)
        if self.generation.spans:
            until_span = self.generation.spans.until_span(done)
            until_cut = until_cut if until_span is None else min(until_cut, until_span)
        return min(self.todo_tokens, room, until_cut)

    def view(self, context_tokens: int) -> SlotView:
        """A snapshot for /slots. Read from the event loop while the core runs: values may be one step apart."""
        generation = self.generation
        if generation is None:
            state = self.transfer or "idle"
            return SlotView(self.index, state, False, None, 0, 0, 0, len(self.sequence), context_tokens, 0.0)
        decode_s = time.monotonic() - generation.first_token_at if generation.first_token_at else 0.0
        new_tokens = generation.new_tokens
        return SlotView(
            id=self.index,
            state="decode" if new_tokens else "prefill",
            is_processing=True,
            request_id=generation.request_id,
            prompt_tokens=len(generation.prompt),
            prompt_done_tokens=min(len(self.sequence), len(generation.prompt)),
            decoded_tokens=new_tokens,
            cached_tokens=generation.cached_tokens,
            context_tokens=context_tokens,
            tokens_per_s=round((new_tokens - 1) / decode_s, 2) if decode_s > 0 and new_tokens > 1 else 0.0,
        )
