"""One budget of time for all of a request: loading and waiting are in it, also of kept streams, and of engines that freeze."""

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
from pools.db import in_db
from sessions import relayed_request
from sessions.models import SlotLease, Turn
from sessions.relayed_request import lease_desk
from sessions.stream_desk import stream_desk
from sessions.turn import wait_for_writes
from tests.rows import add_engine, add_model, set_ready
from tests.sessions.local_client import LocalClient
from tests.sessions.loopback_engine import ENDING, frame, loopback_engine
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db(transaction=True)

PATIENCE_S = 20.0
CHAT = {"messages": [{"role": "user", "content": "Count."}]}


class FreezingEngine:
    """Speaks an engine's wire until it stops dead: before its answer ("mute"), within it ("midway"), or never ("")."""

    def __init__(self) -> None:
        self.freezes = ""
        self.asked: list[Any] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.headers)
        if self.freezes == "mute":
            await asyncio.Event().wait()
        is_stream = json.loads(await request.read()).get("stream")
        kind = "text/event-stream" if is_stream else "application/json"
        response = web.StreamResponse(headers={"Content-Type": kind})
        await response.prepare(request)
        await response.write(frame({"content": "one"}) if is_stream else b'{"choices":')
        if self.freezes == "midway":
            await asyncio.Event().wait()
        await response.write(ENDING if is_stream else b"[]}")
        return response


@pytest.fixture
async def engine(
    background: None,
    tiny_model: Callable[..., SyntheticModel],
    tmp_path: Path,
    settings: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[FreezingEngine]:
    settings.ALLOWED_HOSTS = ["localhost"]
    monkeypatch.setattr(relayed_request, "GRACE_S", 0.1)
    freezing = FreezingEngine()
    async with loopback_engine(freezing.answer) as port:
        await in_db(lambda: set_ready(add_engine(add_model(tiny_model("llama").path, tmp_path)), port))
        yield freezing
        await stream_desk().close()
        await wait_for_writes(10)
        await lease_desk().settled()
        assert await in_db(SlotLease.objects.count) == 0
        await close_client_session()


async def ask(body: dict[str, Any] | None = None, **headers: str) -> Any:
    named = {"X-Hydra-Timeout": "1", **{name.replace("_", "-"): value for name, value in headers.items()}}
    async with asyncio.timeout(PATIENCE_S):
        return await LocalClient().post(
            "/v1/chat/completions",
            json.dumps({**CHAT, **(body or {})}).encode(),
            content_type="application/json",
            headers=named,
        )


async def text(response: Any) -> bytes:
    async with asyncio.timeout(PATIENCE_S):
        return b"".join([part async for part in response.streaming_content])


async def last_turn() -> tuple[str, str]:
    await wait_for_writes(10)
    turn = await in_db(lambda: Turn.objects.latest("started_at"))
    return turn.state, turn.error_code


@pytest.mark.parametrize("freezes", ["mute", "midway"])
async def test_an_engine_that_freezes_over_a_whole_answer_has_the_requests_time_and_no_more(
    engine: FreezingEngine, freezes: str
) -> None:
    engine.freezes = freezes
    response = await ask()
    error = json.loads(response.content)["error"]
    assert (response.status_code, error["code"]) == (504, "deadline_exceeded")
    assert "X-Hydra-Timeout" in error["hint"]
    assert len(engine.asked) == 1
    assert await last_turn() == ("failed", "deadline_exceeded")


async def test_an_engine_that_freezes_within_a_stream_ends_it_with_an_error_frame(engine: FreezingEngine) -> None:
    engine.freezes = "midway"
    received = await text(await ask({"stream": True}, X_Hydra_Timeout="3"))
    assert received.startswith(frame({"content": "one"}))
    assert b'"deadline_exceeded"' in received.split(b"\n\n")[1]
    assert await last_turn() == ("failed", "deadline_exceeded")


async def test_a_kept_stream_has_its_time_and_wishes_and_a_retry_reads_it(engine: FreezingEngine) -> None:
    resumable = {"X_Hydra_Resumable": "1", "X_Hydra_Background": "1", "Idempotency_Key": "k"}
    # Time enough for what does not freeze, however busy the machine is.
    resumable["X_Hydra_Timeout"] = "30"
    first = await ask({"stream": True}, **resumable)
    received = await text(first)
    (heard,) = engine.asked
    assert float(heard["X-Hydra-Budget-S"]) <= 30
    assert "X-Hydra-Session" not in heard, "it is kept off conversations"
    again = await ask({"stream": True}, **resumable)
    assert (again["X-Request-Id"], await text(again)) == (first["X-Request-Id"], received)
    assert len(engine.asked) == 1
    other = await ask({"stream": True, "seed": 1}, **resumable)
    assert (other.status_code, json.loads(other.content)["error"]["param"]) == (400, "Idempotency-Key")

    engine.freezes = "midway"
    received = await text(await ask({"stream": True}, X_Hydra_Resumable="1"))
    assert b'"deadline_exceeded"' in received


async def test_a_model_that_does_not_come_up_is_waited_for_as_long_as_the_request_has(engine: FreezingEngine) -> None:
    await in_db(lambda: Engine.objects.update(state="starting"))
    received = await text(await ask({"stream": True}))
    assert received.startswith(b": loading ")
    assert b'"deadline_exceeded"' in received
    assert not engine.asked
