"""Which engines serve a model, remembered for a moment by this process, and for longer while the database does not answer."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from django.db import Error as DatabaseError

from engines import loading
from engines.services import EngineEndpoint, ready_engines
from pools.db import in_db_within

# How long an engine that came up may wait for its first request while others serve.
READY_CACHE_S = 1.0
MAX_CACHED_MODELS = 256
# A database that is away or frozen: engines that were ready so lately are asked all the same, and judge themselves.
OUTAGE_S = 120.0
DATABASE_PATIENCE_S = 2.0
FIRST_PATIENCE_S = 10.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Known:
    """A model's engines as they were asked for at a time (monotonic); with `is_doubted` somebody found one of them gone since."""

    endpoints: list[EngineEndpoint]
    asked_s: float
    is_doubted: bool = False


class ReadyEngines:
    """The engines that were ready a moment ago, so that the way of a request to its first token has no database in it.

    Only what serves is remembered: a model without an engine is looked up each time. Whoever finds an engine gone calls
    `forget` and asks again. The memory is this process's own.
    """

    def __init__(self) -> None:
        self._known: dict[str | None, _Known] = {}
        self._times_forgotten = 0

    async def of(self, model_name: str | None) -> list[EngineEndpoint]:
        """The engines that serve the model (None: the default one), never empty; one is started where none is.

        Raises as `loading.engines_for` does.
        """
        known = self._known.get(model_name)
        if known is not None and not known.is_doubted and time.monotonic() - known.asked_s < READY_CACHE_S:
            return known.endpoints
        asked_s, times_forgotten = time.monotonic(), self._times_forgotten
        try:
            # Placing a model that nobody serves takes longer than looking up who does.
            patience_s = DATABASE_PATIENCE_S if _is_usable(known, asked_s) else FIRST_PATIENCE_S
            endpoints = await in_db_within(patience_s, loading.engines_for, model_name)
        except DatabaseError as error:
            # As it is now: somebody may have found one of them gone meanwhile.
            known = self._known.get(model_name)
            if known is None or not _is_usable(known, asked_s):
                raise
            logger.warning("the database does not answer, going by the engines of before: %s", error)
            return known.endpoints
        if len(self._known) >= MAX_CACHED_MODELS:
            self._known.clear()
        # An answer that was on its way while somebody found an engine gone may still name that engine.
        if times_forgotten == self._times_forgotten:
            self._known[model_name] = _Known(endpoints, asked_s)
        return endpoints

    async def refresh(self, model_name: str | None) -> list[EngineEndpoint]:
        """Look the model's engines up though nobody waits for them; none is started. Raises NoEngineReady and DatabaseError."""
        asked_s, times_forgotten = time.monotonic(), self._times_forgotten
        endpoints = await in_db_within(DATABASE_PATIENCE_S, ready_engines, model_name)
        if times_forgotten == self._times_forgotten:
            self._known[model_name] = _Known(endpoints, asked_s)
        return endpoints

    def forget(self, gone: EngineEndpoint) -> None:
        """The next question goes to the database; where that does not answer, to the others that are known."""
        for model_name, known in list(self._known.items()):
            others = [one for one in known.endpoints if one.engine_id != gone.engine_id]
            self._known[model_name] = _Known(others, known.asked_s, is_doubted=True)
        self._times_forgotten += 1


def _is_usable(known: _Known | None, now_s: float) -> bool:
    """Whether requests may go by it while the database does not answer."""
    return known is not None and bool(known.endpoints) and now_s - known.asked_s < OUTAGE_S
