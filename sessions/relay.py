"""One chat request on its way through the site: find an engine, pass its answer on, write down how it went.

The API and the playground both use `open_chat`. Bytes are passed as they come; only closing frames are read here.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any, Literal

import aiohttp

from engines import services as engines
from engines.api_schema import ChatRequest
from engines.client import EngineClient
from engines.errors import EngineError, EngineUnreachable, ModelNotFound
from engines.services import EngineEndpoint
from pools.db import in_db
from sessions.choices import ChatSource, TurnState
from sessions.dispatch import InFlight, choose
from sessions.errors import EngineRefused
from sessions.identity import Identity, title_of
from sessions.services import TurnStart
from sessions.turn import TurnRecord

__all__ = ["ChatStream", "Identity", "open_chat"]

MAX_MODEL_CHARS = 128
MAX_FRAME_BYTES = 16 << 20
MAX_ANSWER_BYTES = 64 << 20
MAX_REFUSAL_BYTES = 1 << 20
# Another engine may well answer what this one cannot now.
_TRY_ANOTHER = frozenset({429, 502, 503})

logger = logging.getLogger(__name__)
_in_flight = InFlight()


class ChatStream:
    """An engine's answer in the middle of coming. Read it by `raw()`, by iterating, or by `read()`, once; then `aclose()`.

    `aclose()` before the end cancels the request at the engine's next step. Whatever happens, the turn's end is written.
    """

    def __init__(
        self, response: aiohttp.ClientResponse, engine: EngineEndpoint, record: TurnRecord, request_id: uuid.UUID
    ) -> None:
        self.engine = engine
        self.request_id = request_id
        self.model_name = engine.model_name
        self._response = response
        self._record = record
        self._closed = False
        _in_flight.enter(engine.engine_id)

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
        return b"data: " + json.dumps(lost.body()).encode() + b"\n\n"


async def open_chat(
    body: ChatRequest, identity: Identity, source: Literal["api", "playground"] = "api", *, raw: bytes | None = None
) -> ChatStream:
    """Send a chat request to an engine and return its answer as it begins to come.

    `raw` is the body as it arrived, passed on unchanged; without it `body` is written anew. Raises ModelNotFound,
    NoEngineReady, EngineUnreachable, or EngineRefused with what the engine answered.
    """
    arrived_s = time.monotonic()
    request_id = uuid.uuid4()
    if body.model is not None and not (body.model.isprintable() and len(body.model) <= MAX_MODEL_CHARS):
        raise ModelNotFound("The model's name holds control characters or is too long.", param="model")
    endpoints = await in_db(engines.ready_engines, body.model)
    payload = body.model_dump_json(exclude_unset=True).encode() if raw is None else raw
    engine = choose(endpoints, _in_flight.counts)
    # Written before the engine is asked: an answer in one piece begins to come only when it is done.
    start = TurnStart(request_id, identity, ChatSource(source), title_of(body), engine.model_name, engine.engine_id)
    record = TurnRecord(start, arrived_s)
    try:
        response, engine = await _send(engine, endpoints, payload, request_id, stream=body.stream)
    except EngineError as error:
        record.end(TurnState.FAILED, error.code)
        raise
    except BaseException:
        record.end(TurnState.CANCELLED)
        raise
    record.engine_id = engine.engine_id
    return ChatStream(response, engine, record, request_id)


async def _send(
    engine: EngineEndpoint, endpoints: list[EngineEndpoint], payload: bytes, request_id: uuid.UUID, *, stream: bool
) -> tuple[aiohttp.ClientResponse, EngineEndpoint]:
    """The response of `engine`, or of the best other endpoint when that one cannot take the request now."""
    others = [endpoint for endpoint in endpoints if endpoint != engine]
    for last_try in (False, True):
        try:
            with _in_flight.on(engine.engine_id):
                response = await EngineClient(engine.base_url).chat(payload, request_id=str(request_id), stream=stream)
            if response.status == 200:
                return response, engine
            refusal: EngineError = await _refusal(response)
        except EngineUnreachable as error:
            # The details name ports and hosts, which are nobody's business outside.
            logger.warning("engine %s: %s", engine.name, error)
            await in_db(engines.suspect, engine.engine_id)
            refusal = EngineUnreachable(
                "The engine does not answer; it is being looked after.", hint="Try again shortly."
            )
        if last_try or not others or refusal.http_status not in _TRY_ANOTHER:
            raise refusal
        logger.info("engine %s cannot take the request (%s), trying another", engine.name, refusal.code)
        engine = choose(others, _in_flight.counts)
    raise AssertionError("unreachable: the second try always returns or raises")


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
