"""What requests are routed by is looked up beside them: while people use a model, its engines and their rates stay known.

A conversation at a person's pace would else find everything a second too old, and wait for the database and the engines each
time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from django.db import Error as DatabaseError

from engines.errors import EngineError

# A little less than what is known counts for.
EVERY_S = 0.5
# Somebody who reads an answer comes back within this.
USED_S = 120.0
# So many models at most, those used last.
MOST_MODELS = 16

logger = logging.getLogger(__name__)


class PoolWatch:
    """Used on one event loop only. `kept` says whether this process watches at all: only a site does.

    `look` looks a model's engines and rates up; it raises DatabaseError or EngineError where it cannot.
    """

    kept = False

    def __init__(self, look: Callable[[str | None], Awaitable[None]]) -> None:
        self._look = look
        self._used: dict[str | None, float] = {}
        self._watching: asyncio.Task[None] | None = None

    def used(self, model: str | None) -> None:
        """A request for the model has come, and more may."""
        if not self.kept:
            return
        self._used.pop(model, None)
        self._used[model] = time.monotonic()
        if len(self._used) > MOST_MODELS:
            del self._used[next(iter(self._used))]
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch(), name="pool-watch")

    async def close(self) -> None:
        """Ends the watch; for a site that is about to stop."""
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _watch(self) -> None:
        try:
            while self._used:
                await asyncio.sleep(EVERY_S)
                due_s = time.monotonic() - USED_S
                self._used = {model: used_s for model, used_s in self._used.items() if used_s > due_s}
                for model in list(self._used):
                    await self._look_at(model)
        finally:
            self._watching = None

    async def _look_at(self, model: str | None) -> None:
        try:
            await self._look(model)
        except (DatabaseError, EngineError) as error:
            # The next request asks for itself, and says so.
            logger.debug("the engines of %s are not known now: %s", model, error)
            self._used.pop(model, None)
