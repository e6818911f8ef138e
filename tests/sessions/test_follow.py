"""How the site follows a request that moves: for as long as it has time, and not to where it did not go."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp import web

from engines.choices import EngineState
from engines.client import close_client_session
from engines.models import Engine
from engines.runtime.http_follow import move_event
from pools.db import in_db
from sessions import follow, handoffs
from sessions.dialects import CHAT
from sessions.dispatch import Wishes
from sessions.identity import Identity, Owner
from sessions.models import ChatSession, Turn
from sessions.relay import ask_engine
from sessions.turn import wait_for_writes
from tests.rows import add_engine, add_model, set_ready
from tests.sessions.loopback_engine import ENDING, frame, loopback_engine, refusing, streaming
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db(transaction=True)
ANSWER = {
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Red."}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6},
}
Rows = Callable[..., str]
CALL = {"messages": [{"role": "user", "content": "Colours?"}]}
SENT_TO_FIRST = Wishes(engine_name="cpu-0")


@pytest.fixture
def rows(tiny_model: Callable[..., SyntheticModel], tmp_path: Path) -> Rows:
    """`rows(*ports)`: an engine behind each, and a move from the first to the second, by its name."""

    def write(*ports: int) -> str:
        variant = add_model(tiny_model("llama").path, tmp_path)
        for number, port in enumerate(ports):
            set_ready(add_engine(variant, name=f"cpu-{number}"), port)
        first, second = Engine.objects.order_by("name")
        chat = ChatSession.objects.create(key_hash="b" * 64, model_name="tiny", engine=first)
        return handoffs.name_of(handoffs.start(chat.pk, first.pk, second.pk, send=False))

    return write


async def test_a_move_that_came_to_nothing_is_not_followed_when_its_source_dies_later(rows: Rows) -> None:
    opened, let_go = asyncio.Event(), asyncio.Event()

    async def rest(response: web.StreamResponse) -> None:
        async with asyncio.timeout(20):
            await opened.wait()
            await response.write(move_event("stays", names[0]) + frame({"content": " and"}))
            await let_go.wait()
        response._req.transport.abort()

    async def dying(request: web.Request) -> web.StreamResponse:
        return await streaming(frame({"content": "Red"}), move_event("moving", names[0]), then=rest)(request)

    async def going(request: web.Request) -> web.StreamResponse:
        """What the source's client must never see: it would be a second answer from the place where the move was tried."""
        opened.set()
        try:
            await asyncio.sleep(20)
        except asyncio.CancelledError:
            let_go.set()
            raise
        return await streaming(frame({"content": " blue"}), ENDING)(request)

    async with loopback_engine(dying) as first, loopback_engine(going) as second:
        names = [await in_db(rows, first, second)]
        call = CHAT.read(json.dumps({**CALL, "stream": True}).encode())
        stream = await ask_engine(call, Identity(Owner(), "c" * 64), wishes=SENT_TO_FIRST)
        chunks = [chunk async for chunk in stream]
        await stream.aclose()
        await wait_for_writes(10)
        await close_client_session()
    said = [chunk["choices"][0]["delta"].get("content") for chunk in chunks if "choices" in chunk]
    assert said == ["Red", " and"]
    assert "error" in chunks[-1]


@pytest.mark.parametrize("goes_on", [True, False])
async def test_an_answer_in_one_piece_is_waited_for_where_it_moved_or_computed_once_more(
    rows: Rows, monkeypatch: pytest.MonkeyPatch, *, goes_on: bool
) -> None:
    """It begins to come when it is done, which takes as long as it takes."""
    monkeypatch.setattr(follow, "LOST_PATIENCE_S", 0.1)
    asked: list[str] = []

    async def moved(request: web.Request) -> web.StreamResponse:
        asked.append("first")
        if asked.count("first") > 1:
            return web.json_response(ANSWER)
        error = {"message": "It moved.", "type": "conflict", "param": names[0], "code": "generation_moved"}
        return web.json_response({"error": error}, status=409)

    async def going(request: web.Request) -> web.StreamResponse:
        asked.append("second")
        if not goes_on:
            return await refusing(404, "handoff_unknown")(request)
        await asyncio.sleep(0.5)
        return web.json_response(ANSWER)

    async with loopback_engine(moved) as first, loopback_engine(going) as second:
        names = [await in_db(rows, first, second)]
        answer = await ask_engine(
            CHAT.read(json.dumps(CALL).encode()), Identity(Owner(), "c" * 64), wishes=SENT_TO_FIRST
        )
        assert json.loads(await answer.read()) == ANSWER
        await answer.aclose()
        await wait_for_writes(10)
        await close_client_session()
    assert asked == (["first", "second"] if goes_on else ["first", *["second"] * follow.ARRIVAL_TRIES, "first"])
    turn = await in_db(Turn.objects.select_related("engine").get)
    assert (turn.state, turn.engine.name) == ("done", "cpu-1" if goes_on else "cpu-0")
    assert await in_db(Engine.objects.exclude(state=EngineState.READY).count) == 0
