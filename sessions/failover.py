"""A stream whose engine is lost goes on at another one, or at the same once it is back.

The site sends what it kept of the stream (`sessions.stream_journal`) and the request; the engine takes both to where the client
stands, and writes on. One lease moves along, one budget of time holds for all of it, and only so many engines are tried: a
request that kills engines must not kill them all.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

import aiohttp

from engines import services as engines
from engines.client import READ_SILENCE_S, EngineClient
from engines.errors import EngineError, EngineUnreachable, NoEngineReady
from engines.services import EngineEndpoint
from sessions.dispatch import Wishes
from sessions.errors import PoolBusy
from sessions.relayed_request import TRY_ANOTHER, RelayedRequest, dispatcher, refusal_of
from sessions.stream_journal import StreamJournal
from sessions.turn import written

MOST_FAILOVERS = 2
# An engine that has died is up again by then, unless its model is very large.
PATIENCE_S = 90.0
PAUSE_S = 0.5
PATH_HEADER, JOURNAL_BYTES_HEADER = "X-Hydra-Path", "X-Hydra-Journal-Bytes"
ELAPSED_HEADER, FROM_HEADER = "X-Hydra-Elapsed-S", "X-Hydra-From-Event"

# Also where an engine has another model's tokens.
_ANOTHER_MAY = TRY_ANOTHER | {422}

logger = logging.getLogger(__name__)


class Failover:
    """Of one answer. `from_event`: its stream is written again from there on, for a client that another site read to."""

    def __init__(self, request: RelayedRequest, journal: StreamJournal) -> None:
        self.count = 0
        self._request, self._journal = request, journal

    async def go_on(self, lost: EngineEndpoint | None) -> aiohttp.ClientResponse:
        """The rest of the answer as it begins to come. Raises an EngineError when nobody goes on with it.

        `lost` is looked after; None where every engine did what it was asked to, and the answer is broken off all the same.
        """
        request = self._request
        if self.count >= MOST_FAILOVERS or not self._journal.can_go_on:
            raise EngineUnreachable("The engine went away in the middle of the answer.")
        self.count += 1
        who = "no engine" if lost is None else f"engine {lost.name}"
        logger.warning("%s was lost over request %s; another one goes on", who, request.request_id)
        request.record.mark("failed_over_s")
        request.step_back()
        if lost is not None:
            if not self._journal.failure:
                await written(engines.suspect, lost)
            dispatcher().lost(lost)
        async with request.in_time():
            return await self.placed(lost)

    async def placed(self, lost: EngineEndpoint | None = None, from_event: int | None = None) -> aiohttp.ClientResponse:
        """The same at whatever engine can take it, `lost` one excepted for now. Waits for one, within bounds."""
        # What was asked for the first way is not to end the request.
        wishes = replace(self._request.wishes, engine_name="", mode=None)
        until = time.monotonic() + min(PATIENCE_S, self._request.left_s)
        failed = [] if lost is None else [lost]
        while True:
            try:
                return await self._tried(failed, wishes, from_event)
            except EngineError as error:
                nobody_is_left = isinstance(error, (NoEngineReady, PoolBusy))
                if time.monotonic() + PAUSE_S > until or error.http_status not in _ANOTHER_MAY:
                    raise
                logger.info("request %s cannot go on yet: %s", self._request.request_id, error)
            if nobody_is_left:
                # An engine that was restarted is welcome again: the rows know which are ready.
                failed = []
                await asyncio.sleep(PAUSE_S)

    async def _tried(
        self, failed: list[EngineEndpoint], wishes: Wishes, from_event: int | None
    ) -> aiohttp.ClientResponse:
        """One engine's answer; adds it to `failed` before it raises."""
        request = self._request
        # One engine does the rest: the prompt is computed, or lies in a store.
        sent = await dispatcher().choose(request.call, request.identity, wishes, failed)
        request.sent = replace(sent, decode=None)
        await request.take_place()
        request.record.placed()
        engine = request.sent.endpoint
        try:
            response = await self._asked(engine, from_event)
            if response.status == 200:
                return response
            raise await refusal_of(response)
        except BaseException as error:
            failed.append(engine)
            request.step_back()
            if isinstance(error, EngineUnreachable):
                await written(engines.suspect, engine)
                dispatcher().lost(engine)
            raise

    async def _asked(self, engine: EngineEndpoint, from_event: int | None) -> aiohttp.ClientResponse:
        request, call, journal = self._request, self._request.call, self._journal
        path, body, headers = call.dialect.path, call.raw, request.headers()
        if journal.is_kept:
            path, body = "/continue", bytes(journal.lines) + call.raw
            headers[PATH_HEADER] = call.dialect.path
            headers[JOURNAL_BYTES_HEADER] = str(len(journal.lines))
            headers[ELAPSED_HEADER] = f"{time.monotonic() - request.arrived_s:.3f}"
            if from_event is not None:
                headers[FROM_HEADER] = str(from_event)
        return await EngineClient(engine.base_url, engine.secret).call(
            call.dialect.method,
            path,
            body,
            request_id=str(request.request_id),
            silence_s=READ_SILENCE_S,
            headers=headers,
        )
