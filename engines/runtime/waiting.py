"""The line in front of the slots: bounded, fair between tenants and between owners, by priority. Thread-safe."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable

from engines.errors import QueueFull
from engines.runtime.generation import Generation


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

    def in_order(self, running: Iterable[Generation]) -> list[Generation]:
        """Whose tenant runs least comes first; of a tenant's by priority (lower first), then whoever's owner runs least; then by
        arrival. Who gives way by a priority above 0 gives way to all, but a request's word gets nobody past other tenants.
        A preempted one keeps its arrival."""
        tenants: Counter[str] = Counter()
        owners: Counter[tuple[str, str]] = Counter()
        for generation in running:
            tenants[generation.tenant] += 1
            owners[generation.tenant, generation.owner] += 1
        with self.changed:
            waiting = list(self._waiting)
        return sorted(
            waiting,
            key=lambda g: (
                max(g.priority, 0),
                tenants[g.tenant],
                g.priority,
                owners[g.tenant, g.owner],
                g.queued_at,
            ),
        )

    def take_ended(self, now: float) -> list[Generation]:
        """Removes and returns those that were cancelled or whose deadline has passed."""
        with self.changed:
            ended = [g for g in self._waiting if g.cancelled or now > g.deadline_at]
            for generation in ended:
                self._waiting.remove(generation)
        return ended

    def take_all(self) -> list[Generation]:
        with self.changed:
            waiting, self._waiting = self._waiting, []
        return waiting
