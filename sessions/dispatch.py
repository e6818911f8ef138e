"""Which engine answers: the one with the least work for its size, counted in this process.

A stand-in with the final shape: the router that weighs warmth, memory and speed replaces `choose`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from engines import services as engines
from engines.services import EngineEndpoint
from pools.db import in_db

# How long an engine that came up may wait for its first request while others serve.
READY_CACHE_S = 1.0
MAX_CACHED_MODELS = 256


def choose(endpoints: Sequence[EngineEndpoint], in_flight: Mapping[int, int]) -> EngineEndpoint:
    """The endpoint with the fewest requests in flight per slot; the first of equals. `endpoints` is not empty."""
    return min(endpoints, key=lambda endpoint: in_flight.get(endpoint.engine_id, 0) / endpoint.slots)


class ReadyEngines:
    """The engines that were ready a moment ago, so that the way of a request to its first token has no database in it.

    Only what serves is remembered: a model without an engine is looked up each time. Whoever finds an engine gone calls
    `forget` and asks again. The memory is this process's own.
    """

    def __init__(self) -> None:
        self._known: dict[str | None, tuple[list[EngineEndpoint], float]] = {}
        self._times_forgotten = 0

    async def of(self, model_name: str | None) -> list[EngineEndpoint]:
        """The engines that serve the model (None: the default one), never empty. Raises as `ready_engines` does."""
        known = self._known.get(model_name)
        if known is not None and time.monotonic() - known[1] < READY_CACHE_S:
            return known[0]
        asked_s, times_forgotten = time.monotonic(), self._times_forgotten
        endpoints = await in_db(engines.ready_engines, model_name)
        if len(self._known) >= MAX_CACHED_MODELS:
            self._known.clear()
        # An answer that was on its way while somebody found an engine gone may still name that engine.
        if times_forgotten == self._times_forgotten:
            self._known[model_name] = (endpoints, asked_s)
        return endpoints

    def forget(self) -> None:
        """The next question goes to the database."""
        self._known.clear()
        self._times_forgotten += 1


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
