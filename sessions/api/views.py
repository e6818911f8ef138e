"""The API's endpoints: parse, call, answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from django.conf import settings
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse, StreamingHttpResponse

from engines.api_schema import ChatRequest, parse_chat_request
from engines.errors import BodyTooLarge, ModelNotFound
from engines.services import EngineView, engine_views
from pools.db import in_db
from pools.services import ModelView, model_views
from sessions.api.answers import endpoint
from sessions.api.auth import authenticate
from sessions.errors import PathUnknown
from sessions.identity import Identity
from sessions.relay import ChatStream, open_chat

# Parsing more than this would hold every other stream of the process up for too long.
PARSE_INLINE_BYTES = 64 << 10
_STATUS = {"ready": "loaded", "unhealthy": "loaded", "starting": "loading"}
_STATUS_ORDER = ("loaded", "loading", "unloaded")


@endpoint("POST")
async def chat_completions(request: HttpRequest) -> HttpResponseBase:
    """POST /v1/chat/completions, streamed or in one piece. The body is JSON whatever its Content-Type says."""
    owner = await authenticate(request)
    raw = request.body
    body = await _parse(raw)
    headers = {name.lower(): value for name, value in request.headers.items()}
    stream = await open_chat(body, Identity.of(owner, headers, body), "api", raw=raw)
    if body.stream:
        response: HttpResponseBase = StreamingHttpResponse(_frames(stream), content_type="text/event-stream")
        response["Cache-Control"] = "no-cache"
        response["X-Accel-Buffering"] = "no"
    else:
        try:
            response = HttpResponse(await stream.read(), content_type="application/json")
        finally:
            await stream.aclose()
    response["X-Request-Id"] = str(stream.request_id)
    response["X-Hydra-Engine"] = stream.engine.name
    response["X-Hydra-Model"] = stream.model_name
    return response


@endpoint("GET", "HEAD")
async def models(request: HttpRequest) -> HttpResponseBase:
    """GET /v1/models: every model of the pool, the default first."""
    await authenticate(request)
    return JsonResponse({"object": "list", "data": await in_db(_model_objects)})


@endpoint("GET", "HEAD")
async def model(request: HttpRequest, name: str) -> HttpResponseBase:
    """GET /v1/models/{id}: one model."""
    await authenticate(request)
    found = await in_db(_model_objects, name) if name.isprintable() else []
    if not found:
        raise ModelNotFound(f"The model {name!r} does not exist.", param="model")
    return JsonResponse(found[0])


@endpoint("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
async def unknown(request: HttpRequest, path: str = "") -> HttpResponseBase:
    """Whatever else lies under /v1."""
    raise PathUnknown(f"{request.path} is not served.")


async def _parse(raw: bytes) -> ChatRequest:
    if len(raw) > settings.HYDRA_MAX_BODY_BYTES:
        raise BodyTooLarge(f"The request body is larger than {settings.HYDRA_MAX_BODY_BYTES} bytes.")
    if len(raw) <= PARSE_INLINE_BYTES:
        return parse_chat_request(raw)
    return await asyncio.to_thread(parse_chat_request, raw)


async def _frames(stream: ChatStream) -> AsyncIterator[bytes]:
    # A client that leaves has this generator cancelled or closed; either way the engine is let go at once.
    try:
        async for frames in stream.raw():
            yield frames
    finally:
        await stream.aclose()


def _model_objects(name: str | None = None) -> list[dict[str, Any]]:
    engines = engine_views()
    return [
        _model_object(view, [engine for engine in engines if engine.model_name == view.name])
        for view in model_views(name)
    ]


def _model_object(view: ModelView, engines: list[EngineView]) -> dict[str, Any]:
    """A model as OpenAI's clients expect it, with llama.cpp's `meta` and a status beside it."""
    states = {_STATUS.get(engine.state, "unloaded") for engine in engines} or {"unloaded"}
    contexts = [engine.context_tokens for engine in engines]
    return {
        "id": view.name,
        "object": "model",
        "created": int(view.created_at.timestamp()),
        "owned_by": "hydra",
        "display_name": view.display_name,
        "default": view.is_default,
        "meta": {
            "n_ctx": max(contexts, default=None),
            "n_ctx_train": view.context_train_tokens,
            "n_params": view.parameter_count,
            "size": view.size_bytes,
            "n_vocab": view.header.get("vocab_size"),
            "n_embd": view.header.get("embedding_length"),
        },
        "architecture": {
            "name": view.header.get("architecture"),
            "input_modalities": ["text"],
            "output_modalities": ["text"],
        },
        "status": {"value": next(status for status in _STATUS_ORDER if status in states)},
    }
