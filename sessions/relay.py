"""One request on its way through the site: find an engine, pass its answer on, write down how it went.

One way for every API (`sessions.dialects`) and for the playground. Bytes are passed as they come; only frames that tell how
the answer went are read here.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any, Literal

import aiohttp

from engines import services as engines
from engines.client import READ_SILENCE_S, EngineClient
from engines.errors import EngineError, EngineUnreachable
from engines.services import EngineEndpoint
from sessions.choices import ChatSource, TurnState
from sessions.dispatch import InFlight, ReadyEngines, choose
from sessions.engine_call import EngineCall
from sessions.errors import EngineRefused
from sessions.identity import Identity
from sessions.per_loop import PerLoop
from sessions.services import TurnStart
from sessions.turn import TurnRecord, written

MAX_FRAME_BYTES = 16 << 20
MAX_ANSWER_BYTES = 64 << 20
MAX_REFUSAL_BYTES = 1 << 20
# Reading the facts of more than this would hold every other stream of the process up for too long.
READ_INLINE_BYTES = 64 << 10
EVENT_STREAM = "text/event-stream"
# Another engine may well answer what this one cannot now.
_TRY_ANOTHER = frozenset({429, 502, 503})

logger = logging.getLogger(__name__)
_in_flight = InFlight()
_ready_engines = PerLoop(ReadyEngines)


class EngineAnswer:
    """An engine's answer in the middle of coming. Read it by `raw()`, by iterating, or by `read()`, once; then `aclose()`.

    `aclose()` before the end cancels the request at the engine's next step. Whatever happens, the turn's end is written.
    """

    def __init__(
        self, response: aiohttp.ClientResponse, engine: EngineEndpoint, record: TurnRecord, request_id: uuid.UUID
    ) -> None:
        self.engine = engine
        self.request_id = request_id
        self.model_name = engine.model_name
        self.content_type = response.content_type
        self._response = response
        self._record = record
        self._closed = False
        _in_flight.enter(engine.engine_id)

    @property
    def is_stream(self) -> bool:
        return self.content_type == EVENT_STREAM

    @property
    def is_finished(self) -> bool:
        """Whether the engine said how the answer ended."""
        return self._record.is_finished

    def lost_frame(self, error: EngineError) -> bytes:
        """The frame that tells a client, in the answer's own dialect, that the stream breaks here."""
        return self._record.lost_frame(error)

    async def raw(self) -> AsyncIterator[bytes]:
        """The answer's SSE frames as the engine wrote them, always whole; an engine that dies has an error frame for its last."""
        pending = b""
        try:
            async for data in self._response.content.iter_any():
                pending += data
                end = pending.rfind(b"\n\n") + 2
                if end >= 2:
                    frames, pending = pending[:end], pending[end:]
                    self._record.saw(frames)
                    yield frames
                elif len(pending) > MAX_FRAME_BYTES:
                    raise aiohttp.ClientPayloadError("a frame without an end")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            yield self._died(error)
            return
        if self._record.is_finished:
            self._record.end(TurnState.DONE)
        else:
            # The engine ends an answer it has to give up with an error frame of its own, and then without a finish.
            self._record.end(TurnState.FAILED, "engine_error")

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        """The answer's chunks as values, without comments and without the closing [DONE]."""
        async for frames in self.raw():
            for frame in frames.split(b"\n\n"):
                if frame.startswith(b"data: {"):
                    yield json.loads(frame[6:])

    async def read(self) -> bytes:
        """The whole answer of a request that does not stream. Raises EngineUnreachable when the engine dies over it."""
        try:
            body = await _bounded(self._response, MAX_ANSWER_BYTES)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._record.end(TurnState.FAILED, EngineUnreachable.code)
            raise EngineUnreachable("The engine went away before it had answered.") from error
        if len(body) > READ_INLINE_BYTES:
            await asyncio.to_thread(self._record.saw_answer, body)
        else:
            self._record.saw_answer(body)
        self._record.end(TurnState.DONE)
        return body

    async def aclose(self) -> None:
        """Let the engine go. Safe to call again, and after the end."""
        if self._closed:
            return
        self._closed = True
        _in_flight.leave(self.engine.engine_id)
        self._record.end(TurnState.DONE if self._record.is_finished else TurnState.CANCELLED)
        if self._response.content.at_eof():
            self._response.release()
        else:
            # Not release(): that would read on. A closed connection is what tells the engine to stop.
            self._response.close()

    def _died(self, error: Exception) -> bytes:
        logger.warning(
            "engine %s was lost in the middle of an answer: %s: %s", self.engine.name, type(error).__name__, error
        )
        lost = EngineUnreachable("The engine went away in the middle of the answer.", hint="Send the request again.")
        self._record.end(TurnState.FAILED, lost.code)
        return self._record.lost_frame(lost)


