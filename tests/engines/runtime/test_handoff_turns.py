"""What a conversation finds at its new engine after a move in the middle of an answer, and what it leaves at the old one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import aiohttp
import pytest

from tests.engine_process import EngineProcess
from tests.engines.runtime.handoff_pair import PATH, Follower, Pair, asked_to_move, body, headers


@pytest.mark.parametrize(
    ("architecture", "named"),
    [
        ("qwen35moe", False),
        pytest.param("qwen35moe", True, marks=pytest.mark.soak),
        pytest.param("qwen35", False, marks=pytest.mark.soak),
        pytest.param("llama", True, marks=pytest.mark.soak),
    ],
)
async def test_a_history_without_the_answers_reasoning_finds_its_prompt_where_it_moved(
    pair: Callable[..., Pair], web: aiohttp.ClientSession, session: str, architecture: str, *, named: bool
) -> None:
    """A template that drops reasoning makes the next prompt branch off before the answer: a recurrent state cannot go back."""
    home, away = pair(architecture)
    request = body("Stones lie in the river, and nobody counts them all. " * 20, count=700)
    moving = Follower(web, session, request, "r1")
    reading = asyncio.ensure_future(moving.read(home, {1: away}))
    with home.slowed():
        if not named:
            await moving.until(40)
        moved = await asked_to_move(session, home, away, 1, "r1" if named else "")
    await reading
    assert moving.moves
    assert moved.sent_bytes + moved.skipped_bytes == moved.total_bytes
    for engine in (home, away):
        await asyncio.to_thread(engine.wait_idle)
    assert session not in home.get("/rates")["sessions"]
    again = [{"role": "assistant", "content": "Short."}, {"role": "user", "content": "And then?"}]
    cached, text = await answered(web, away, session, [*request["messages"], *again])
    assert cached >= 0.9 * moving.usage["prompt_tokens"]
    assert text == (await answered(web, home, "", [*request["messages"], *again], cache_prompt=False))[1]


async def answered(
    web: aiohttp.ClientSession, engine: EngineProcess, session: str, messages: list[dict[str, str]], **fields: bool
) -> tuple[int, str]:
    request = body(messages=messages, count=8, stream=False, **fields)
    async with web.post(engine.base_url + PATH, json=request, headers=headers(session, "next")) as response:
        answer = await response.json()
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["choices"][0]["message"]["content"]
