"""An engine's HTTP side under a test's control: it speaks the real wire on a real port and says what the test tells it to."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

from aiohttp import web

from engines.config import SlotView

IDLE = SlotView(0, "idle", False, None, 0, 0, 0, 0, 1024, 0.0)
USAGE = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12, "prompt_tokens_details": {"cached_tokens": 4}}
TIMINGS = {"prompt_n": 5, "cache_n": 4, "predicted_n": 3, "predicted_per_second": 41.5}


def chunk(**delta: Any) -> dict[str, Any]:
    return {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


class EngineStandIn:
    """Serves `slots` and streams `chunks`; with `endless` it goes on saying "more " until its client leaves,
    with `silent` it takes a request and says nothing at all."""

    def __init__(self) -> None:
        self.slots: list[SlotView] = [IDLE]
        self.chunks: list[dict[str, Any]] = [
            chunk(role="assistant", content=""),
            chunk(content="Blue"),
            chunk(content="."),
        ]
        self.endless = False
        self.silent = False
        self.said_chunks = 0
        self.bodies: list[dict[str, Any]] = []
        self.asked = asyncio.Event()
        self.client_left = asyncio.Event()
        self.port = 0
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        application = web.Application()
        application.router.add_get("/slots", self._slots)
        application.router.add_post("/v1/chat/completions", self._chat)
        self._runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _slots(self, request: web.Request) -> web.Response:
        return web.json_response([dataclasses.asdict(slot) for slot in self.slots])

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.asked.set()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            if self.silent:
                await asyncio.Event().wait()
            await response.prepare(request)
            for values in self.chunks:
                await self._say(response, values)
            while self.endless:
                await self._say(response, chunk(content="more "))
                await asyncio.sleep(0.002)
        except (asyncio.CancelledError, ConnectionError):
            self.client_left.set()
            raise
        finish = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "timings": TIMINGS}
        await self._say(response, finish)
        await self._say(response, {"choices": [], "usage": USAGE})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _say(self, response: web.StreamResponse, values: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps(values).encode() + b"\n\n")
        self.said_chunks += 1
