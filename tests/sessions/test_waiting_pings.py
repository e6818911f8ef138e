"""Nobody's connection is silent while the site waits for whoever goes on with an answer: it hears pings until the rest comes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from engines.client import close_client_session
from engines.models import Engine
from engines.runtime.http_follow import move_event
from pools.db import in_db
from sessions import handoffs, kept_stream, relay
from sessions.dialects import CHAT
from sessions.dispatch import Wishes
from sessions.identity import Identity, Owner
from sessions.models import ChatSession
from sessions.relay import COMMENT_PING, ask_engine
from sessions.stream_desk import StreamDesk
from sessions.turn import wait_for_writes
from tests.rows import add_engine, add_model, set_ready
from tests.sessions.loopback_engine import ENDING, frame, loopback_engine, streaming
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db(transaction=True)
RED, BLUE = frame({"content": "Red"}), frame({"content": " blue"})
ME = Identity(Owner(), "c" * 64)
SENT_TO_FIRST = Wishes(engine_name="cpu-0")
PATIENCE_S = 60.0
# What an engine tells its site so that another one can go on.
BEGUN, MARK, CLOSED = (
    b"event: hydra." + name + b"\ndata: " + line + b"\n\n"
    for name, line in ((b"begun", b"{}"), (b"mark", b'["some"]'), (b"mark", b'["closed"]'))
)
ENDS = ["it says that it moved", "it dies while it moves", "it dies"]


async def breaking_off(response: web.StreamResponse) -> None:
    response._req.transport.abort()  # type: ignore[union-attr]


def call() -> Any:
    return CHAT.read(json.dumps({"messages": [{"role": "user", "content": "Colours?"}], "stream": True}).encode())


@pytest.fixture
async def holding(
    tiny_model: Callable[..., SyntheticModel],
    tmp_path: Path,
    background: None,
    monkeypatch: pytest.MonkeyPatch,
    end: str,
) -> AsyncIterator[asyncio.Event]:
    """Two engines: the first gives its answer up in the middle, the second goes on with it once the event is set."""
    monkeypatch.setattr(relay, "PING_S", 0.02)
    names: list[str] = []
    comes = asyncio.Event()

    async def leaving(request: web.Request) -> web.StreamResponse:
        moving, moved = (move_event(name, names[0]) for name in ("moving", "moved"))
        parts, then = {
            "it says that it moved": (RED + moving + moved, None),
            "it dies while it moves": (RED + moving, breaking_off),
            "it dies": (BEGUN + RED + MARK, breaking_off),
        }[end]
        return await streaming(parts, then=then)(request)

    async def going_on(request: web.Request) -> web.StreamResponse:
        await comes.wait()
        return await streaming(BLUE + MARK, ENDING + CLOSED)(request)

    def write(*ports: int) -> None:
        variant = add_model(tiny_model("llama").path, tmp_path)
        for number, port in enumerate(ports):
            set_ready(add_engine(variant, name=f"cpu-{number}"), port)
        first, second = Engine.objects.order_by("name")
        chat = ChatSession.objects.create(key_hash="b" * 64, model_name="tiny", engine=first)
        names.append(handoffs.name_of(handoffs.start(chat.pk, first.pk, second.pk, send=False)))

    async with loopback_engine(leaving) as first, loopback_engine(going_on) as second:
        await in_db(write, first, second)
        yield comes
        await wait_for_writes(10)
        await close_client_session()


@pytest.mark.parametrize("end", ENDS)
async def test_a_client_hears_pings_until_its_answer_goes_on(holding: asyncio.Event, end: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        answer = await ask_engine(call(), ME, wishes=SENT_TO_FIRST)
        heard: list[bytes] = []
        async for frames in answer.raw():
            heard.append(frames)
            if heard.count(COMMENT_PING) == 3:
                holding.set()
        await answer.aclose()
    told = b"".join(heard)
    assert told.replace(COMMENT_PING, b"") == RED + BLUE + ENDING
    assert told.index(RED) < told.index(COMMENT_PING) < told.rindex(COMMENT_PING) < told.index(BLUE)


@pytest.mark.parametrize("end", ENDS[:1])
async def test_a_client_that_leaves_meanwhile_leaves_nothing_behind(holding: asyncio.Event, end: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        answer = await ask_engine(call(), ME, wishes=SENT_TO_FIRST)
        frames = answer.raw()
        while await anext(frames) != COMMENT_PING:
            pass
        await frames.aclose()  # type: ignore[attr-defined]
        await answer.aclose()
        while left := [
            task for task in asyncio.all_tasks() if task.get_name().startswith(("contin", "failover", "follow"))
        ]:
            await asyncio.wait(left)


@pytest.mark.parametrize("end", ["it says that it moved"])
async def test_who_reads_a_kept_stream_hears_pings_too(
    holding: asyncio.Event, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the site's own reading of the answer hears pings more often than that."""
    monkeypatch.setattr(kept_stream, "PING_S", 0.2)
    desk = StreamDesk()
    async with asyncio.timeout(PATIENCE_S):
        stream = await desk.begin(call(), ME, "")
        heard: list[bytes] = []
        async for frames in stream.read(0):
            heard.append(frames)
            if heard.count(COMMENT_PING) == 2:
                holding.set()
    assert b"".join(heard).replace(COMMENT_PING, b"") == RED + BLUE + ENDING
    await desk.close()
