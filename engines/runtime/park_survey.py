"""What an engine holds that could be saved: slots' conversations and those in host memory, seen by the core's thread."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

from engines.errors import SlotBusy, SlotEmpty, StateHasImages
from engines.runtime.cells import Sequence
from engines.runtime.host_cache import MIN_TOKENS, HostEntry
from engines.runtime.origin import Origin
from engines.runtime.prefix import PrefixCache
from engines.runtime.slots import Slot
from engines.runtime.state_transfer import slot_of
from engines.runtime.store_pieces import Prefix


@dataclass(frozen=True)
class Key:
    """A holding as it is now; another one as soon as the conversation goes on."""

    place: int
    used_at: float
    length: int
    busy: bool


@dataclass(frozen=True)
class Holding:
    """A conversation in a slot, or in host memory (`entry`). `cuts` are lengths at which frozen states of its beginning stand in
    the context, `least` tokens are worth a save; a whole state cannot be cut (`whole_only`)."""

    tokens: list[int]
    origin: Origin
    used_at: float
    busy: bool
    cuts: tuple[int, ...]
    slot: int | None
    entry: HostEntry | None
    whole_only: bool
    least: int

    @property
    def key(self) -> Key:
        place = id(self.entry) if self.entry is not None else self.slot or 0
        return Key(place, self.used_at, len(self.tokens), self.busy)

    @property
    def end(self) -> Prefix:
        return Prefix(self.tokens, self.origin)

    def system(self) -> Prefix | None:
        """The system prompt, where its state can be had."""
        cut = self.origin.system_cut
        if not self.least <= cut < len(self.tokens) or (self.whole_only and cut not in self.cuts):
            return None
        return Prefix(self.tokens[:cut], self.origin, shared=True)

    def turns(self) -> list[Prefix]:
        """What a turn's end leaves that is worth a save. Where states cannot be cut that is the last cut, at which the next turn
        most likely branches off; the end only where there is no cut in this conversation."""
        own = [cut for cut in self.cuts if cut != self.origin.system_cut and cut >= self.least]
        if own:
            return [Prefix(self.tokens[: own[-1]], self.origin, beyond=self.tokens)]
        return [self.end] if len(self.tokens) >= self.least and not (self.busy and self.whole_only) else []


def survey(
    cache: PrefixCache, wanted: Callable[[Key], bool] = lambda _key: True
) -> Generator[None, None, list[Holding]]:
    """The holdings that are wanted, the last used first. Only of those the tokens are copied."""
    # What stands neither in a slot nor in host memory comes there soon; what begins to leave meanwhile is not waited for.
    going = [(place, place.sequence.life) for place in cache.aside]
    while any(place in cache.aside and place.sequence.life == life for place, life in going):
        yield
    inside = [s for s in cache.slots if len(s.sequence) and not s.transfer and not s.sequence.spans]
    found = [holding_of(cache, slot) for slot in inside if wanted(_key_of(slot))]
    outside = (e for e in cache.host if not e.spans and not e.is_cut and wanted(_key_of_entry(e)))
    found += [entry_holding(cache, entry) for entry in outside if not _within(entry, inside)]
    return sorted(found, key=lambda holding: holding.used_at, reverse=True)


def _key_of(slot: Slot) -> Key:
    return Key(slot.index, slot.used_at, len(slot.sequence), busy=not slot.idle)


def _key_of_entry(entry: HostEntry) -> Key:
    return Key(id(entry), entry.saved_at, len(entry.tokens), busy=False)


def _within(entry: HostEntry, slots: list[Slot]) -> bool:
    """Whether a slot holds all of it."""
    count, mine = len(entry.tokens), (s.sequence for s in slots if s.sequence.origin.tenant == entry.origin.tenant)
    return any(sequence.tokens[:count] == entry.tokens for sequence in mine)


def find(cache: PrefixCache, slot_id: int) -> Generator[None, None, Holding]:
    """A slot's conversation, also where it was put away. Raises SlotNotFound, SlotBusy, SlotEmpty, StateHasImages."""
    slot = slot_of(cache, slot_id)
    yield from cache.moves.settled(slot)
    if not slot.idle:
        raise SlotBusy(f"Slot {slot_id} is busy.")
    entry = None if len(slot.sequence) else cache.host.of_slot(slot_id)
    if not len(slot.sequence) and entry is None:
        raise SlotEmpty(f"Slot {slot_id} holds no tokens.")
    if slot.sequence.spans or (entry is not None and entry.spans):
        raise StateHasImages(f"Slot {slot_id} holds a conversation with images, whose state stays here.")
    return holding_of(cache, slot) if entry is None else entry_holding(cache, entry)


def holding_of(cache: PrefixCache, slot: Slot) -> Holding:
    sequence = slot.sequence
    cuts = {len(c.sequence) for c in cache.checkpoints_of(sequence.tokens, sequence.origin)}
    if cache.host.layout is not None:
        cuts |= {len(entry.tokens) for entry in cache.host.parts_in(sequence.tokens, sequence.origin.tenant)}
    return Holding(
        tokens=list(sequence.tokens),
        origin=sequence.origin,
        used_at=slot.used_at,
        busy=not slot.idle,
        cuts=tuple(sorted(cuts)),
        slot=slot.index,
        entry=None,
        whole_only=cache.whole_only,
        least=_least(cache),
    )


def entry_holding(cache: PrefixCache, entry: HostEntry) -> Holding:
    return Holding(
        tokens=entry.tokens,
        origin=entry.origin,
        used_at=entry.saved_at,
        busy=False,
        cuts=(),
        slot=None,
        entry=entry,
        whole_only=cache.whole_only,
        least=_least(cache),
    )


def _least(cache: PrefixCache) -> int:
    return MIN_TOKENS if cache.cuts_anywhere else max(MIN_TOKENS, cache.checkpoint_min_tokens)


def free(holding: Holding) -> Callable[[PrefixCache], Generator[None, None, bool]]:
    """An errand: lets go of what was saved, unless somebody uses it again. True when it has gone."""

    def let_go(cache: PrefixCache) -> Generator[None, None, bool]:
        yield from ()
        if holding.entry is not None:
            cache.host.forget(holding.entry)
            return True
        slot = cache.slots[holding.slot or 0]
        if not slot.idle or slot.used_at != holding.used_at or slot.sequence.tokens != holding.tokens:
            return False
        for sequence in list(_own_checkpoints(cache, holding)):
            sequence.clear()
        slot.sequence.clear()
        cache.host.unlink(slot.index)
        for entry in cache.host:
            # What was put away of it before it came back into the slot.
            if entry.origin == holding.origin and holding.tokens[: len(entry.tokens)] == entry.tokens:
                cache.host.forget(entry)
        return True

    return let_go


def _own_checkpoints(cache: PrefixCache, holding: Holding) -> Iterator[Sequence]:
    for checkpoint in cache.checkpoints_of(holding.tokens, holding.origin):
        if not checkpoint.leaving and len(checkpoint.sequence) != holding.origin.system_cut:
            yield checkpoint.sequence
