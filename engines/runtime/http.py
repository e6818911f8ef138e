"""The engine's HTTP server: validates, queues a generation, and writes its pieces as they come.

Runs on the process's event loop; never touches the context. A client that goes away has its handler cancelled, which
cancels its generation at the core's next step.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

from aiohttp import web

from engines.api_schema import ChatRequest, parse_chat_request
from engines.browser_guard import foreign_page, host_name, is_loopback
from engines.config import EngineConfig
from engines.errors import (
    BodyTooLarge,
    ContextLengthExceeded,
    EngineError,
    EngineLoading,
    EngineStopping,
    UnsupportedParameter,
)
from engines.runtime.answers import ChatAnswer
from engines.runtime.chat import ChatTemplate
from engines.runtime.core import EngineCore
from engines.runtime.generation import Generation, Mailbox, Piece
from engines.runtime.llama import Llama
from engines.runtime.metrics import CONTENT_TYPE
from engines.runtime.sampler import SEED_MASK, SamplingParams

log = logging.getLogger("hydra.engine.http")

PING_S = 10.0
PREPARE_THREADS = 2
SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _json_error(error: EngineError) -> web.Response:
    headers = {"Retry-After": str(error.retry_after_s)} if error.retry_after_s else None
    return web.json_response(error.body(), status=error.http_status, headers=headers)


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every failure leaves in OpenAI's shape with the right status; what nobody expected is logged with its traceback."""
    try:
        return await handler(request)
    except EngineError as error:
        return _json_error(error)
    except web.HTTPRequestEntityTooLarge:
        limit = request.app[CONFIG].max_body_bytes
        return _json_error(BodyTooLarge(f"The request body is larger than {limit} bytes."))
    except web.HTTPException as error:
        refusal = EngineError(f"{request.method} {request.path}: {error.reason}")
        refusal.error_type = "not_found_error" if error.status == 404 else "invalid_request_error"
        refusal.code = "not_found" if error.status == 404 else "method_not_allowed"
        return web.json_response(refusal.body(), status=error.status, headers=_allow(error))
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        return _json_error(EngineError("The engine failed; its log has the cause."))


def _allow(error: web.HTTPException) -> dict[str, str]:
    return {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}


@web.middleware
async def refuse_foreign_pages(request: web.Request, handler: Handler) -> web.StreamResponse:
    """A loopback engine has no keys, so it must not be reachable through somebody's browser."""
    reason = foreign_page(request.headers)
    if reason is None and is_loopback(request.app[CONFIG].host) and not is_loopback(host_name(request.host)):
        reason = f"Host is {request.host[:200]}"
    if reason:
        refusal = EngineError(f"Requests from other web pages are refused ({reason}).")
        refusal.error_type, refusal.code = "permission_error", "foreign_origin"
        return web.json_response(refusal.body(), status=403)
    return await handler(request)


CONFIG = web.AppKey("config", EngineConfig)


