"""A database that is away for a moment while streams move or lose their engine: none of them misses a word."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp import web

from engines.runtime.http_follow import move_event
from pools.db import in_db
from tests.database_outage import database_away
from tests.sessions.loopback_engine import ENDING, loopback_engine, streaming
from tests.sessions.test_follow_lost import CLOSED, HEAD, arrived, cut, rows, said, shown
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db(transaction=True)
PATIENCE_S = 20.0
# Longer than it takes to be refused by the database a few times.
AWAY_S = 1.0


async def test_a_stream_that_moves_then_is_followed_once_the_database_is_back(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path
) -> None:
    begun, is_away = asyncio.Event(), asyncio.Event()
    asked: list[str] = []

    async def moves(response: web.StreamResponse) -> None:
        begun.set()
        await is_away.wait()
        await response.write(move_event("moving", names[0]))
        await response.write(move_event("moved", names[0]))

    async def target(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        return await streaming(arrived([0, len("Red"), False]), said(" blue.", 7), ENDING + CLOSED)(request)

    source = streaming(HEAD + said("Red", 5), then=moves)
    async with loopback_engine(source) as first, loopback_engine(target) as second:
        names = [await in_db(rows, tiny_model("llama"), tmp_path, first, second)]
        async with asyncio.timeout(PATIENCE_S):
            told = asyncio.create_task(shown())
            await begun.wait()
            with database_away():
                is_away.set()
                await asyncio.sleep(AWAY_S)
                assert not told.done()
            assert await told == ("Red blue.", False)
    assert asked == [f"/handoffs/{names[0]}/stream"]


async def test_a_stream_whose_engine_is_lost_then_goes_on_at_another_one_that_is_known(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path
) -> None:
    begun, is_away = asyncio.Event(), asyncio.Event()
    asked: list[str] = []

    async def dies(response: web.StreamResponse) -> None:
        begun.set()
        await is_away.wait()
        await cut(response)

    async def other(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        return await streaming(said(" blue.", 7), ENDING + CLOSED)(request)

    source = streaming(HEAD + said("Red", 5), then=dies)
    async with loopback_engine(source) as first, loopback_engine(other) as second:
        await in_db(rows, tiny_model("llama"), tmp_path, first, second)
        async with asyncio.timeout(PATIENCE_S):
            told = asyncio.create_task(shown())
            await begun.wait()
            with database_away():
                is_away.set()
                assert await told == ("Red blue.", False)
    assert asked == ["/continue"]
