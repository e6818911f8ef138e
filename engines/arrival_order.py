"""Whoever came first goes first, on stretches where requests may overtake each other.

Each was promised a wait behind those before it. Leases come back in any order, and prompts are prepared by several threads; so
whoever is early lets those before it go first, for a moment: one that is late must not hold up the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

PATIENCE_S = 0.1


class ArrivalOrder:
    """Requests that have come to a stretch and have not left it, by the line they stand in. Used on one event loop."""

    def __init__(self) -> None:
        self._coming: dict[Hashable, list[asyncio.Event]] = {}

    @contextmanager
    def place(self, line_name: Hashable = None) -> Iterator[Place]:
        """A place behind all that stand in the line; left with the block."""
        line, gone = self._coming.setdefault(line_name, []), asyncio.Event()
        place = Place(tuple(line))
        line.append(gone)
        try:
            yield place
        finally:
            gone.set()
            line.remove(gone)
            if not line:
                del self._coming[line_name]


class Place:
    def __init__(self, ahead: tuple[asyncio.Event, ...]) -> None:
        self._ahead = ahead

    async def turn(self) -> None:
        """Returns once those before have gone, or after PATIENCE_S."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                for gone in self._ahead:
                    await gone.wait()
        except TimeoutError:
            return
