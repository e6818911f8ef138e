"""Requests reach an engine in the order in which they were routed to it.

Each was promised a wait behind those before it. Leases come back in any order, so whoever has one early lets those before it go
first, for a moment: a lease that is late must not hold up the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE_S = 0.1


class SendOrder:
    """One process's requests that were routed and have not been sent, by engine. Used on one event loop."""

    def __init__(self) -> None:
        self._coming: dict[int, list[asyncio.Event]] = {}

    @contextmanager
    def place(self, engine_id: int) -> Iterator[Place]:
        """A place behind all that were routed to the engine before; left with the block."""
        line, gone = self._coming.setdefault(engine_id, []), asyncio.Event()
        place = Place(tuple(line))
        line.append(gone)
        try:
            yield place
        finally:
            gone.set()
            line.remove(gone)
            if not line:
                del self._coming[engine_id]


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
