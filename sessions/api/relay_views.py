"""The endpoints that an engine answers: read the call, find out who asks, pass the answer on."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

from django.conf import settings
from django.http import HttpRequest, HttpResponse, HttpResponseBase, StreamingHttpResponse

from engines.errors import BodyTooLarge, InvalidRequest, ModelLoading
from sessions import load_wait
from sessions.api.answers import View, endpoint
from sessions.api.auth import authenticate
from sessions.api.operations import Operation
from sessions.api.route_headers import describe, idempotency_key, switch, trace_id, wishes
from sessions.dialects import Dialect
from sessions.engine_call import EngineCall
from sessions.identity import Identity
from sessions.kept_stream import KeptStream
from sessions.relay import EVENT_STREAM, EngineAnswer, ask_engine
from sessions.request_timeline import tell_refused
from sessions.shared_answer import SharedReader, lease_name, may_share, shared_answers
from sessions.stream_desk import stream_desk

# Parsing more than this would hold every other stream of the process up for too long.
PARSE_INLINE_BYTES = 64 << 10
MAX_CONVERSATION_CHARS = 256
RESUMABLE_HEADER = "X-Hydra-Resumable"
CONVERSATION_HEADER = "X-Conversation-Id"


def relay_view(dialect: Dialect, operation: Operation) -> View:
    """The endpoint of a dialect's path. A body is JSON whatever its Content-Type says."""

    @endpoint(dialect.method, operations={dialect.method: operation}, error_body=dialect.form.error_body)
    async def view(request: HttpRequest) -> HttpResponseBase:
        arrived_s = time.monotonic()
        owner = await authenticate(request)
        call = await _read(dialect, request)
        identity = Identity.of(owner, {name.lower(): value for name, value in request.headers.items()}, call.hints)
        idempotency, wished = idempotency_key(request), wishes(request, owner)
        lease = lease_name(identity, idempotency) if call.dialect.is_turn else ""
        if _wants_resumable(request, call):
            name = request.headers.get(CONVERSATION_HEADER, "").strip()[:MAX_CONVERSATION_CHARS]
            return stream_response(await stream_desk().begin(call, identity, name, wished, lease), 0)
        ask = partial(
            ask_engine, call, identity, wishes=wished, idempotency=lease, may_wait=call.stream, since_s=arrived_s
        )
        try:
            if may_share(call, idempotency):
                return await _answer(await shared_answers().join(call, identity, idempotency, ask), trace_id(request))
            return await _answer(await ask(), trace_id(request))
        except ModelLoading as loading:
            if not call.stream:
                raise
            return _waiting(call, identity, ask, loading, trace_id(request), arrived_s + wished.budget_s)

    return view


def _waiting(
    call: EngineCall,
    identity: Identity,
    ask: Callable[..., Awaitable[EngineAnswer]],
    loading: ModelLoading,
    trace: str,
    deadline_s: float,
) -> HttpResponseBase:
    """A stream whose headers leave before anybody knows its route: they name the request, and its event says so."""
    request_id, now_s = uuid.uuid4(), time.monotonic()
    again = partial(ask, request_id=request_id, headers_sent_s=now_s)
    gave_up = partial(tell_refused, call, identity, request_id, arrived_s=now_s, headers_sent_s=now_s)
    response = _streaming(load_wait.frames(call, again, loading, gave_up, deadline_s=deadline_s))
    describe(response, str(request_id), None, trace)
    if call.dialect.is_turn:
        response["X-Hydra-Session"] = identity.key_hash
    return response


def stream_response(stream: KeptStream, position: int) -> HttpResponseBase:
    """A kept stream's events from `position` on."""
    response = _streaming(stream.read(position))
    describe(response, str(stream.request_id), stream.answer)
    return response


async def _read(dialect: Dialect, request: HttpRequest) -> EngineCall:
    if dialect.method == "GET":
        return EngineCall(dialect, b"", request.GET.get("model") or None)
    raw = request.body
    if len(raw) > settings.HYDRA_MAX_BODY_BYTES:
        raise BodyTooLarge(f"The request body is larger than {settings.HYDRA_MAX_BODY_BYTES} bytes.")
    if len(raw) <= PARSE_INLINE_BYTES:
        return dialect.read(raw)
    return await asyncio.to_thread(dialect.read, raw)


def _wants_resumable(request: HttpRequest, call: EngineCall) -> bool:
    """Whether the answer is to outlive this connection. Raises InvalidRequest where that cannot be."""
    wanted = switch(request, RESUMABLE_HEADER) or call.resumable
    if wanted and not call.stream:
        raise InvalidRequest("Only a stream can be resumed: send stream: true.", param="resumable")
    return wanted


async def _answer(answer: EngineAnswer | SharedReader, trace: str) -> HttpResponseBase:
    if answer.is_stream:
        response = _streaming(_frames(answer))
    else:
        try:
            response = HttpResponse(await answer.read(), content_type=answer.content_type)
        finally:
            await answer.aclose()
    describe(response, str(answer.request_id), answer.answer if isinstance(answer, SharedReader) else answer, trace)
    return response


def _streaming(frames: AsyncIterator[bytes]) -> HttpResponseBase:
    response = StreamingHttpResponse(frames, content_type=EVENT_STREAM)
    response["Cache-Control"] = "no-cache"
    response["X-Accel-Buffering"] = "no"
    return response


async def _frames(answer: EngineAnswer | SharedReader) -> AsyncIterator[bytes]:
    # A client that leaves has this generator cancelled or closed; either way the engine is let go at once.
    try:
        async for frames in answer.raw():
            yield frames
    finally:
        await answer.aclose()
