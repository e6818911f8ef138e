"""The endpoints that an engine answers: read the call, find out who asks, pass the answer on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from django.conf import settings
from django.http import HttpRequest, HttpResponse, HttpResponseBase, StreamingHttpResponse

from engines.errors import BodyTooLarge, InvalidRequest
from sessions.api.answers import View, endpoint
from sessions.api.auth import authenticate
from sessions.api.operations import Operation
from sessions.dialects import Dialect
from sessions.engine_call import EngineCall
from sessions.identity import Identity
from sessions.kept_stream import KeptStream
from sessions.relay import EVENT_STREAM, EngineAnswer, ask_engine
from sessions.stream_desk import stream_desk

# Parsing more than this would hold every other stream of the process up for too long.
PARSE_INLINE_BYTES = 64 << 10
MAX_CONVERSATION_CHARS = 256
RESUMABLE_HEADER = "X-Hydra-Resumable"
CONVERSATION_HEADER = "X-Conversation-Id"
_SWITCH = {"": False, "0": False, "false": False, "1": True, "true": True}


def relay_view(dialect: Dialect, operation: Operation) -> View:
    """The endpoint of a dialect's path. A body is JSON whatever its Content-Type says."""

    @endpoint(dialect.method, operations={dialect.method: operation}, error_body=dialect.form.error_body)
    async def view(request: HttpRequest) -> HttpResponseBase:
        owner = await authenticate(request)
        call = await _read(dialect, request)
        identity = Identity.of(owner, {name.lower(): value for name, value in request.headers.items()}, call.hints)
        if _wants_resumable(request, call):
            name = request.headers.get(CONVERSATION_HEADER, "").strip()[:MAX_CONVERSATION_CHARS]
            return stream_response(await stream_desk().begin(call, identity, name), 0)
        return await _answer(await ask_engine(call, identity))

    return view


def stream_response(stream: KeptStream, position: int) -> HttpResponseBase:
    """A kept stream's events from `position` on."""
    return _described(_streaming(stream.read(position)), str(stream.request_id), stream.answer)


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
    header = request.headers.get(RESUMABLE_HEADER, "").strip().lower()
    if header not in _SWITCH:
        raise InvalidRequest(f"{RESUMABLE_HEADER} must be 1 or 0.", param=RESUMABLE_HEADER)
    wanted = call.resumable or _SWITCH[header]
    if wanted and not call.stream:
        raise InvalidRequest("Only a stream can be resumed: send stream: true.", param="resumable")
    return wanted


async def _answer(answer: EngineAnswer) -> HttpResponseBase:
    if answer.is_stream:
        response = _streaming(_frames(answer))
    else:
        try:
            response = HttpResponse(await answer.read(), content_type=answer.content_type)
        finally:
            await answer.aclose()
    return _described(response, str(answer.request_id), answer)


def _streaming(frames: AsyncIterator[bytes]) -> HttpResponseBase:
    response = StreamingHttpResponse(frames, content_type=EVENT_STREAM)
    response["Cache-Control"] = "no-cache"
    response["X-Accel-Buffering"] = "no"
    return response


def _described(response: HttpResponseBase, request_id: str, answer: EngineAnswer | None) -> HttpResponseBase:
    # Anthropic's clients look for the second name.
    response["X-Request-Id"] = response["request-id"] = request_id
    if answer is not None:
        response["X-Hydra-Engine"] = answer.engine.name
        response["X-Hydra-Model"] = answer.model_name
    return response


async def _frames(answer: EngineAnswer) -> AsyncIterator[bytes]:
    # A client that leaves has this generator cancelled or closed; either way the engine is let go at once.
    try:
        async for frames in answer.raw():
            yield frames
    finally:
        await answer.aclose()
