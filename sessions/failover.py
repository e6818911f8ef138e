"""A stream whose engine is lost goes on at another one, or at the same once it is back.

The site sends what it kept of the stream (`sessions.stream_journal`) and the request; the engine takes both to where the client
stands, and writes on. One lease moves along, one budget of time holds for all of it, and only so many engines are tried: a
request that kills engines must not kill them all.

An engine whose context holds less than the answer may need refuses, and another one is asked. Where there is none for a while,
the answer goes on as far as it fits: one that ends early is better than one that breaks off.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

import aiohttp
from django.db import Error as DatabaseError

from engines import services as engines
from engines.client import READ_SILENCE_S, EngineClient
from engines.errors import (
    ContextLengthExceeded,
    ContextTooShort,
    EngineError,
    EngineStopping,
    EngineUnreachable,
    NoEngineReady,
)
from engines.services import EngineEndpoint
from sessions.dispatch import Wishes
from sessions.errors import PoolBusy
from sessions.relayed_request import TRY_ANOTHER, RelayedRequest, dispatcher, refusal_of
from sessions.stream_journal import StreamJournal
from sessions.turn import written

MOST_FAILOVERS = 2
# Engines that were stopped one after the other, as for an upgrade of all, and said so: no request does that.
MOST_STOPS = 16
# An engine that has died is up again by then, unless its model is very large.
PATIENCE_S = 90.0
PAUSE_S = 0.5
# So long an engine is waited for that surely does not cut the answer: where a client said how long it may be, and where it is as
# long as fits, which few are.
BOUNDED_PATIENCE_S, UNBOUNDED_PATIENCE_S = 30.0, 2.0
PATH_HEADER, JOURNAL_BYTES_HEADER = "X-Hydra-Path", "X-Hydra-Journal-Bytes"
ELAPSED_HEADER, FROM_HEADER = "X-Hydra-Elapsed-S", "X-Hydra-From-Event"
MAY_CUT_HEADER = "X-Hydra-May-Cut"

# Also where an engine has another model's tokens.
_ANOTHER_MAY = TRY_ANOTHER | {422}

logger = logging.getLogger(__name__)


class Failover:
    """Of one answer. `from_event`: its stream is written again from there on, for a client that another site read to."""

    def __init__(self, request: RelayedRequest, journal: StreamJournal) -> None:
        self._lost_count = self._stop_count = 0
        self._request, self._journal = request, journal

    async def go_on(self, lost: EngineEndpoint | None) -> aiohttp.ClientResponse:
        """The rest of the answer as it begins to come. Raises an EngineError when nobody goes on with it.

        `lost` is looked after; None where every engine did what it was asked to, and the answer is broken off all the same.
        """
        request = self._request
        if self._has_lost_too_many() or not self._journal.can_go_on:
            raise EngineUnreachable("The engine went away in the middle of the answer.")
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

    def _has_lost_too_many(self) -> bool:
        """Counts the engine that is lost now."""
        if self._journal.failure == EngineStopping.code:
            self._stop_count += 1
            return self._stop_count > MOST_STOPS
        self._lost_count += 1
        return self._lost_count > MOST_FAILOVERS

    async def placed(self, lost: EngineEndpoint | None = None, from_event: int | None = None) -> aiohttp.ClientResponse:
        """The same at whatever engine can take it, `lost` one excepted for now. Waits for one, within bounds."""
        # What was asked for the first way is not to end the request.
        wishes = replace(self._request.wishes, engine_name="", mode=None)
        until = time.monotonic() + min(PATIENCE_S, self._request.left_s)
        whole_until = time.monotonic() + self._whole_patience_s
        failed = [] if lost is None else [lost]
        short, out = list[EngineEndpoint](), list[EngineEndpoint]()
        while True:
            try:
                return await self._tried(failed, wishes, from_event)
            except DatabaseError as error:
                # Who serves nobody can tell for now.
                nobody_is_left = True
                logger.info("request %s cannot go on yet: %s", self._request.request_id, error)
                if time.monotonic() + PAUSE_S > until:
                    raise
            except EngineError as error:
                nobody_is_left = isinstance(error, (NoEngineReady, PoolBusy))
                is_late = time.monotonic() + PAUSE_S > until
                if error.code in (ContextTooShort.code, ContextLengthExceeded.code):
                    out.append(failed[-1])
                    # The others do not even hold the prompt.
                    short += out[-1:] if error.code == ContextTooShort.code else []
                elif error.http_status not in _ANOTHER_MAY:
                    raise
                logger.info("request %s cannot go on yet: %s", self._request.request_id, error)
                if short and (is_late or (nobody_is_left and time.monotonic() > whole_until)):
                    response = await self._cut(short, wishes, from_event)
                    if response is not None:
                        return response
                if is_late:
                    raise
            if nobody_is_left:
                # An engine that was restarted is welcome again: the rows know which are ready.
                failed = list(out)
                await asyncio.sleep(PAUSE_S)

    @property
    def _whole_patience_s(self) -> float:
        return UNBOUNDED_PATIENCE_S if self._request.call.hints.most_output_tokens is None else BOUNDED_PATIENCE_S

    async def _cut(
        self, short: list[EngineEndpoint], wishes: Wishes, from_event: int | None
    ) -> aiohttp.ClientResponse | None:
        """The rest of the answer as far as it fits, from the one of them with the longest context; None where none takes it."""
        for engine in sorted(short, key=lambda one: one.context_tokens, reverse=True):
            try:
                response = await self._tried([], replace(wishes, engine_name=engine.name), from_event, may_cut=True)
            except (EngineError, DatabaseError) as error:
                logger.info("request %s cannot go on at engine %s: %s", self._request.request_id, engine.name, error)
                continue
            self._request.record.mark("shorter_context_s")
            logger.warning(
                "request %s goes on at engine %s, whose context holds less than the answer may need: it may end early",
                self._request.request_id,
                engine.name,
            )
            return response
        return None

    async def _tried(
        self, failed: list[EngineEndpoint], wishes: Wishes, from_event: int | None, *, may_cut: bool = False
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
            response = await self._asked(engine, from_event, may_cut)
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

    async def _asked(self, engine: EngineEndpoint, from_event: int | None, may_cut: bool) -> aiohttp.ClientResponse:
        request, call, journal = self._request, self._request.call, self._journal
        path, body, headers = call.dialect.path, call.raw, request.headers()
        if journal.is_kept:
            path, body = "/continue", bytes(journal.lines) + call.raw
            headers[PATH_HEADER] = call.dialect.path
            headers[JOURNAL_BYTES_HEADER] = str(len(journal.lines))
            headers[ELAPSED_HEADER] = f"{time.monotonic() - request.arrived_s:.3f}"
            if from_event is not None:
                headers[FROM_HEADER] = str(from_event)
            if may_cut:
                headers[MAY_CUT_HEADER] = "1"
        return await EngineClient(engine.base_url, engine.secret).call(
            call.dialect.method,
            path,
            body,
            request_id=str(request.request_id),
            silence_s=READ_SILENCE_S,
            headers=headers,
        )
