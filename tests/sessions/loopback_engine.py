"""An HTTP server that speaks an engine's wire over loopback and misbehaves as a test asks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def frame(delta: dict[str, Any] | None = None, **fields: Any) -> bytes:
    choice = {"index": 0, "delta": delta or {}, "finish_reason": fields.pop("finish_reason", None)}
    return b"data: " + json.dumps({"choices": [choice], **fields}, separators=(",", ":")).encode() + b"\n\n"


TIMINGS = {"queue_ms": 3.0, "cache_n": 4, "prompt_n": 6, "predicted_n": 2, "predicted_per_second": 50.0}
ENDING = frame(finish_reason="stop", timings=TIMINGS) + b"data: [DONE]\n\n"


async def no_rates(_request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "No.", "code": "path_unknown"}}, status=404)


@asynccontextmanager
async def loopback_engine(handler: Handler, rates: Handler = no_rates) -> AsyncIterator[int]:
    """Serves `handler` at every path; yields the port. It measures nothing, so it has no rates to tell but `rates`."""
    app = web.Application()
    app.router.add_get("/rates", rates)
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port: int = runner.addresses[0][1]
        yield port
    finally:
        await runner.cleanup()


@asynccontextmanager
async def mute_peer() -> AsyncIterator[int]:
    """Takes connections and says nothing, as a frozen process does; yields the port."""
    taken: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _reader, writer: taken.append(writer), "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for writer in taken:
            writer.transport.abort()
        await asyncio.sleep(0)


def streaming(*parts: bytes, then: Callable[[web.StreamResponse], Awaitable[None]] | None = None) -> Handler:
    """Answers with these bytes, a write each, and then does `then` instead of ending well."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for part in parts:
            await response.write(part)
            await asyncio.sleep(0)
        if then is not None:
            await then(response)
        return response

    return answer


def refusing(status: int, code: str) -> Handler:
    """Answers every request with an error object."""

    async def answer(request: web.Request) -> web.StreamResponse:
        error = {"error": {"message": "No.", "type": "unavailable_error", "param": None, "code": code}}
        return web.json_response(error, status=status, headers={"Retry-After": "7"})

    return answer
