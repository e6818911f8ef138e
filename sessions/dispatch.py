"""Which engine answers: the one with the least work for its size, counted in this process.

A stand-in with the final shape: the router that weighs warmth, memory and speed replaces `choose`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from engines.services import EngineEndpoint


def choose(endpoints: Sequence[EngineEndpoint], in_flight: Mapping[int, int]) -> EngineEndpoint:
    """The endpoint with the fewest requests in flight per slot; the first of equals. `endpoints` is not empty."""
    return min(endpoints, key=lambda endpoint: in_flight.get(endpoint.engine_id, 0) / endpoint.slots)


class InFlight:
    """How many requests of this process are on which engine. Used on one event loop only."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()

    @contextmanager
    def on(self, engine_id: int) -> Iterator[None]:
        """Count one request on the engine for the duration of the block."""
        self.enter(engine_id)
        try:
            yield
        finally:
            self.leave(engine_id)

    def enter(self, engine_id: int) -> None:
        self.counts[engine_id] += 1

    def leave(self, engine_id: int) -> None:
        self.counts[engine_id] -= 1
        if self.counts[engine_id] <= 0:
            del self.counts[engine_id]
