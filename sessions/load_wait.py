"""Requests that wait for their model to be loaded: one question to the database for all of them, and pings meanwhile.

A streamed request is answered at once with comments that say how far the model is, and goes on as if nothing had been. One that
wants its answer in a piece is refused with Retry-After (ModelLoading), since nothing can be said in the middle of waiting.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from django.db import Error as DatabaseError

from engines import loading
from engines.errors import DeadlineExceeded, EngineError, ModelLoading, Unavailable
from pools.db import in_db
from sessions.engine_call import EngineCall
from sessions.per_loop import PerLoop
from sessions.relay import EngineAnswer

POLL_S = 0.3
# Well below the silence after which clients and proxies give up.
PING_S = 2.0
# Draining may take its time, and so may a large file.
WAIT_LIMIT_S = 1200.0
# A database that is started anew is back by then.
DATABASE_AWAY_S = 60.0

Ask = Callable[[], Awaitable[EngineAnswer]]
GaveUp = Callable[[EngineError], None]

logger = logging.getLogger(__name__)


class LoadBoard:
    """Which models are waited for, and what was last heard of them. Used on one event loop only."""

    def __init__(self) -> None:
        self._watches: dict[str | None, asyncio.Task[None]] = {}
        self._waiters: dict[str | None, int] = {}
        self.news: dict[str | None, dict[str, object]] = {}

    async def loaded(self, model: str | None) -> None:
        """Return once an engine serves the model. Raises what ends the hope of it. Nobody polls once nobody waits."""
        self._waiters[model] = self._waiters.get(model, 0) + 1
        if model not in self._watches or self._watches[model].done():
            self._watches[model] = asyncio.create_task(self._watch(model), name=f"load of {model}")
        watch = self._watches[model]
        try:
            await asyncio.shield(watch)
        finally:
            self._waiters[model] -= 1
            if not self._waiters[model]:
                del self._waiters[model]
                self.news.pop(model, None)
                if self._watches.get(model) is watch:
                    del self._watches[model]
                watch.cancel()

    async def _watch(self, model: str | None) -> None:
        away_until_s = math.inf
        while True:
            try:
                await in_db(loading.engines_for, model)
            except ModelLoading as still:
                self.news[model], away_until_s = still.loading, math.inf
            except DatabaseError as error:
                away_until_s = min(away_until_s, time.monotonic() + DATABASE_AWAY_S)
                _require_back(away_until_s, error)
            else:
                return
            await asyncio.sleep(POLL_S)


load_board = PerLoop(LoadBoard)


async def answered(
    call: EngineCall,
    ask: Ask,
    tell: Callable[[dict[str, object]], Awaitable[None]],
    gave_up: GaveUp = lambda _error: None,
    *,
    deadline_s: float = math.inf,
    still: ModelLoading | None = None,
) -> EngineAnswer:
    """The answer, as soon as an engine can give one; `tell` hears every PING_S how far its model is. Raises as `ask` does.

    `gave_up` hears of what ended the waiting while nobody was asked. Loading is a part of the request's time, which is up at
    `deadline_s` (monotonic): then it raises DeadlineExceeded. Whoever waits, as by `still` already, waits for a database too that
    is away for a moment.
    """
    limit_s = time.monotonic() + WAIT_LIMIT_S
    while True:
        try:
            return await ask()
        except (ModelLoading, DatabaseError) as error:
            still = error if isinstance(error, ModelLoading) else still
            if still is None:
                raise
            try:
                async with asyncio.timeout(max(0.0, min(deadline_s, limit_s) - time.monotonic())) as patience:
                    await _loaded(call.model, still.loading, tell)
            except EngineError as over:
                gave_up(over)
                raise
            except TimeoutError:
                if not patience.expired():
                    raise
                late = still if limit_s < deadline_s else _time_up()
                gave_up(late)
                raise late from None


def _require_back(until_s: float, error: DatabaseError) -> None:
    """Whoever waits anyway waits for the database too, until then (monotonic). Raises Unavailable."""
    if time.monotonic() + POLL_S > until_s:
        raise Unavailable("The site's database does not answer right now.") from error
    logger.info("how far a model is nobody can tell, the database does not answer: %s", error)


def _time_up() -> EngineError:
    return DeadlineExceeded(
        "The request's time was up before its model was loaded.",
        hint="Give it more time with X-Hydra-Timeout, or send it again when the model is there.",
    )


async def _loaded(
    model: str | None, news: dict[str, object], tell: Callable[[dict[str, object]], Awaitable[None]]
) -> None:
    board = load_board()
    waiting = asyncio.ensure_future(board.loaded(model))
    try:
        while True:
            await tell(board.news.get(model, news))
            await asyncio.wait({waiting}, timeout=PING_S)
            if waiting.done():
                return waiting.result()
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def frames(
    call: EngineCall,
    ask: Ask,
    first: ModelLoading,
    gave_up: GaveUp = lambda _error: None,
    *,
    deadline_s: float = math.inf,
) -> AsyncIterator[bytes]:
    """A streamed answer's frames, and before them comments while its model is loaded; a failure is its last frame."""
    queue: asyncio.Queue[bytes] = asyncio.Queue(maxsize=8)
    yield comment(first.loading)

    async def tell(news: dict[str, object]) -> None:
        await queue.put(comment(news))

    opening = asyncio.ensure_future(answered(call, ask, tell, gave_up, deadline_s=deadline_s, still=first))
    answer: EngineAnswer | None = None
    try:
        while not opening.done():
            upcoming = asyncio.ensure_future(queue.get())
            await asyncio.wait({opening, upcoming}, return_when=asyncio.FIRST_COMPLETED)
            if upcoming.done():
                yield upcoming.result()
            upcoming.cancel()
        try:
            answer = opening.result()
        except EngineError as error:
            yield call.dialect.form.lost_frame(error, 0)
            return
        async for block in answer.raw():
            yield block
    finally:
        await _ended(opening, answer)


async def _ended(opening: asyncio.Future[EngineAnswer], answer: EngineAnswer | None) -> None:
    """However it ended, the engine is let go: also one that answered in the moment in which the client left."""
    if answer is None:
        opening.cancel()
        (outcome,) = await asyncio.gather(opening, return_exceptions=True)
        answer = outcome if isinstance(outcome, EngineAnswer) else None
    if answer is not None:
        await answer.aclose()


def comment(news: dict[str, Any]) -> bytes:
    """An SSE comment, which every client passes over, that says how far a model is."""
    return b": loading " + json.dumps(news, separators=(",", ":")).encode() + b"\n\n"
