"""How an engine is called over HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from engines import client
from engines.client import EngineClient, close_client_session


@asynccontextmanager
async def engine() -> AsyncIterator[EngineClient]:
    """Answers everything."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=request.headers["X-Request-Id"])

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield EngineClient(f"http://127.0.0.1:{runner.addresses[0][1]}")
    finally:
        await close_client_session()
        await runner.cleanup()


async def test_an_engine_is_not_taken_for_lost_because_this_process_was_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a crowd: the connection is there, and its time is up before anybody can look."""
    monkeypatch.setattr(client, "CONNECT_TIMEOUT_S", 0.5)
    async with engine() as called:
        calling = asyncio.create_task(called.call("POST", "/v1", b"{}", request_id="one", silence_s=60.0))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(time.sleep, 0.8)
        async with await calling as response:
            assert await response.text() == "one"