class EngineServer:
    """The routes of one engine. `core` may still be loading: /health says so and chat answers 503."""

    def __init__(self, config: EngineConfig, core: EngineCore) -> None:
        self.config = config
        self.core = core
        self.started_at = int(time.time())
        self._template: ChatTemplate | None = None
        self._prepare = ThreadPoolExecutor(PREPARE_THREADS, thread_name_prefix="prepare")

    def app(self) -> web.Application:
        app = web.Application(
            client_max_size=self.config.max_body_bytes, middlewares=[errors_as_json, refuse_foreign_pages]
        )
        app[CONFIG] = self.config
        app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/v1/health", self.health),
                web.get("/slots", self.slots),
                web.get("/v1/models", self.models),
                web.get("/metrics", self.metrics),
                web.post("/v1/chat/completions", self.chat),
            ]
        )
        return app

    def close(self) -> None:
        self._prepare.shutdown(wait=False, cancel_futures=True)

    # --- views of the engine --------------------------------------------------------------------

    async def health(self, _request: web.Request) -> web.Response:
        if self.core.state == "ready":
            return web.json_response({"status": "ok"})
        body = {"status": self.core.state, "progress": round(self.core.load_share, 3)}
        return web.json_response(body, status=503, headers={"Retry-After": "1"})

    async def slots(self, request: web.Request) -> web.Response:
        views = self.core.views()
        full = request.query.get("fail_on_no_slot") == "1" and not any(not view.is_processing for view in views)
        return web.json_response([asdict(view) for view in views], status=503 if full else 200)

    async def models(self, _request: web.Request) -> web.Response:
        llama = self.core.llama
        entry: dict[str, Any] = {
            "id": self.config.model_name,
            "object": "model",
            "created": self.started_at,
            "owned_by": "hydra",
            "status": {"value": "loaded" if self.core.state == "ready" else self.core.state},
        }
        if llama is not None and self.core.state == "ready":
            entry["meta"] = {
                "n_ctx": self.config.context_tokens,
                "n_ctx_train": llama.context_train_tokens,
                "n_params": llama.parameter_count,
                "size": llama.size_bytes,
                "n_vocab": llama.vocabulary.size,
                "n_embd": llama.embedding_length,
            }
        return web.json_response({"object": "list", "data": [entry]})

    async def metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=self.core.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    # --- chat -----------------------------------------------------------------------------------

    async def chat(self, request: web.Request) -> web.StreamResponse:
        if self.core.state != "ready" or self.core.llama is None:
            stopping = EngineStopping("The engine is shutting down.")
            raise EngineLoading("The model is being loaded.") if self.core.state == "loading" else stopping
        raw = await request.read()
        request_id = _request_id(request.headers.get("X-Request-Id"))
        loop = asyncio.get_running_loop()
        # Parsing, templating and tokenising of a large body take long; the other streams' pieces must not wait for it.
        body, generations = await loop.run_in_executor(
            self._prepare, self._generations, raw, request_id, self.core.llama
        )
        self.core.submit(*generations)
        answer = ChatAnswer(request_id, self.config.model_name, self.core.llama.vocabulary)
        try:
            if body.stream:
                return await self._stream(request, body, generations, answer)
            return await self._whole(body, generations, answer)
        finally:
            for generation in generations:
                self.core.cancel(generation)

    def _generations(self, raw: bytes, request_id: str, llama: Llama) -> tuple[ChatRequest, list[Generation]]:
        """The validated body and its `n` generations, which differ in their seed only and share one mailbox."""
        body = parse_chat_request(raw)
        self._refuse_hopeless(sum(len(message.text().encode()) for message in body.messages), llama)
        if self._template is None:
            self._template = ChatTemplate(llama.chat_template, llama.vocabulary)
        prompt = self._template.prompt(body, with_cuts=llama.needs_checkpoints)
        limit = self.config.context_tokens
        if len(prompt.tokens) >= limit:
            raise ContextLengthExceeded(
                f"The prompt has {len(prompt.tokens)} tokens; the context holds {limit}, the answer included.",
                param="messages",
            )
        params = SamplingParams.of(body, self.config, llama.vocabulary.size, llama.vocabulary.end_tokens)
        if self.config.samples_on_device and not self.config.whole_vocabulary_slots:
            self._refuse_whole_vocabulary(params)
        wanted = body.max_new_tokens or self.config.default_max_tokens or limit
        mailbox = Mailbox()
        now = time.monotonic()
        generations = [
            Generation(
                request_id=request_id,
                prompt=prompt.tokens,
                params=replace(params, seed=(params.seed + index) & SEED_MASK),
                stops=body.stops,
                max_new_tokens=min(wanted, limit - len(prompt.tokens)),
                mailbox=mailbox,
                deadline_at=now + self.config.request_deadline_s,
                choice=index,
                reuse_prefix=body.cache_prompt,
                wants_progress=body.return_progress and body.stream and index == 0,
                cuts=list(prompt.cuts),
                owner=body.prompt_cache_key or body.user or "",
                priority=body.priority,
            )
            for index in range(body.n or 1)
        ]
        return body, generations

    def _refuse_whole_vocabulary(self, params: SamplingParams) -> None:
        if params.needs_whole_vocabulary(self.config.device_candidates):
            raise UnsupportedParameter(
                "This engine samples on its device and keeps no sequence for log probabilities, lifting biases or top_k 0.",
                hint="Start it with whole_vocabulary_slots of at least 1.",
            )

    def _refuse_hopeless(self, text_bytes: int, llama: Llama) -> None:
        """No token is longer than the longest piece, so much text can be refused before it is tokenised."""
        at_least = text_bytes // llama.vocabulary.longest_piece_bytes
        if at_least >= self.config.context_tokens:
            raise ContextLengthExceeded(
                f"The messages have {text_bytes} bytes, at least {at_least} tokens;"
                f" the context holds {self.config.context_tokens}.",
                param="messages",
            )

    async def _whole(self, body: ChatRequest, generations: list[Generation], answer: ChatAnswer) -> web.Response:
        pieces: dict[int, list[Piece]] = {generation.choice: [] for generation in generations}
        unfinished = set(pieces)
        while unfinished:
            for piece in await generations[0].mailbox.take(PING_S):
                pieces[piece.choice].append(piece)
                if piece.error is not None:
                    raise piece.error
                if piece.is_last:
                    unfinished.discard(piece.choice)
        return web.json_response(answer.whole(pieces, with_logprobs=bool(body.logprobs)))

    async def _stream(
        self, request: web.Request, body: ChatRequest, generations: list[Generation], answer: ChatAnswer
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers=SSE_HEADERS)
        await response.prepare(request)
        await response.write(b"".join(_event(answer.opening(g.choice)) for g in generations))
        mailbox = generations[0].mailbox
        last: dict[int, Piece] = {}
        while len(last) < len(generations):
            pieces = await mailbox.take(PING_S)
            frames = []
            for piece in pieces:
                frames += self._frames(piece, generations[piece.choice], answer)
                if piece.error is not None:
                    # An error ends the whole stream; the handler's exit cancels the other choices.
                    await response.write(b"".join(frames))
                    await response.write_eof()
                    return response
                if piece.is_last:
                    last[piece.choice] = piece
            await response.write(b"".join(frames) or b": ping\n\n")
        stats = [piece.stats for piece in last.values() if piece.stats is not None]
        tail = _event(answer.usage_chunk(stats)) if body.include_usage else b""
        await response.write(tail + b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _frames(self, piece: Piece, generation: Generation, answer: ChatAnswer) -> list[bytes]:
        frames = []
        if piece.prompt_done_tokens is not None:
            started = generation.started_at or generation.queued_at
            done = {
                "total": len(generation.prompt),
                "cache": generation.cached_tokens,
                "processed": piece.prompt_done_tokens,
                "time_ms": round((time.monotonic() - started) * 1000),
            }
            frames.append(_event(answer.progress(done)))
        if piece.logprobs:
            frames.append(_event(answer.delta(piece)))
        elif piece.text:
            frames.append(answer.text_event(piece))
        if piece.error is not None:
            frames.append(_event(piece.error.body()))
        elif piece.finish_reason is not None and piece.stats is not None:
            frames.append(_event(answer.closing(piece.choice, piece.finish_reason, piece.stats)))
        return frames


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _request_id(given: str | None) -> str:
    """The caller's id where it is short and plain, for it goes into answers and logs; else a new one."""
    if given and len(given) <= 128 and given.isascii() and all(c.isalnum() or c in "-_." for c in given):
        return given
    return uuid.uuid4().hex
