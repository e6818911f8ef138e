"""States that no longer fit the context, kept in host memory: the tier behind slots and checkpoints.

One budget counts every byte, the token lists too; the longest unused entry goes first.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engines.runtime.cells import Sequence, common_prefix
from engines.runtime.media_span import NO_SPANS, SpanMap
from engines.runtime.origin import NOBODY, Origin

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
    origin: Origin = NOBODY
    saved_at: float = 0.0

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
        # What idle slots held before they were emptied.
        self._of_slots: dict[int, HostEntry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[HostEntry]:
        """The longest unused first."""
        return iter(list(self._entries.values()))

    def save(self, sequence: Sequence) -> bool:
        """Exports the sequence unless it is short, already here, or larger than the whole budget."""
        if len(sequence) < MIN_TOKENS or self.budget_bytes == 0 or self._covering(sequence):
            return False
        size_bytes = sequence.llama.state_bytes(sequence.index) + len(sequence) * TOKEN_BYTES
        if size_bytes > self.budget_bytes:
            return False
        while self._entries and self.used_bytes + size_bytes > self.budget_bytes:
            # What is nobody's session's goes before all others.
            self._remove(min(self._entries, key=lambda key: bool(self._entries[key].origin.session)))
            self.evicted += 1
        state = sequence.llama.export_state(sequence.index)
        entry = HostEntry(list(sequence.tokens), state, sequence.spans, sequence.origin, time.monotonic())
        if self._cuts_anywhere:
            for key in [key for key, old in self._entries.items() if _covers(entry, old)]:
                self._remove(key)
        self._entries[id(entry)] = entry
        self.used_bytes += entry.size_bytes
        return True

    def holds_after_save(self, sequence: Sequence) -> bool:
        """Saves the sequence unless it is here already; False when there is no room for it, so that it must stay."""
        return self._covering(sequence) is not None or self.save(sequence)

    def link(self, slot: int, sequence: Sequence) -> None:
        """Notes that an idle slot is emptied of a sequence, which is still its conversation; where it is here."""
        entry = self._covering(sequence)
        if entry is not None:
            self._of_slots[slot] = entry

    def unlink(self, slot: int) -> None:
        """The slot gets another content."""
        self._of_slots.pop(slot, None)

    def of_slot(self, slot: int) -> HostEntry | None:
        """The conversation of an empty slot."""
        return self._of_slots.get(slot)

    def of_session(self, session: str) -> HostEntry | None:
        """What was put away last of a session's conversation, which is more than its system prompt or another one's beginning."""
        mine = [one for one in self._entries.values() if one.origin.session == session]
        longer = ((one, [other for other in mine if len(other.tokens) > len(one.tokens)]) for one in mine)
        ends = (one for one, others in longer if not any(_begins(other.tokens, one.tokens) for other in others))
        own = (one for one in ends if len(one.tokens) > one.origin.system_cut)
        return max(own, key=lambda one: one.saved_at, default=None)

    def best(self, tokens: list[int], spans: SpanMap = NO_SPANS, tenant: str = "") -> tuple[HostEntry | None, int]:
        """The tenant's entry with the longest usable prefix of `tokens`, among them `spans` (one is always left to decode), and
        its length, which cuts no span."""
        best: HostEntry | None = None
        longest = 0
        for entry in self._entries.values():
            length = self._usable(entry, tokens) if entry.origin.tenant == tenant else 0
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

    def _covering(self, sequence: Sequence) -> HostEntry | None:
        tokens = sequence.tokens
        mine = (entry for entry in self._entries.values() if entry.origin.tenant == sequence.origin.tenant)
        return next(
            (e for e in mine if (_begins(e.tokens, tokens) if self._cuts_anywhere else e.tokens == tokens)), None
        )

    def _remove(self, key: int) -> None:
        entry = self._entries.pop(key)
        self.used_bytes -= entry.size_bytes
        self._of_slots = {slot: other for slot, other in self._of_slots.items() if other is not entry}


def _covers(entry: HostEntry, old: HostEntry) -> bool:
    return entry.origin.tenant == old.origin.tenant and _begins(entry.tokens, old.tokens)


def _begins(tokens: list[int], prefix: list[int]) -> bool:
    return tokens[: len(prefix)] == prefix
