"""Requests that wait for their model: comments meanwhile, then the answer as if nothing had been; refusals are frames."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from engines.client import close_client_session
from engines.errors import ModelLoading, NoEngineReady
from engines.models import Engine
from pools.db import in_db
from sessions import load_wait
from sessions.dialects import CHAT, MESSAGES
from sessions.identity import Identity, Owner
from sessions.relay import ask_engine
from sessions.turn import wait_for_writes
from tests.database_outage import database_away
from tests.rows import add_engine, add_model, set_ready
from tests.sessions.loopback_engine import loopback_engine, streaming
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db(transaction=True)

CHUNKS = [
    b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n',
    b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n',
    b"data: [DONE]\n\n",
]
BODY = b'{"model":"tiny","messages":[{"role":"user","content":"hi"}],"stream":true}'


@pytest.fixture(autouse=True)
async def _sessions() -> AsyncIterator[None]:
    yield
    await wait_for_writes(10)
    await close_client_session()


@pytest.fixture
def engine(db: None, tiny_model: Callable[..., SyntheticModel], tmp_path: Path) -> Engine:
    """Wanted, and not there: its head takes its time."""
    return add_engine(add_model(tiny_model("llama").path, tmp_path / "models"))


ME = Identity(Owner(), "c" * 64)


async def test_a_stream_hears_how_far_its_model_is_and_then_the_answer(engine: Engine) -> None:
    call = CHAT.read(BODY)

    async def ask() -> Any:
        return await ask_engine(call, ME)

    with pytest.raises(ModelLoading) as first:
        await ask()
    async with loopback_engine(streaming(*CHUNKS)) as port:
        heard: list[bytes] = []
        async for block in load_wait.frames(call, ask, first.value):
            heard.append(block)
            if len(heard) == 1:
                await in_db(set_ready, engine, port)
    assert json.loads(heard[0].removeprefix(b": loading "))["state"] == "starting"
    assert b"".join(block for block in heard if not block.startswith(b": ")) == b"".join(CHUNKS)


async def test_a_database_that_is_away_for_a_moment_ends_no_waiting(engine: Engine) -> None:
    call = CHAT.read(BODY)

    async def ask() -> Any:
        return await ask_engine(call, ME)

    with pytest.raises(ModelLoading) as first:
        await ask()
    async with loopback_engine(streaming(*CHUNKS)) as port:
        heard: list[bytes] = []
        waiting = load_wait.frames(call, ask, first.value)
        for _ in range(2):
            heard.append(await anext(waiting))
        with database_away():
            # Some looks are refused meanwhile.
            await asyncio.sleep(4 * load_wait.POLL_S)
        await in_db(set_ready, engine, port)
        heard += [block async for block in waiting]
    assert b"".join(block for block in heard if not block.startswith(b": ")) == b"".join(CHUNKS)


async def test_a_database_that_stays_away_ends_it_with_an_error_frame(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_wait, "DATABASE_AWAY_S", 0.5)
    call = CHAT.read(BODY)

    async def ask() -> Any:
        return await ask_engine(call, ME)

    with database_away():
        heard = [block async for block in load_wait.frames(call, ask, ModelLoading("…", {"state": "starting"}))]
    assert json.loads(heard[-1].removeprefix(b"data: "))["error"]["message"].startswith("The site's database")


async def test_whoever_leaves_while_waiting_leaves_nothing_behind(engine: Engine) -> None:
    call = CHAT.read(BODY)

    async def ask() -> Any:
        return await ask_engine(call, ME)

    with pytest.raises(ModelLoading) as first:
        await ask()
    waiting = load_wait.frames(call, ask, first.value)
    await anext(waiting)
    await anext(waiting)
    await waiting.aclose()
    await asyncio.sleep(0)
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("load of")]


async def test_a_load_that_fails_ends_the_stream_with_an_error_in_its_dialect(engine: Engine) -> None:
    call = MESSAGES.read(b'{"model":"tiny","messages":[{"role":"user","content":"hi"}],"max_tokens":4,"stream":true}')
    tries = 0

    async def ask() -> Any:
        nonlocal tries
        tries += 1
        if tries > 1:
            raise NoEngineReady("The engine failed.")
        raise ModelLoading("It is being loaded.", {"state": "starting"})

    async with loopback_engine(streaming(*CHUNKS)) as port:
        await in_db(set_ready, engine, port)
        heard = [block async for block in load_wait.frames(call, ask, ModelLoading("…", {"state": "starting"}))]
    assert heard[-1].startswith(b"event: error\n")
    assert b"no_engine_ready" in heard[-1]
