"""Slots: the sequences of the context, what they hold, and which of them suits a new generation.

Cells are counted here and not asked from llama.cpp: in a unified cache every token of every slot takes one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from engines.runtime.generation import Generation
from engines.runtime.llama import Llama
from engines.wire import SlotView

# What overwriting one cached token counts against saving one: a short shared beginning (every conversation has the same
# system prompt) must not cost another conversation its cache while an emptier slot is idle.
LOST_TOKEN_WORTH = 0.1


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix. Compares slices, which runs in C, and halves the range where they differ."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class Slot:
    """One sequence of the context. `tokens` are those whose state it holds, in position order."""

    def __init__(self, index: int, llama: Llama) -> None:
        self.index = index
        self._llama = llama
        self.tokens: list[int] = []
        self.generation: Generation | None = None
        self.used_at = 0.0

    @property
    def idle(self) -> bool:
        return self.generation is None

    @property
    def todo_tokens(self) -> int:
        """Tokens of the generation that must still be decoded before the next one can be drawn."""
        return len(self.generation.tokens) - len(self.tokens) if self.generation else 0

    @property
    def decoding(self) -> bool:
        return self.generation is not None and self.generation.new_tokens > 0 and self.todo_tokens == 1

    def reusable(self, tokens: Sequence[int]) -> int:
        """How many leading tokens need no computing here; always leaves one, since a state holds no logits."""
        shared = min(common_prefix(self.tokens, tokens), len(tokens) - 1)
        if shared == len(self.tokens):
            return shared
        if self._llama.has_recurrent_state:
            return 0
        window = self._llama.window_tokens
        if window and self._llama.first_position(self.index) > max(0, shared - window):
            return 0
        return shared

    def begin(self, generation: Generation) -> None:
        """Takes the generation and drops what its tokens do not share with the slot's."""
        shared = self.reusable(generation.tokens) if generation.reuse_prefix else 0
        self.cut(shared)
        if generation.started_at is None:
            generation.cached_tokens = len(self.tokens)
        self.generation = generation
        self.used_at = time.monotonic()

    def cut(self, length: int) -> None:
        """Keeps the first `length` tokens; everything goes where the memory cannot drop a suffix."""
        if length < len(self.tokens):
            if length > 0 and self._llama.keep_prefix(self.index, length):
                del self.tokens[length:]
            else:
                self.clear()

    def clear(self) -> None:
        self._llama.clear(self.index)
        self.tokens = []

    def release(self) -> None:
        """Ends the generation's stay; its tokens remain for reuse."""
        self.generation = None
        self.used_at = time.monotonic()

    def view(self, context_tokens: int) -> SlotView:
        """A snapshot for /slots. Read from the event loop while the core runs: values may be one step apart."""
        generation = self.generation
        if generation is None:
            return SlotView(self.index, "idle", False, None, 0, 0, 0, len(self.tokens), context_tokens, 0.0)
        decode_s = time.monotonic() - generation.first_token_at if generation.first_token_at else 0.0
        new_tokens = generation.new_tokens
        return SlotView(
            id=self.index,
            state="decode" if new_tokens else "prefill",
            is_processing=True,
            request_id=generation.request_id,
            prompt_tokens=len(generation.prompt),
            prompt_done_tokens=min(len(self.tokens), len(generation.prompt)),
            decoded_tokens=new_tokens,
            cached_tokens=generation.cached_tokens,
            context_tokens=context_tokens,
            tokens_per_s=round((new_tokens - 1) / decode_s, 2) if decode_s > 0 and new_tokens > 1 else 0.0,
        )


class SlotTable:
    """All slots of a context, their cells, and the choice among the idle ones."""

    def __init__(self, llama: Llama, count: int, cells: int) -> None:
        self.slots = [Slot(index, llama) for index in range(count)]
        self.cells = cells

    @property
    def busy(self) -> list[Slot]:
        return [slot for slot in self.slots if not slot.idle]

    @property
    def idle(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.idle]

    @property
    def free_cells(self) -> int:
        return self.cells - sum(len(slot.tokens) for slot in self.slots)

    def promised_cells(self) -> int:
        """Cells that running generations hold or will need before their next token."""
        return sum(max(len(slot.tokens), len(slot.generation.tokens)) + 1 for slot in self.slots if slot.generation)

    def best_for(self, generation: Generation) -> Slot | None:
        """The idle slot that saves most computing, less what its overwritten tokens may still be worth; then the oldest."""

        def gain(slot: Slot) -> tuple[float, float]:
            shared = slot.reusable(generation.tokens) if generation.reuse_prefix else 0
            return shared - LOST_TOKEN_WORTH * (len(slot.tokens) - shared), -slot.used_at

        return max(self.idle, key=gain, default=None)

    def make_room(self, cells: int) -> bool:
        """Empties idle slots, the longest unused first, until `cells` are free. False if that was not enough."""
        for slot in sorted(self.idle, key=lambda slot: slot.used_at):
            if self.free_cells >= cells:
                break
            if slot.tokens:
                slot.clear()
        return self.free_cells >= cells
