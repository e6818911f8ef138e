"""The line in front of the slots: bounded, fair between tenants and between owners, by priority. Thread-safe."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heapreplace

from engines.errors import QueueFull
from engines.runtime.generation import Generation


class Turns:
    """Who runs how much. Whose tenant runs least comes first; of a tenant's by priority (lower first), then whoever's owner runs
    least. Who gives way by a priority above 0 gives way to all, but a request's word gets nobody past other tenants."""

    def __init__(self, running: Iterable[Generation]) -> None:
        self._tenants: Counter[str] = Counter()
        self._owners: Counter[tuple[str, str]] = Counter()
        for generation in running:
            self.began(generation)

    def began(self, generation: Generation) -> None:
        self._tenants[generation.tenant] += 1
        self._owners[generation.tenant, generation.owner] += 1

    def place(self, generation: Generation) -> tuple[int, int, int, int]:
        """The lowest comes next."""
        tenant = generation.tenant
        return (
            max(generation.priority, 0),
            self._tenants[tenant],
            generation.priority,
            self._owners[tenant, generation.owner],
        )


class WaitingLine:
    """Generations that no slot has taken yet. `changed` is notified whenever one arrives."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.changed = threading.Condition()
        self._waiting: list[Generation] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, generation: Generation) -> bool:
        with self.changed:
            return generation in self._waiting

    def prompt_tokens(self, most: int) -> list[int]:
        """Of those who wait, at most so many, in no order."""
        with self.changed:
            return [len(generation.tokens) for generation in self._waiting[:most]]

    def put(self, generations: list[Generation], idle_slots: int) -> None:
        """Adds all or none. Raises QueueFull beyond the limit; an idle slot takes the first in line at once, so it adds one."""
        with self.changed:
            if len(self._waiting) + len(generations) > self.limit + idle_slots:
                raise QueueFull(f"{len(self._waiting)} requests wait already; the limit is {self.limit}.")
            self._waiting += generations
            self.changed.notify()

    def put_back(self, generation: Generation) -> None:
        """A generation that had to give way; never refused."""
        with self.changed:
            self._waiting.append(generation)

    def remove(self, generation: Generation) -> None:
        with self.changed:
            self._waiting.remove(generation)

    def standing(self) -> list[Generation]:
        """Those in the line, in no order."""
        with self.changed:
            return list(self._waiting)

    def in_order(self, turns: Turns) -> Iterator[Generation]:
        """Whose turn it is, one after another; what `turns` is told meanwhile counts for those that are left. A preempted one
        keeps its arrival."""
        line = [(turns.place(g), g.queued_at, number, g) for number, g in enumerate(self.standing())]
        heapify(line)
        while line:
            place, queued_at, number, generation = line[0]
            # A place only gets worse, so whoever is first by an old one and keeps it is first.
            if (now := turns.place(generation)) != place:
                heapreplace(line, (now, queued_at, number, generation))
                continue
            heappop(line)
            yield generation

    def take_ended(self, now: float) -> list[Generation]:
        """Removes and returns those that were cancelled or whose deadline has passed."""
        if not self._waiting:
            return []
        with self.changed:
            ended = [g for g in self._waiting if g.cancelled or now > g.deadline_at]
            for generation in ended:
                self._waiting.remove(generation)
        return ended

    def take_all(self) -> list[Generation]:
        with self.changed:
            waiting, self._waiting = self._waiting, []
        return waiting