async def ask_engine(
    call: EngineCall,
    identity: Identity,
    source: Literal["api", "playground"] = "api",
    *,
    request_id: uuid.UUID | None = None,
) -> EngineAnswer:
    """Send a request to an engine and return its answer as it begins to come.

    Raises ModelNotFound, NoEngineReady, EngineUnreachable, or EngineRefused with what the engine answered.
    """
    arrived_s = time.monotonic()
    request_id = request_id or uuid.uuid4()
    endpoints = await _ready_engines().of(call.model)
    engine = choose(endpoints, _in_flight.counts)
    # Written before the engine is asked: an answer in one piece begins to come only when it is done.
    start = TurnStart(request_id, identity, ChatSource(source), call.hints.title, engine.model_name, engine.engine_id)
    record = TurnRecord(start, arrived_s, call.dialect)
    try:
        response, engine = await _send(call, engine, request_id)
    except EngineError as error:
        record.end(TurnState.FAILED, error.code)
        raise
    except Exception:
        record.end(TurnState.FAILED, "internal_error")
        raise
    except BaseException:
        record.end(TurnState.CANCELLED)
        raise
    record.engine_id = engine.engine_id
    return EngineAnswer(response, engine, record, request_id)


async def _send(
    call: EngineCall, engine: EngineEndpoint, request_id: uuid.UUID
) -> tuple[aiohttp.ClientResponse, EngineEndpoint]:
    """The response of `engine`, or of the best other engine when that one cannot take the request now."""
    for last_try in (False, True):
        try:
            with _in_flight.on(engine.engine_id):
                response = await _post(call, engine, request_id)
            if response.status == 200:
                return response, engine
            refusal: EngineError = await _refusal(response)
        except EngineUnreachable as error:
            # The details name ports and hosts, which are nobody's business outside.
            logger.warning("engine %s: %s", engine.name, error)
            await written(engines.suspect, engine)
            refusal = EngineUnreachable(
                "The engine does not answer; it is being looked after.", hint="Try again shortly."
            )
        if last_try or refusal.http_status not in _TRY_ANOTHER:
            raise refusal
        others = await _others(call.model, engine, refusal)
        if not others:
            raise refusal
        logger.info("engine %s cannot take the request (%s), trying another", engine.name, refusal.code)
        engine = choose(others, _in_flight.counts)
    raise AssertionError("unreachable: the second try always returns or raises")


async def _post(call: EngineCall, engine: EngineEndpoint, request_id: uuid.UUID) -> aiohttp.ClientResponse:
    dialect = call.dialect
    return await EngineClient(engine.base_url).call(
        dialect.method,
        dialect.path,
        call.raw,
        request_id=str(request_id),
        silence_s=READ_SILENCE_S if call.stream else dialect.answer_timeout_s,
    )


async def _others(model_name: str | None, engine: EngineEndpoint, refusal: EngineError) -> list[EngineEndpoint]:
    """Who else could answer. Where `engine` is gone or going, what was known of the pool is too old to go by."""
    if refusal.http_status != 429:
        _ready_engines().forget()
    try:
        return [endpoint for endpoint in await _ready_engines().of(model_name) if endpoint != engine]
    except EngineError as nobody:
        logger.info("nobody else serves this: %s", nobody)
        return []


async def _refusal(response: aiohttp.ClientResponse) -> EngineRefused:
    try:
        body = await _bounded(response, MAX_REFUSAL_BYTES)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise EngineUnreachable("The engine went away before it had answered.") from error
    finally:
        response.close()
    return EngineRefused.of(response.status, body, response.headers.get("Retry-After"))


async def _bounded(response: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
    body = bytearray()
    async for data in response.content.iter_any():
        body += data
        if len(body) > limit_bytes:
            raise aiohttp.ClientPayloadError(f"an answer of more than {limit_bytes} bytes")
    return bytes(body)
