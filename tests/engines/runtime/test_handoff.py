"""A conversation that changes engines, between its turns and in the middle of an answer: two engine processes, the same text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engines.errors import EngineError, RpcRefused, StateIncompatible
from engines.rpc_handoff import HandoffClient
from engines.wire_handoff import PLACES, AdoptBody, AskBody
from tests.engines.runtime.handoff_pair import (
    PATH,
    SECRET,
    TENANT,
    Follower,
    Pair,
    asked_to_move,
    body,
    engine_of,
    headers,
    name_of,
    said,
    stayed,
)
from tests.synthetic_gguf import SyntheticModel


@pytest.mark.parametrize(
    "architecture", [*(pytest.param(name, marks=pytest.mark.soak) for name in ("llama", "qwen35")), "qwen35moe"]
)
async def test_a_stream_that_moves_twice_is_the_one_that_stayed(
    pair: Callable[..., Pair], web: aiohttp.ClientSession, session: str, architecture: str
) -> None:
    home, away = pair(architecture)
    request = body(count=2000)
    moving = Follower(web, session, request, "r1")
    reading = asyncio.ensure_future(moving.read(home, {1: away, 2: home}))
    with home.slowed(), away.slowed():
        await moving.until(40)
        first = await asked_to_move(session, home, away, 1)
        await moving.until(len(moving.events) + 40)
        second = await asked_to_move(session, away, home, 2)
    await reading
    alone = await stayed(web, away, {**request, "cache_prompt": False})
    assert moving.moves == [name_of(session, 1), name_of(session, 2)]
    assert (moving.text, moving.finish_reasons) == (alone.text, alone.finish_reasons)
    assert moving.usage["completion_tokens"] == alone.usage["completion_tokens"] == 2000
    assert moving.usage["prompt_tokens"] == alone.usage["prompt_tokens"]
    assert moving.events[-1] == b"data: [DONE]"
    assert (first.kind, first.request_id, second.kind) == ("live", "r1", "live")
    assert second.tokens > first.tokens > 0
    for engine in (home, away):
        await asyncio.to_thread(engine.wait_idle)
    talk = [
        *request["messages"],
        {"role": "assistant", "content": moving.text},
        {"role": "user", "content": "And then?"},
    ]
    next_turn = body(messages=talk, count=8, stream=False)
    async with web.post(home.base_url + PATH, json=next_turn, headers=headers(session, "r2")) as response:
        cached = (await response.json())["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= 0.9 * (moving.usage["prompt_tokens"] + moving.usage["completion_tokens"])


async def test_a_long_idle_conversation_comes_in_several_exchanges(
    pair: Callable[..., Pair], web: aiohttp.ClientSession, session: str
) -> None:
    home, away = pair("qwen35moe")
    talk = [{"role": "user", "content": "Count the pebbles of a long beach, one by one. " * 60}]
    async with web.post(
        home.base_url + PATH, json=body(messages=talk, count=8, stream=False), headers=headers(session, "r1")
    ) as response:
        first = (await response.json())["choices"][0]["message"]["content"]
    moved = await asked_to_move(session, home, away, 1)
    assert (moved.kind, moved.way, moved.skipped_bytes) == ("idle", "shelf", 0)
    assert moved.tokens > PLACES * (home.config.kv_block_tokens or 0)
    assert moved.sent_bytes == moved.total_bytes
    talk += [{"role": "assistant", "content": first}, {"role": "user", "content": "And then?"}]
    request = body(messages=talk, count=8, stream=False)
    async with web.post(away.base_url + PATH, json=request, headers=headers(session, "r2")) as response:
        answer = await response.json()
    async with web.post(home.base_url + PATH, json={**request, "cache_prompt": False}) as response:
        alone = await response.json()
    assert answer["choices"][0]["message"] == alone["choices"][0]["message"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0.9 * moved.tokens


@pytest.mark.parametrize("architecture", ["llama", pytest.param("qwen35", marks=pytest.mark.soak), "qwen35moe"])
async def test_a_conversation_that_moves_between_all_turns_answers_the_same(
    pair: Callable[..., Pair], web: aiohttp.ClientSession, session: str, architecture: str
) -> None:
    home, away = pair(architecture)
    messages: list[dict[str, str]] = []
    before = 0
    for turn in range(4):
        here, there = (home, away) if turn % 2 == 0 else (away, home)
        messages.append({"role": "user", "content": f"Turn {turn}: go on with the river and its stones. " * 4})
        request = body(messages=messages, count=24, stream=False)
        async with web.post(here.base_url + PATH, json=request, headers=headers(session, f"t{turn}")) as response:
            answer = await response.json()
        async with web.post(there.base_url + PATH, json={**request, "cache_prompt": False}) as response:
            alone = await response.json()
        text = answer["choices"][0]["message"]["content"]
        assert text == alone["choices"][0]["message"]["content"]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0.9 * before
        before = answer["usage"]["prompt_tokens"]
        messages.append({"role": "assistant", "content": text})
        moved = await asked_to_move(session, here, there, turn + 1)
        assert (moved.kind, moved.tokens >= before) == ("idle", True)


@pytest.mark.soak
@pytest.mark.parametrize("architecture", ["llama", "qwen35", "qwen35moe"])
async def test_a_conversation_that_moves_inside_and_between_all_turns_answers_the_same(
    pair: Callable[..., Pair], web: aiohttp.ClientSession, session: str, architecture: str
) -> None:
    """Each turn is streamed and moves while it is, free, in a form and as a call in turn; then it moves as an idle one."""
    here, there = pair(architecture)
    schema = {"type": "object", "properties": {"a": {"type": "string", "minLength": 850, "maxLength": 870}},
              "required": ["a"], "additionalProperties": False}  # fmt: skip
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}}
    tool = {"type": "function", "function": {"name": "tell", "parameters": schema}}
    call = {"tools": [tool], "tool_choice": "required"}
    messages: list[dict[str, str]] = []
    computed = 0
    for turn, fields in enumerate(({}, form, call)):
        messages.append({"role": "user", "content": f"Turn {turn}: go on with the river and its stones. " * 4})
        is_free = not fields
        request = body(messages=messages, count=1000 if is_free else 1200, ignore_eos=is_free, **fields)
        moving = Follower(web, session, request, f"t{turn}")
        reading = asyncio.ensure_future(moving.read(here, {2 * turn + 1: there}))
        with here.slowed():
            live = await asked_to_move(session, here, there, 2 * turn + 1, f"t{turn}")
        await reading
        alone = await stayed(web, here, {**request, "cache_prompt": False})
        assert (said(moving), moving.finish_reasons) == (said(alone), alone.finish_reasons)
        assert (live.kind, len(moving.moves)) == ("live", 1)
        # Tools stand at a prompt's beginning, so that nothing of the earlier turns fits.
        assert fields is call or moving.usage["prompt_tokens_details"]["cached_tokens"] >= 0.9 * computed
        computed = moving.usage["prompt_tokens"]
        messages.append({"role": "assistant", "content": moving.text})
        await asyncio.to_thread(there.wait_idle)
        assert (await asked_to_move(session, there, here, 2 * turn + 2)).kind == "idle"


@pytest.mark.parametrize("architecture", ["llama", pytest.param("qwen35moe", marks=pytest.mark.soak)])
async def test_a_named_request_leaves_while_its_prompt_is_computed(
    pair: Callable[..., Pair], web: aiohttp.ClientSession, session: str, architecture: str
) -> None:
    home, away = pair(architecture)
    request = body("Stones lie in the river, and nobody counts them all. " * 60, count=1500)
    # Asked before the request is there, and while an older turn of the session lies idle.
    moving = Follower(web, session, request, "p1")
    asking = asyncio.ensure_future(asked_to_move(session, home, away, 1, "p1"))
    await asyncio.sleep(0.05)
    with home.slowed():
        await moving.read(home, {1: away})
        moved = await asking
    alone = await stayed(web, home, {**request, "cache_prompt": False})
    assert (moving.text, moving.finish_reasons) == (alone.text, alone.finish_reasons)
    assert (moved.kind, moved.request_id, moved.way) == ("live", "p1", "shelf")
    # It stopped soon behind the first token.
    assert moved.tokens - moving.usage["prompt_tokens"] < 750
    with pytest.raises(RpcRefused) as refused:
        await asked_to_move(session, home, away, 2, "never came")
    assert refused.value.peer_code == "session_not_held"


@pytest.mark.parametrize("architecture", ["llama", pytest.param("qwen35moe", marks=pytest.mark.soak)])
async def test_what_the_target_holds_of_another_conversation_is_not_sent(
    pair: Callable[..., Pair], web: aiohttp.ClientSession, session: str, architecture: str
) -> None:
    home, away = pair(architecture)
    system = {"role": "system", "content": "You tell of rivers. " * 60}
    questions = [[system, {"role": "user", "content": f"Number {number}: go on."}] for number in range(2)]
    for engine, messages, who in ((home, questions[0], session), (away, questions[1], f"{session}2")):
        request = body(messages=messages, count=8, stream=False)
        async with web.post(engine.base_url + PATH, json=request, headers=headers(who, "q")) as response:
            assert response.status == 200, await response.text()
    moved = await asked_to_move(session, home, away, 1)
    assert moved.kind == "idle"
    assert moved.skipped_bytes > 0.5 * moved.sent_bytes
    # What was not sent, the pieces that were, and nothing else make up the state.
    assert moved.skipped_bytes + moved.sent_bytes == moved.total_bytes
    talk = [*questions[0], {"role": "assistant", "content": "Well."}, {"role": "user", "content": "And then?"}]
    request = body(messages=talk, count=40, stream=False)
    async with web.post(away.base_url + PATH, json=request, headers=headers(session, "q2")) as response:
        answer = await response.json()
    async with web.post(home.base_url + PATH, json={**request, "cache_prompt": False}) as response:
        alone = await response.json()
    assert answer["choices"][0]["message"] == alone["choices"][0]["message"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_who_cannot_be_followed_stays_and_old_numbers_are_refused(
    pair: Callable[..., Pair], web: aiohttp.ClientSession, session: str
) -> None:
    home, away = pair("llama")
    with pytest.raises(RpcRefused, match="holds nothing"):
        await asked_to_move(session, home, away, 1)
    unfollowed = headers(session, "n", **{"X-Hydra-Follows": "0"})
    with home.slowed():
        response = await web.post(home.base_url + PATH, json=body(count=1000), headers=unfollowed)
        await response.content.readuntil(b"content")
        with pytest.raises(RpcRefused) as refused:
            await asked_to_move(session, home, away, 2)
        assert refused.value.peer_code == "generation_stays"
    await response.read()
    assert (await asked_to_move(session, home, away, 3)).kind == "idle"
    # The same number tells what came of it, an older one is nobody's any more.
    assert (await asked_to_move(session, home, away, 3)).kind == "idle"
    for number in (1, 2):
        with pytest.raises(RpcRefused) as refused:
            await asked_to_move(session, home, away, number)
        assert refused.value.peer_code == "handoff_stale"
    async with HandoffClient("127.0.0.1", away.config.rpc_port, secret=SECRET) as late:
        adopt = AdoptBody("h9", 2, session, TENANT, "", 10, False, False, "x")
        for call in (late.adopt(adopt), late.adopt_ask(AskBody(name_of(session, 3), 2))):
            with pytest.raises(RpcRefused) as refused:
                await call
            assert refused.value.peer_code == "handoff_stale"
        with pytest.raises(RpcRefused) as refused:
            await late.adopt_ask(AskBody("unheard", 2))
        assert refused.value.peer_code == "handoff_unknown"


async def test_what_a_target_refuses_with_is_told_as_its_own(
    pair: Callable[..., Pair], web: aiohttp.ClientSession, session: str
) -> None:
    home, other = pair("llama")[0], pair("qwen35moe")[0]
    alone = Follower(web, session, body(count=4), "t")
    await alone.read(home, {})
    with pytest.raises(RpcRefused, match="architecture is llama there and qwen35moe here") as refused:
        await asked_to_move(session, home, other, 1)
    assert (refused.value.peer_code, refused.value.param) == ("target_refused", "state_incompatible")
    assert refused.value.hint == StateIncompatible.hint


async def test_a_target_that_dies_before_the_commit_leaves_the_source_going(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path, pair: Callable[..., Pair], web: Any, session: str
) -> None:
    home, _ = pair("llama")
    away = await asyncio.to_thread(engine_of(tmp_path, tiny_model("llama", tie_free=True)).__enter__)
    request = body(count=2500)
    staying = Follower(web, session, request, "d")
    reading = asyncio.ensure_future(staying.read(home, {1: away}))
    await staying.until(20)
    moving = asyncio.ensure_future(asked_to_move(session, home, away, 1))
    await asyncio.sleep(0.01)
    away.process.kill()
    try:
        await moving
    except EngineError:
        """It died before it had everything."""
        await reading
        assert staying.usage["completion_tokens"] == 2500
        assert staying.text == (await stayed(web, home, {**request, "cache_prompt": False})).text
    else:
        reading.cancel()
    away.stop()
    await asyncio.to_thread(home.wait_idle)
