"""States that no longer fit the context, kept in host memory: the tier behind slots and checkpoints.

One budget counts every byte, the token lists too; the longest unused entry goes first. A checkpoint's entry is a *cut*: its
recurrent state alone, while its attention rows lie with whoever has them, a sequence or another entry. Where such another one
would have to go its rows stay with the cut, at which the conversation's next turn branches off most likely.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from engines.runtime.cells import Sequence, common_prefix
from engines.runtime.host_state import HostState
from engines.runtime.media_span import NO_SPANS, SpanMap
from engines.runtime.origin import NOBODY, Origin
from engines.runtime.state_layout import StateLayout

# Below this an export costs more than it saves.
MIN_TOKENS = 64
# CPython's cost of a list entry that points at an int of its own.
TOKEN_BYTES = 40


@dataclass(frozen=True, eq=False)
class HostEntry:
    """A state, and the tokens it stands for, with the spans among them."""

    tokens: list[int]
    state: HostState
    spans: SpanMap = NO_SPANS
    origin: Origin = NOBODY
    saved_at: float = 0.0
    made_of: tuple[HostEntry, ...] = ()
    """Entries of which this one was put together, itself none of the cache's."""

    @property
    def is_cut(self) -> bool:
        return self.state.is_part_alone

    @property
    def positions(self) -> int:
        """How many positions its tokens take."""
        return self.spans.position(len(self.tokens)) if self.spans else len(self.tokens)

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
        # Both are told once the context is there: how states are laid out, and whether it holds a cut's rows.
        self.layout: StateLayout | None = None
        self.has_rows: Callable[[HostEntry], bool] = lambda _cut: False

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[HostEntry]:
        """The longest unused first."""
        return iter(list(self._entries.values()))

    @property
    def _whole(self) -> Iterator[HostEntry]:
        return (entry for entry in self._entries.values() if not entry.is_cut)

    def wants(self, sequence: Sequence) -> bool:
        """Whether it is neither short nor here already."""
        return len(sequence) >= MIN_TOKENS and self.budget_bytes > 0 and self.covering(sequence) is None

    def reserve(self, size_bytes: int, keeping: HostEntry | None = None) -> bool:
        """Counts so many bytes for a state that is about to come, for which others make way, but `keeping`. False, and nobody has
        gone, where that were not enough."""
        others_bytes = sum(entry.size_bytes for entry in self._entries.values() if entry is not keeping)
        if self.used_bytes - others_bytes + size_bytes > self.budget_bytes:
            return False
        while self.used_bytes + size_bytes > self.budget_bytes:
            self._give_way(next(entry for entry in self._going() if entry is not keeping), keeping)
            self.evicted += 1
        self.used_bytes += size_bytes
        return True

    def _going(self) -> list[HostEntry]:
        """The first to go first: cuts whose rows are nowhere any more, what is nobody's session's, the longest unused."""
        return sorted(self._entries.values(), key=lambda entry: (not self._is_lost(entry), bool(entry.origin.session)))

    def _is_lost(self, entry: HostEntry) -> bool:
        return entry.is_cut and self.rows_of(entry) is None and not self.has_rows(entry)

    def _give_way(self, entry: HostEntry, keeping: HostEntry | None) -> None:
        """Removes it, or of two that share their rows the one that ends later."""
        cut = entry if entry.is_cut else self._last_cut_in(entry)
        rows = entry if not entry.is_cut else self.rows_of(entry)
        if cut is None or rows is None or rows is keeping or self._last_cut_in(rows) is not cut:
            self._remove(id(entry))
            return
        joined = replace(self.joined(cut, rows), made_of=())
        order = [joined if other is cut else other for other in self._entries.values() if other is not rows]
        linked = dict(self._of_slots)
        self._remove(id(rows))
        self._remove(id(cut))
        self._entries = OrderedDict((id(other), other) for other in order)
        self.used_bytes += joined.size_bytes
        self._of_slots = {slot: joined if other is rows else other for slot, other in linked.items()}

    def _last_cut_in(self, rows: HostEntry) -> HostEntry | None:
        """The longest cut behind the system prompt whose rows these are."""
        cuts = (cut for cut in self._cuts(rows.origin.tenant) if len(cut.tokens) > rows.origin.system_cut)
        mine = (cut for cut in cuts if self._lends(rows, cut))
        return max(mine, key=lambda cut: len(cut.tokens), default=None)

    def release(self, size_bytes: int) -> None:
        """What was reserved does not come."""
        self.used_bytes -= size_bytes

    def keep(self, entry: HostEntry, reserved_bytes: int) -> None:
        """Adds a state for which so many bytes were reserved: all of them, or but those that it has in common with an entry that
        it covers."""
        self.used_bytes += entry.size_bytes - reserved_bytes
        covered = _covers if self._cuts_anywhere else _is_cut_at_end
        for key in [key for key, old in self._entries.items() if covered(entry, old)]:
            self._remove(key)
        self._entries[id(entry)] = entry

    # --- cuts -----------------------------------------------------------------------------------

    def wants_cut(self, sequence: Sequence) -> bool:
        """Whether the state at which it ends is neither of little worth nor here already."""
        tokens, tenant = sequence.tokens, sequence.origin.tenant
        if len(tokens) < MIN_TOKENS or self.budget_bytes == 0 or self.layout is None:
            return False
        return not any(e.origin.tenant == tenant and e.tokens == tokens for e in self._entries.values())

    def cuts_in(self, tokens: list[int], tenant: str = "") -> list[HostEntry]:
        """The tenant's cuts at which `tokens` can be begun (one is always left to decode), the longest first."""
        found = [cut for cut in self._cuts(tenant) if len(cut.tokens) < len(tokens) and _begins(tokens, cut.tokens)]
        return sorted(found, key=lambda cut: len(cut.tokens), reverse=True)

    def parts_in(self, tokens: list[int], tenant: str) -> list[HostEntry]:
        """The tenant's entries with a part, cuts or not, at which `tokens` can be begun."""
        mine = (e for e in self._entries.values() if e.origin.tenant == tenant and e.state.part is not None)
        return [entry for entry in mine if len(entry.tokens) < len(tokens) and _begins(tokens, entry.tokens)]

    def rows_of(self, cut: HostEntry) -> HostEntry | None:
        """An entry that has the attention rows of a cut."""
        return next((entry for entry in self._whole if self._lends(entry, cut)), None)

    def rows_for(self, sequence: Sequence) -> bool:
        """Whether the attention rows of a sequence are here."""
        if sequence.spans:
            return False
        mine = (entry for entry in self._whole if entry.origin.tenant == sequence.origin.tenant)
        return any(entry.state.blocks and _begins(entry.tokens, sequence.tokens) for entry in mine)

    def joined(self, cut: HostEntry, rows: HostEntry) -> HostEntry:
        """The state at the cut, with its rows."""
        assert self.layout is not None
        assert cut.state.part is not None
        state = rows.state.first(self.layout, rows.tokens, len(cut.tokens), cut.state.part)
        return replace(cut, state=state, made_of=(cut, rows))

    def _cuts(self, tenant: str) -> Iterator[HostEntry]:
        return (entry for entry in self._entries.values() if entry.is_cut and entry.origin.tenant == tenant)

    @staticmethod
    def _lends(entry: HostEntry, cut: HostEntry) -> bool:
        """Only rows in blocks can be cut, and such states have no spans."""
        is_mine = entry.origin.tenant == cut.origin.tenant and bool(entry.state.blocks) and not cut.spans
        return is_mine and _begins(entry.tokens, cut.tokens)

    # --- whole states ---------------------------------------------------------------------------

    def beginning_of(self, sequence: Sequence) -> HostEntry | None:
        """The longest entry that an entry of the sequence would cover."""
        if not self._cuts_anywhere:
            return None
        mine = (e for e in self._whole if e.origin.tenant == sequence.origin.tenant and not e.spans)
        return max(
            (e for e in mine if _begins(sequence.tokens, e.tokens)), key=lambda entry: len(entry.tokens), default=None
        )

    def holds(self, entry: HostEntry) -> bool:
        return id(entry) in self._entries

    def link(self, slot: int, sequence: Sequence) -> None:
        """Notes that an idle slot is emptied of a sequence, which is still its conversation; where it is here."""
        entry = self.covering(sequence)
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
        mine = [one for one in self._whole if one.origin.session == session]
        longer = ((one, [other for other in mine if len(other.tokens) > len(one.tokens)]) for one in mine)
        ends = (one for one, others in longer if not any(_begins(other.tokens, one.tokens) for other in others))
        own = (one for one in ends if len(one.tokens) > one.origin.system_cut)
        return max(own, key=lambda one: one.saved_at, default=None)

    def best(self, tokens: list[int], spans: SpanMap = NO_SPANS, tenant: str = "") -> tuple[HostEntry | None, int]:
        """The tenant's entry with the longest usable prefix of `tokens`, among them `spans` (one is always left to decode), and
        its length, which cuts no span."""
        best: HostEntry | None = None
        longest = 0
        for entry in self._whole:
            length = self._usable(entry, tokens) if entry.origin.tenant == tenant else 0
            length = spans.whole(length) if spans else length
            if length > longest:
                best, longest = entry, length
        return best, longest

    def used(self, entry: HostEntry) -> None:
        for one in entry.made_of or (entry,):
            if id(one) in self._entries:
                self._entries.move_to_end(id(one))

    def forget(self, entry: HostEntry) -> None:
        for one in entry.made_of or (entry,):
            if id(one) in self._entries:
                self._remove(id(one))

    def _usable(self, entry: HostEntry, tokens: list[int]) -> int:
        limit = len(tokens) - 1
        if self._cuts_anywhere:
            return min(common_prefix(entry.tokens, tokens), limit)
        return len(entry.tokens) if len(entry.tokens) <= limit and _begins(tokens, entry.tokens) else 0

    def covering(self, sequence: Sequence) -> HostEntry | None:
        """The tenant's entry out of which the sequence could be had again."""
        tokens = sequence.tokens
        mine = (entry for entry in self._whole if entry.origin.tenant == sequence.origin.tenant)
        return next(
            (e for e in mine if (_begins(e.tokens, tokens) if self._cuts_anywhere else e.tokens == tokens)), None
        )

    def _remove(self, key: int) -> None:
        entry = self._entries.pop(key)
        self.used_bytes -= entry.size_bytes
        self._of_slots = {slot: other for slot, other in self._of_slots.items() if other is not entry}


def _covers(entry: HostEntry, old: HostEntry) -> bool:
    return entry.origin.tenant == old.origin.tenant and _begins(entry.tokens, old.tokens)


def _is_cut_at_end(entry: HostEntry, old: HostEntry) -> bool:
    return old.is_cut and entry.origin.tenant == old.origin.tenant and entry.tokens == old.tokens


def _begins(tokens: list[int], prefix: list[int]) -> bool:
    count = len(prefix)
    # Most others differ by their last token already, which saves the copy.
    return count <= len(tokens) and (not count or tokens[count - 1] == prefix[-1]) and tokens[:count] == prefix
