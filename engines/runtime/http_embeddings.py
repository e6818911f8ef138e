"""Endpoints of an engine that pools, and the refusals where it does not: /v1/embeddings, /v1/rerank.

Runs on the process's event loop; never touches the context. A client that goes away has its handler cancelled, which
cancels its request at the core's next step.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from aiohttp import web
from pydantic import BaseModel

from engines.api_embeddings import EmbeddingRequest, RerankRequest, parse_embedding_request, parse_rerank_request
from engines.config import EngineConfig
from engines.errors import EngineLoading, EngineStopping, InvalidRequest, NotServed
from engines.runtime.embedding_core import EmbeddingCore
from engines.runtime.embedding_job import EmbeddingJob, Tokens, Values
from engines.runtime.embedding_llama import PoolingLlama
from engines.runtime.embedding_prompt import PairPrompt, as_tokens
from engines.runtime.embedding_vectors import as_base64, as_numbers, relevance, unit
from engines.runtime.http_errors import CONFIG, errors_as_json, refuse_foreign_pages, refuse_strangers
from engines.runtime.http_views import Views
from engines.runtime.operations import GENERATES, Handler, Operation, routes
from engines.runtime.preparation import PREPARE_THREADS
from engines.runtime.request_id import request_id

EMBEDDINGS_PATHS = ("/v1/embeddings",)
RERANK_PATHS = ("/v1/rerank", "/rerank")
GENERATING_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
T = TypeVar("T")


class PoolingServer:
    """The operations of an engine whose configuration has `pooling`."""

    def __init__(self, config: EngineConfig, core: EmbeddingCore) -> None:
        self.config = config
        self.core = core
        self._pool = ThreadPoolExecutor(PREPARE_THREADS, thread_name_prefix="prepare")
        self._making = threading.Lock()
        self._pair_prompt: PairPrompt | None = None

    @property
    def llama(self) -> PoolingLlama:
        """The loaded model. Raises EngineLoading and EngineStopping while it must not be asked."""
        if self.core.state == "loading":
            raise EngineLoading("The model is being loaded.")
        if self.core.state != "ready" or self.core.llama is None:
            raise EngineStopping("The engine is shutting down.")
        return self.core.llama

    def operations(self) -> list[Operation]:
        ranks = self.config.pooling == "rank"
        embeds = _refusal("This engine scores pairs and embeds nothing.", "Start it with pooling mean, cls or last.")
        scores = _refusal("This engine embeds and scores no pairs.", "Serve a ranking model with pooling rank.")
        generates = _refusal(
            "This engine pools and generates nothing.", "Start it without pooling, or ask for another model."
        )
        return [
            *Views(self).operations(),
            *_operations(EMBEDDINGS_PATHS, embeds if ranks else self.embeddings, "Vectors of texts.", EmbeddingRequest),
            *_operations(RERANK_PATHS, self.rerank if ranks else scores, "Documents by relevance.", RerankRequest),
            *(Operation("POST", path, generates, "Refused.", statuses=(501,)) for path in GENERATING_PATHS),
        ]

    def app(self) -> web.Application:
        app = web.Application(
            client_max_size=self.config.max_body_bytes,
            middlewares=[errors_as_json, refuse_foreign_pages, refuse_strangers],
        )
        app[CONFIG] = self.config
        app.add_routes(routes(self.operations()))
        return app

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    # --- endpoints ------------------------------------------------------------------------------

    async def embeddings(self, request: web.Request) -> web.Response:
        llama = self.llama
        body, inputs = await self._run(self._read_embeddings, await request.read(), llama)
        values = await self._pooled(request, inputs)
        return web.json_response(
            text=await self._run(self._embeddings_text, body, inputs, values), content_type="application/json"
        )

    async def rerank(self, request: web.Request) -> web.Response:
        llama = self.llama
        body, pairs = await self._run(self._read_rerank, await request.read(), llama)
        values = await self._pooled(request, pairs)
        return web.json_response(self._ranking(body, pairs, values))

    async def _run(self, work: Callable[..., T], *args: object) -> T:
        """Tokenising many texts and writing many numbers takes long; other requests must not wait for it."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *args)

    async def _pooled(self, request: web.Request, inputs: list[Tokens]) -> list[Values]:
        job = EmbeddingJob(
            request_id=request_id(request),
            inputs=inputs,
            deadline_at=time.monotonic() + self.config.request_deadline_s,
            result=asyncio.get_running_loop().create_future(),
        )
        self.core.submit(job)
        try:
            return await job.result
        finally:
            self.core.cancel(job)

    # --- bodies, on the prepare threads ---------------------------------------------------------

    def _read_embeddings(self, raw: bytes, llama: PoolingLlama) -> tuple[EmbeddingRequest, list[Tokens]]:
        body = parse_embedding_request(raw)
        if body.dimensions is not None and body.dimensions > llama.width:
            message = f"dimensions: the model's embeddings have {llama.width}, got {body.dimensions}"
            raise InvalidRequest(message, param="dimensions")
        return body, as_tokens(body.inputs, llama, "input")

    def _embeddings_text(self, body: EmbeddingRequest, inputs: list[Tokens], values: list[Values]) -> str:
        written = as_base64 if body.encoding_format == "base64" else as_numbers
        data = [
            {"object": "embedding", "index": index, "embedding": written(unit(vector, body.dimensions))}
            for index, vector in enumerate(values)
        ]
        answer = {"object": "list", "data": data, "model": self.config.model_name, "usage": _usage(inputs)}
        return json.dumps(answer, separators=(",", ":"))

    def _read_rerank(self, raw: bytes, llama: PoolingLlama) -> tuple[RerankRequest, list[Tokens]]:
        body = parse_rerank_request(raw)
        with self._making:
            if self._pair_prompt is None:
                self._pair_prompt = PairPrompt(llama)
        return body, self._pair_prompt.tokens(body.query, body.texts)

    def _ranking(self, body: RerankRequest, pairs: list[Tokens], values: list[Values]) -> dict[str, Any]:
        results: list[dict[str, Any]] = [
            {"index": index, "relevance_score": relevance(score, raw=body.raw_scores)}
            for index, score in enumerate(values)
        ]
        results.sort(key=lambda result: -result["relevance_score"])
        results = results[: body.top_n]
        if body.return_documents:
            texts = body.texts
            for result in results:
                result["document"] = {"text": texts[result["index"]]}
        return {"object": "list", "model": self.config.model_name, "usage": _usage(pairs), "results": results}


def refusing_operations() -> list[Operation]:
    """What a generating engine says on these paths."""
    refusal = _refusal(
        "This engine generates text; it neither embeds nor ranks.",
        "Serve a model with pooling (mean, cls or last for embeddings, rank for reranking) and ask for it by name.",
    )
    return [
        *_operations(EMBEDDINGS_PATHS, refusal, "Vectors of texts, of an engine with pooling.", EmbeddingRequest),
        *_operations(RERANK_PATHS, refusal, "Documents by relevance, of an engine with pooling.", RerankRequest),
    ]


def _operations(paths: tuple[str, ...], handler: Handler, summary: str, body: type[BaseModel]) -> list[Operation]:
    return [Operation("POST", path, handler, summary, (body,), statuses=(*GENERATES, 501)) for path in paths]


def _refusal(message: str, hint: str) -> Handler:
    async def refuse(_request: web.Request) -> web.StreamResponse:
        raise NotServed(message, hint=hint)

    return refuse


def _usage(inputs: list[Tokens]) -> dict[str, int]:
    total = sum(len(tokens) for tokens in inputs)
    return {"prompt_tokens": total, "total_tokens": total}
