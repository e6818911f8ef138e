"""The API's endpoints that the site answers itself: models, the API's description, and whatever is not there."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponseBase, JsonResponse

from engines.errors import ModelNotFound
from engines.services import EngineView, engine_views
from pools.db import in_db
from pools.services import ModelView, model_views
from sessions.api.answers import endpoint
from sessions.api.auth import authenticate
from sessions.api.operations import Operation, Parameter
from sessions.errors import PathUnknown

_STATUS = {"ready": "loaded", "unhealthy": "loaded", "starting": "loading"}
_STATUS_ORDER = ("loaded", "loading", "unloaded")
_OUTPUTS = {"embedding": "embedding", "rerank": "score"}
_NAME = Parameter("name", "path", "The model's name.")


@endpoint("GET", "HEAD", operations={"GET": Operation("All models, the default first", "models")})
async def models(request: HttpRequest) -> HttpResponseBase:
    """GET /v1/models: every model of the pool, the default first."""
    await authenticate(request)
    return JsonResponse({"object": "list", "data": await in_db(_model_objects)})


@endpoint("GET", "HEAD", operations={"GET": Operation("One model", "models", None, (_NAME,), statuses=(404,))})
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


def _model_objects(name: str | None = None) -> list[dict[str, Any]]:
    engines = engine_views()
    return [
        _model_object(view, [engine for engine in engines if engine.model_name == view.name])
        for view in model_views(name)
    ]


def _model_object(view: ModelView, engines: list[EngineView]) -> dict[str, Any]:
    """A model as OpenAI's clients expect it, with llama.cpp's `meta`, a status and what it is good for beside it."""
    states = {_STATUS.get(engine.state, "unloaded") for engine in engines} or {"unloaded"}
    contexts = [engine.context_tokens for engine in engines]
    return {
        "id": view.name,
        "object": "model",
        "created": int(view.created_at.timestamp()),
        "owned_by": "hydra",
        "display_name": view.display_name,
        "default": view.is_default,
        "aliases": [],
        "capabilities": list(view.capabilities),
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
            "input_modalities": ["text", "image"] if "vision" in view.capabilities else ["text"],
            "output_modalities": [_OUTPUTS.get(view.capabilities[0], "text")],
        },
        "status": {"value": next(status for status in _STATUS_ORDER if status in states)},
    }
