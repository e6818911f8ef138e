"""Who takes or sends a state too slowly loses the connection; the slot and the arena's buffers are free again."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable

import pytest
from aiohttp import web

from engines.errors import DeadlineExceeded
from engines.runtime import http_state, state_import
from engines.runtime.http_state import StateEndpoint
from engines.runtime.state_import import with_patience
from tests.engines.runtime.test_core import prompt_of, run
from tests.engines.runtime.test_state_desk import desk_of, exported
from tests.synthetic_gguf import SyntheticModel

SMALL_BYTES = 4096


async def test_a_reader_that_stops_reading_keeps_no_slot(
    tiny_model: Callable[..., SyntheticModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_state, "STALL_S", 1.0)
    model = tiny_model("llama")
    async with desk_of(model, context_tokens=2048) as (core, desk):
        await run(core, prompt_of(model, 1500), 2)
        whole = await exported(desk)
        listener = socket.create_server(("127.0.0.1", 0))
        # So that a state of a few hundred kilobytes does not fit into what the kernel keeps.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BYTES)
        app = web.Application()
        app.router.add_get("/slots/{id}/state", StateEndpoint(desk).get, allow_head=False)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.SockSite(runner, listener).start()
        with socket.socket() as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BYTES)
            reader.connect(listener.getsockname())
            reader.sendall(b"GET /slots/0/state HTTP/1.1\r\nHost: here\r\n\r\n")
            reader.setblocking(False)
            head = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(reader, 12), 20)
            assert head == b"HTTP/1.1 200"
            async with asyncio.timeout(20):
                assert (await desk.meta(0, "stream")).is_transferring
                while (await desk.meta(0, "stream")).is_transferring:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        await runner.cleanup()
        assert await exported(desk) == whole


@pytest.mark.parametrize(("pause_s", "least"), [(60.0, 1), (0.02, 1 << 20)])
async def test_a_sender_that_is_silent_or_drips_is_given_up(
    monkeypatch: pytest.MonkeyPatch, pause_s: float, least: int
) -> None:
    monkeypatch.setattr(state_import, "STALL_S", 0.2)
    monkeypatch.setattr(state_import, "MIN_BYTES_PER_S", least)

    async def drops() -> AsyncIterator[bytes]:
        while True:
            yield b"x"
            await asyncio.sleep(pause_s)

    came = 0
    with pytest.raises(DeadlineExceeded):
        async with asyncio.timeout(20):
            async for drop in with_patience(drops()):
                came += len(drop)
    assert came >= 1


async def test_what_the_engine_takes_its_time_for_is_not_the_senders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_import, "STALL_S", 0.2)

    async def at_once() -> AsyncIterator[bytes]:
        for _ in range(4):
            yield b"x"

    async for _ in with_patience(at_once()):
        await asyncio.sleep(0.1)
