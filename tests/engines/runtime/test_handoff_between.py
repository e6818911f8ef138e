"""Conversations between their turns move wherever the engine has put them, also where their answer ends while they are moved."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest

from engines.errors import RpcRefused
from engines.rpc_handoff import HandoffClient
from engines.wire_handoff import HandoffBody
from tests.engine_process import EngineProcess
from tests.engines.runtime.handoff_pair import (
    PATH,
    SECRET,
    Follower,
    Pair,
    asked_to_move,
    body,
    engine_of,
    headers,
    name_of,
)
from tests.synthetic_gguf import SyntheticModel


async def said(web: aiohttp.ClientSession, engine: EngineProcess, session: str, text: str) -> tuple[str, int, int]:
    """One turn's answer, the tokens of its prompt and those of them that were at hand."""
    request = body(text, count=24, stream=False)
    async with web.post(engine.base_url + PATH, json=request, headers=headers(session, "r")) as response:
        answer = await response.json()
    usage = answer["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["message"]["content"], usage["prompt_tokens"], cached


async def emptied(engine: EngineProcess, *, but: int) -> None:
    """Returns once the idle engine has put away what it does not leave in its slots."""
    async with asyncio.timeout(30):
        while sum(slot["cached_tokens"] > 0 for slot in await asyncio.to_thread(engine.get, "/slots")) > but:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def held(engine: EngineProcess) -> set[str]:
    return set((await asyncio.to_thread(engine.get, "/rates"))["sessions"])


async def gone(engine: EngineProcess, session: str) -> set[str]:
    """Who is left once the session is: an idle one is emptied behind its move's answer."""
    async with asyncio.timeout(30):
        while session in (left := await held(engine)):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return left


@pytest.mark.parametrize("others", [1, 3])
async def test_what_was_put_away_moves_also_where_its_slot_is_another_ones(
    pair: Callable[..., Pair], web: aiohttp.ClientSession, session: str, others: int
) -> None:
    """Three others need both slots after it."""
    home, away = pair("llama")
    text = f"Of {others} others. " + "Tell a story about a river. " * 12
    told, prompt_tokens, _ = await said(web, home, session, text)
    for number in range(others):
        await said(web, home, f"{session}.{number}", f"{number} of {others} others talk of hills and of the sea. " * 12)
    await emptied(home, but=1)
    assert session in await held(home)
    moved = await asked_to_move(session, home, away, others)
    assert (moved.kind, moved.tokens > prompt_tokens) == ("idle", True)
    # Nobody else went along, or was lost.
    assert {f"{session}.{number}" for number in range(others)} <= await gone(home, session)
    assert session in await held(away)
    again, _, cached = await said(web, away, session, text)
    assert (again, cached) == (told, prompt_tokens - 1)


async def test_a_session_of_which_nothing_is_held_says_so(pair: Callable[..., Pair], session: str) -> None:
    home, away = pair("llama")
    with pytest.raises(RpcRefused, match="holds nothing") as refused:
        await asked_to_move(session, home, away, 1)
    assert refused.value.peer_code == "session_not_held"


@pytest.mark.parametrize("tries", [6, pytest.param(60, marks=pytest.mark.soak)])
async def test_an_answer_that_ends_on_its_way_leaves_a_conversation_that_moves(
    pair: Callable[..., Pair], web: aiohttp.ClientSession, session: str, tries: int
) -> None:
    """Each time the answer has gone some tokens further when it is asked to."""
    home, away = pair("llama")
    count = 48
    for number in range(tries):
        name, request = f"{session}.{number}", body(f"Number {number} of {tries}. " * 40, count)
        answer = Follower(web, name, request, f"e{number}")
        reading = asyncio.create_task(answer.read(home, {number + 1: away}))
        await answer.until(count - 1 - number % 12)
        moved = await asked_to_move(name, home, away, number + 1)
        await reading
        assert (moved.kind, len(answer.moves)) in (("live", 1), ("idle", 0))
        assert answer.usage["completion_tokens"] == count
        await gone(home, name)
        assert name in await held(away)


@pytest.mark.soak
async def test_more_moves_than_send_at_once_wait_for_their_turn(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path, web: aiohttp.ClientSession, session: str
) -> None:
    """Of requests that are named before they come; some stand in the line meanwhile."""
    model, count = tiny_model("llama", tie_free=True), 12

    async def moves(number: int) -> tuple[str, int]:
        name = f"{session}.{number}"
        answer = Follower(web, name, body(f"Story {number} of {count}. " * 60, 400), f"m{number}")
        reading = asyncio.create_task(answer.read(home, {number: away}))
        async with HandoffClient("127.0.0.1", home.config.rpc_port, secret=SECRET) as client:
            port, move = away.config.rpc_port, name_of(name, number)
            moved = await client.handoff(
                HandoffBody(move, number, name, "127.0.0.1", port, SECRET, 300.0, f"m{number}")
            )
        await reading
        assert answer.usage["completion_tokens"] == 400
        return moved.kind, len(answer.moves)

    with engine_of(tmp_path, model, slots=6) as home, engine_of(tmp_path, model, slots=count) as away, home.slowed():
        assert await asyncio.gather(*map(moves, range(1, count + 1))) == [("live", 1)] * count


@pytest.mark.soak
async def test_an_answer_stays_where_it_can_become_as_long_as_was_asked_for(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path, web: aiohttp.ClientSession, session: str
) -> None:
    """The target's context is smaller; a request that asked for no length goes there."""
    model = tiny_model("llama", tie_free=True)
    with engine_of(tmp_path, model) as home, engine_of(tmp_path, model, context_tokens=700) as away:
        for number, count in ((1, 1500), (2, 100), (3, 4096)):
            name = f"{session}.{number}"
            answer = Follower(web, name, body("Tell a story. " * 8, count), f"s{number}")
            reading = asyncio.create_task(answer.read(home, {number: away}))
            with home.slowed():
                await answer.until(20)
                if number == 1:
                    with pytest.raises(RpcRefused, match=r"may take \d+ tokens"):
                        await asked_to_move(name, home, away, number)
                else:
                    assert (await asked_to_move(name, home, away, number)).kind == "live"
            await reading
            assert len(answer.moves) == (number != 1)
            if number != 3:
                assert answer.usage["completion_tokens"] == count
