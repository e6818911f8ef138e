"""Prefixes that come in from the host's store, or from host memory, before their generation begins: the core's side of it.

A generation whose turn it is, and whose prompt's beginning lies in the store, gives its place in the line up for as long as
the state enters the slot that it would have got; then it comes back to the line and finds its prefix there. Whatever fails on
the way, it comes back all the same and its prompt is computed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from engines.runtime.cells import common_prefix
from engines.runtime.generation import Generation
from engines.runtime.prefix import PrefixCache
from engines.runtime.prefix_search import WORTH_WAITING_TOKENS, Source
from engines.runtime.slots import Slot
from engines.runtime.state_transfer import Arrival
from engines.runtime.waiting import WaitingLine

log = logging.getLogger("hydra.engine.park")


@dataclass(frozen=True, eq=False)
class Incoming:
    """The first `tokens` of a prompt as the store has them. `pays(local)`: it is faster than to compute what lies behind `local`
    tokens. `begin` is told of the slot that was taken for it; it returns at once, and `Landing.landed` must follow."""

    tokens: int
    pays: Callable[[int], bool]
    begin: Callable[[Generation, Arrival], None]


class Landing:
    """Generations whose prefix is on its way. Used by the core's thread only."""

    def __init__(self, cache: PrefixCache, waiting: WaitingLine) -> None:
        self._cache = cache
        self._waiting = waiting
        self._coming: set[Generation] = set()

    def __contains__(self, generation: Generation) -> bool:
        return generation in self._coming

    def coming(self) -> list[Generation]:
        return list(self._coming)

    def takes(self, generation: Generation, slot: Slot, source: Source) -> bool:
        """True when the slot now waits for what the store has. Asked once for a generation: a second try would be no better."""
        incoming, generation.incoming = generation.incoming, None
        if incoming is None or not generation.reuse_prefix or not incoming.pays(source.length):
            return False
        try:
            self._cache.put_away(slot)
        except Exception:
            log.exception("a slot's content could not be put away")
            slot.sequence.clear()
        self.begins(generation)
        slot.transfer, slot.awaited_cells = "restore", incoming.tokens
        # From the first block on the slot's content is this tenant's.
        slot.sequence.origin = generation.origin
        incoming.begin(generation, Arrival(slot, generation.tokens[: incoming.tokens]))
        return True

    def begins(self, generation: Generation) -> None:
        """It leaves the line until it has `landed`."""
        self._waiting.remove(generation)
        self._coming.add(generation)

    def leads(self, generation: Generation, at_hand: int) -> bool:
        """Whether a longer prefix than is at hand is on its way for another one, out of which it can then be shared."""
        if not self._coming or not self._cache.cuts_anywhere:
            return False
        mates = (other for other in self._coming if other.tenant == generation.tenant)
        longest = max((common_prefix(o.tokens, generation.tokens) for o in mates), default=0)
        return longest - at_hand >= WORTH_WAITING_TOKENS

    def landed(self, generation: Generation) -> None:
        """Back to the line, with its prefix in a slot or without."""
        if generation in self._coming:
            self._coming.discard(generation)
            self._waiting.put_back(generation)

    def take_ended(self, now: float) -> list[Generation]:
        """Those that were cancelled or whose deadline has passed: nobody waits for them until their state is in, which then
        stays in its slot for whoever comes next."""
        ended = [g for g in self._coming if g.cancelled or now > g.deadline_at]
        self._coming.difference_update(ended)
        return ended

    def take_all(self) -> list[Generation]:
        coming, self._coming = list(self._coming), set()
        return coming
