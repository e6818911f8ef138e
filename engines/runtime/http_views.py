"""What an engine tells about itself: health, its model, its settings, its slots and its counters."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import llama_cpp
from aiohttp import web

from engines.config import EngineConfig, SlotView
from engines.errors import ModelNotFound
from engines.runtime.llama import Llama
from engines.runtime.metrics import CONTENT_TYPE
from engines.runtime.operations import NEEDS_MODEL, Operation, Parameter

BUILD_INFO = f"hydra, llama-cpp-python {llama_cpp.__version__}"
ALIVE = ("loading", "ready")
# What comes out of a model, by the configuration's pooling.
OUTPUTS = {"": "text", "mean": "embedding", "cls": "embedding", "last": "embedding", "rank": "score"}


class ViewedMetrics(Protocol):
    def text(self) -> bytes: ...


class ViewedCore(Protocol):
    """What a view needs of a core, whether it generates or pools."""

    state: str
    load_share: float

    @property
    def llama(self) -> Llama | None: ...
    @property
    def metrics(self) -> ViewedMetrics: ...
    def views(self) -> list[SlotView]: ...


class Viewed(Protocol):
    """A served model: its configuration, its core, and the loaded model or the error that says why there is none."""

    @property
    def config(self) -> EngineConfig: ...
    @property
    def core(self) -> ViewedCore: ...
    @property
    def llama(self) -> Llama: ...


class Views:
    """Answers without waiting for the core. While the model loads, /health says so and how far it is."""

    def __init__(self, viewed: Viewed) -> None:
        self._viewed = viewed
        self._config = viewed.config
        self._core = viewed.core
        self._started_at = int(time.time())

    def operations(self) -> list[Operation]:
        full = Parameter("fail_on_no_slot", "query", {"type": "string"}, "1: answer 503 when no slot is idle.")
        model = Parameter("model", "path", {"type": "string"}, "The model's name.", required=True)
        return [
            Operation("GET", "/health", self.health, "Whether the model is ready.", statuses=NEEDS_MODEL),
            Operation("GET", "/v1/health", self.health, "The same.", statuses=NEEDS_MODEL),
            Operation(
                "GET",
                "/readyz",
                self.health,
                "The same, under the name that orchestrators ask for.",
                statuses=NEEDS_MODEL,
            ),
            Operation(
                "GET", "/healthz", self.alive, "Whether the process works, loading included.", statuses=NEEDS_MODEL
            ),
            Operation("GET", "/slots", self.slots, "What each slot does.", parameters=(full,), statuses=NEEDS_MODEL),
            Operation("GET", "/props", self.props, "The model's and the engine's settings.", statuses=NEEDS_MODEL),
            Operation("GET", "/v1/models", self.models, "The one model that this engine serves."),
            Operation("GET", "/v1/models/{model:.+}", self.model, "One model.", parameters=(model,), statuses=(404,)),
            Operation("GET", "/metrics", self.metrics, "Counters for Prometheus.", answers=("text/plain",)),
        ]

    async def health(self, _request: web.Request) -> web.Response:
        if self._core.state == "ready":
            return web.json_response({"status": "ok"})
        body = {"status": self._core.state, "progress": round(self._core.load_share, 3)}
        return web.json_response(body, status=503, headers={"Retry-After": "1"})

    async def alive(self, _request: web.Request) -> web.Response:
        working = self._core.state in ALIVE
        return web.json_response({"status": "ok" if working else self._core.state}, status=200 if working else 503)

    async def slots(self, request: web.Request) -> web.Response:
        views = self._core.views()
        full = request.query.get("fail_on_no_slot") == "1" and self._is_full(views)
        return web.json_response([asdict(view) for view in views], status=503 if full else 200)

    def _is_full(self, views: Sequence[SlotView]) -> bool:
        """Sequences for whole rows stand beside the slots, but no more run for them. While the model loads there are none."""
        taken = sum(view.is_processing or view.state != "idle" for view in views)
        return taken >= min(len(views), self._config.slots)

    async def metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._core.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    # --- the model ------------------------------------------------------------------------------

    async def models(self, _request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._entry()]})

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        if name != self._config.model_name:
            raise ModelNotFound(f"This engine serves {self._config.model_name}, not {name[:200]!r}.", param="model")
        return web.json_response(self._entry())

    def _entry(self) -> dict[str, Any]:
        llama = self._core.llama
        ready = llama is not None and self._core.state == "ready"
        entry: dict[str, Any] = {
            "id": self._config.model_name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "hydra",
            "aliases": [],
            "architecture": {
                "input_modalities": ["text", "image"] if self._config.sees_images else ["text"],
                "output_modalities": [OUTPUTS[self._config.pooling]],
            },
            "status": {"value": "loaded" if ready else self._core.state, "progress": round(self._core.load_share, 3)},
        }
        if llama is not None and ready:
            entry["meta"] = {
                "n_ctx": self._config.context_tokens,
                "n_ctx_train": llama.context_train_tokens,
                "n_params": llama.parameter_count,
                "size": llama.size_bytes,
                "n_vocab": llama.vocabulary.size,
                "n_embd": llama.embedding_length,
            }
        return entry

    async def props(self, _request: web.Request) -> web.Response:
        llama = self._viewed.llama
        vocabulary = llama.vocabulary
        return web.json_response(
            {
                "default_generation_settings": self._default_settings(),
                "total_slots": self._config.slots,
                "model_alias": self._config.model_name,
                # The folder is nobody's business: an engine may be asked from elsewhere.
                "model_path": Path(self._config.model_path).name,
                "chat_template": self._config.chat_template or llama.chat_template or "",
                "bos_token": vocabulary.text_of(vocabulary.bos),
                "eos_token": vocabulary.text_of(vocabulary.eos),
                "modalities": {"vision": self._config.sees_images, "audio": False},
                "build_info": BUILD_INFO,
                "is_sleeping": False,
            }
        )

    def _default_settings(self) -> dict[str, Any]:
        config = self._config
        params = {
            "temperature": config.default_temperature,
            "top_k": config.default_top_k,
            "top_p": config.default_top_p,
            "min_p": config.default_min_p,
            "n_predict": config.default_max_tokens or -1,
            "max_tokens": config.default_max_tokens or -1,
        }
        return {"n_ctx": config.context_tokens, "params": params}
