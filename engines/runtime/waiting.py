"""The line in front of the slots: bounded, fair between tenants and between owners, by priority. Thread-safe."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from heapq import heapify, heappop, heapreplace

from engines.errors import QueueFull
from engines.runtime.generation import Generation

# A tenant, or an owner of a tenant's.
Group = tuple[str, ...]


def _groups(generation: Generation) -> tuple[Group, Group]:
    return (generation.tenant,), (generation.tenant, generation.owner)


class Turns:
    """Who runs how much, and who began last. Whose tenant runs least comes first, of equals the tenant that has waited longest
    since one of its own began; of a tenant's by priority (lower first), then in the same way by owner. So a crowd of one's takes
    turns with others also where a single one runs at a time. Who gives way by a priority above 0 gives way to all, but a
    request's word gets nobody past other tenants."""

    def __init__(
        self, running: Iterable[Generation], line: Iterable[Generation] = (), began: Mapping[Group, float] | None = None
    ) -> None:
        """`line` are those who wait; `began` says of groups when one of theirs began last."""
        self._running: Counter[Group] = Counter()
        # Since when a group has waited: from its first one's arrival, or from when one of it began.
        self._since: dict[Group, float] = {}
        for generation in running:
            self._running.update(_groups(generation))
        since = self._since
        for generation in line:
            arrived = generation.queued_at
            for group in _groups(generation) if generation.started_at is None else ():
                if arrived < since.get(group, math.inf):
                    since[group] = arrived
        for group, began_at in (began or {}).items():
            since[group] = max(began_at, since.get(group, began_at))

    def began(self, generation: Generation) -> None:
        self._running.update(_groups(generation))
        if generation.started_at is None:
            self._since.update(dict.fromkeys(_groups(generation), time.monotonic()))

    def place(self, generation: Generation) -> tuple[int, int, float, int, int, float]:
        """The lowest comes next. Whoever had to give way had its turn: it goes by its arrival."""
        arrived, (tenant, owner) = generation.queued_at, _groups(generation)
        has_begun = generation.started_at is not None
        return (
            max(generation.priority, 0),
            self._running[tenant],
            arrived if has_begun else self._since.get(tenant, arrived),
            generation.priority,
            self._running[owner],
            arrived if has_begun else self._since.get(owner, arrived),
        )


class WaitingLine:
    """Generations that no slot has taken yet. `changed` is notified whenever one arrives."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.changed = threading.Condition()
        self._waiting: list[Generation] = []
        # When one of a group's began last, as long as somebody waits who came before that.
        self._began: dict[Group, float] = {}

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

    def begin(self, generation: Generation) -> None:
        """It leaves the line for a slot. Whoever came back to it had its turn before."""
        with self.changed:
            self._waiting.remove(generation)
            if generation.started_at is None:
                self._began.update(dict.fromkeys(_groups(generation), time.monotonic()))
            earliest = min((one.queued_at for one in self._waiting), default=math.inf)
            self._began = {group: began_at for group, began_at in self._began.items() if began_at > earliest}

    def turns(self, running: Iterable[Generation]) -> Turns:
        with self.changed:
            return Turns(running, self._waiting, self._began)

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
