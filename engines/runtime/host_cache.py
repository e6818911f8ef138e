"""States that no longer fit the context, kept in host memory: the tier behind slots and checkpoints.

One budget counts every byte, the token lists too; the longest unused entry goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engines.runtime.cells import Sequence, common_prefix
from engines.runtime.media_span import NO_SPANS, SpanMap

# Below this an export costs more than it saves.
MIN_TOKENS = 64
# CPython's cost of a list entry that points at an int of its own.
TOKEN_BYTES = 40


@dataclass(frozen=True, eq=False)
class HostEntry:
    """A whole state as llama.cpp exported it, and the tokens it stands for, with the spans among them."""

    tokens: list[int]
    state: NDArray[np.uint8]
    spans: SpanMap = NO_SPANS

    @property
    def size_bytes(self) -> int:
        return self.state.nbytes + len(self.tokens) * TOKEN_BYTES


class HostCache:
    """LRU of exported states. `cuts_anywhere`: a dense state may be used for any prefix of its tokens, others only whole."""

    def __init__(self, budget_bytes: int, *, cuts_anywhere: bool) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.evicted = 0
        self._cuts_anywhere = cuts_anywhere
        self._entries: OrderedDict[int, HostEntry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def save(self, sequence: Sequence) -> bool:
        """Exports the sequence unless it is short, already here, or larger than the whole budget."""
        if len(sequence) < MIN_TOKENS or self.budget_bytes == 0 or self._covers(sequence.tokens):
            return False
        size_bytes = sequence.llama.state_bytes(sequence.index) + len(sequence) * TOKEN_BYTES
        if size_bytes > self.budget_bytes:
            return False
        while self._entries and self.used_bytes + size_bytes > self.budget_bytes:
            self._remove(next(iter(self._entries)))
            self.evicted += 1
        state = sequence.llama.export_state(sequence.index)
        entry = HostEntry(list(sequence.tokens), state, sequence.spans)
        if self._cuts_anywhere:
            for key in [key for key, old in self._entries.items() if _begins(entry.tokens, old.tokens)]:
                self._remove(key)
        self._entries[id(entry)] = entry
        self.used_bytes += entry.size_bytes
        return True

    def holds_after_save(self, sequence: Sequence) -> bool:
        """Saves the sequence unless it is here already; False when there is no room for it, so that it must stay."""
        return self._covers(sequence.tokens) or self.save(sequence)

    def best(self, tokens: list[int], spans: SpanMap = NO_SPANS) -> tuple[HostEntry | None, int]:
        """The entry with the longest usable prefix of `tokens`, among them `spans` (one is always left to decode), and its
        length, which cuts no span."""
        best: HostEntry | None = None
        longest = 0
        for entry in self._entries.values():
            length = self._usable(entry, tokens)
            length = spans.whole(length) if spans else length
            if length > longest:
                best, longest = entry, length
        return best, longest

    def used(self, entry: HostEntry) -> None:
        if id(entry) in self._entries:
            self._entries.move_to_end(id(entry))

    def forget(self, entry: HostEntry) -> None:
        if id(entry) in self._entries:
            self._remove(id(entry))

    def _usable(self, entry: HostEntry, tokens: list[int]) -> int:
        limit = len(tokens) - 1
        if self._cuts_anywhere:
            return min(common_prefix(entry.tokens, tokens), limit)
        return len(entry.tokens) if len(entry.tokens) <= limit and _begins(tokens, entry.tokens) else 0

    def _covers(self, tokens: list[int]) -> bool:
        return any(
            _begins(entry.tokens, tokens) if self._cuts_anywhere else entry.tokens == tokens
            for entry in self._entries.values()
        )

    def _remove(self, key: int) -> None:
        self.used_bytes -= self._entries.pop(key).size_bytes


def _begins(tokens: list[int], prefix: list[int]) -> bool:
    return tokens[: len(prefix)] == prefix
