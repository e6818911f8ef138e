"""Answers of all forms that change engines: constrained, calls, other dialects, whole ones, choices, log probabilities."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from tests.engine_process import EngineProcess
from tests.engines.runtime.handoff_pair import (
    PATH,
    Follower,
    Pair,
    asked_to_move,
    body,
    headers,
    name_of,
    said,
    stayed,
    until_it_runs,
)

TYPED = {
    "input": "Tell a story about a river. " * 12,
    "temperature": 0,
    "stream": True,
    "max_output_tokens": 900,
    "ignore_eos": True,
}


async def test_constrained_answers_and_calls_move_whole(
    pair: Callable[..., Pair], web: aiohttp.ClientSession, session: str
) -> None:
    # Greedy: where the form leaves out what the model wants, the others lie so near to each other that a draw among them hangs on
    # the last bits of a sum, and those on where the cells lie.
    home, away = pair("llama")
    schema = {"type": "object", "properties": {"a": {"type": "string", "minLength": 1500, "maxLength": 1600}},
              "required": ["a"], "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    tool = {"type": "function", "function": {"name": "tell", "parameters": schema}}
    for fence, fields in enumerate(({"response_format": form}, {"tools": [tool], "tool_choice": "required"}), 1):
        request = body(count=2500, ignore_eos=False, **fields)
        moving = Follower(web, session, request, f"c{fence}")
        reading = asyncio.ensure_future(moving.read(home, {fence: away}))
        # Calls are held back, so what is seen of them tells little.
        with home.slowed():
            await asked_to_move(session, home, away, fence, f"c{fence}")
        await reading
        alone = await stayed(web, home, {**request, "cache_prompt": False})
        assert moving.moves
        assert (said(moving), moving.finish_reasons) == (said(alone), alone.finish_reasons)


async def test_an_answer_in_one_piece_and_other_dialects_move(
    pair: Callable[..., Pair], web: aiohttp.ClientSession, session: str
) -> None:
    home, away = pair("llama")
    request = body(count=1500, stream=False)

    async def ask(engine: EngineProcess, path: str, **more: str) -> tuple[int, dict[str, Any]]:
        async with web.post(engine.base_url + path, json=request, headers=headers(session, "w", **more)) as response:
            return response.status, await response.json()

    asking = asyncio.ensure_future(ask(home, PATH))
    with home.slowed():
        await asyncio.to_thread(until_it_runs, home)
        await asked_to_move(session, home, away, 1)
    status, told = await asking
    assert (status, told["error"]["code"], told["error"]["param"]) == (409, "generation_moved", name_of(session, 1))
    status, whole = await ask(away, f"/handoffs/{name_of(session, 1)}/stream", **{"X-Hydra-Path": PATH})
    assert status == 200
    alone = await ask(home, PATH)
    assert whole["choices"] == alone[1]["choices"]
    assert whole["usage"]["completion_tokens"] == 1500

    completion = {"prompt": "A river. " * 30, "max_tokens": 1500, "temperature": 0, "ignore_eos": True, "stream": True}
    moving = Follower(web, session, completion, "k", "/v1/completions")
    reading = asyncio.ensure_future(moving.read(home, {2: away}))
    with home.slowed():
        await moving.until(20)
        await asked_to_move(session, home, away, 2)
    await reading
    assert moving.moves == [name_of(session, 2)]
    assert moving.text == (await stayed(web, home, completion, "/v1/completions")).text


async def test_a_typed_stream_that_moves_twice_goes_on_with_its_numbers(
    pair: Callable[..., Pair], web: aiohttp.ClientSession, session: str
) -> None:
    home, away = pair("llama")
    path = "/v1/responses"
    moving = Follower(web, session, TYPED, "alone", path)
    reading = asyncio.ensure_future(moving.read(home, {1: away, 2: home}))
    with home.slowed(), away.slowed():
        await moving.until(30)
        await asked_to_move(session, home, away, 1)
        await moving.until(len(moving.events) + 30)
        await asked_to_move(session, away, home, 2)
    await reading
    assert moving.moves == [name_of(session, 1), name_of(session, 2)]
    typed = events_of(moving)
    assert [event["sequence_number"] for event in typed] == list(range(len(typed)))
    alone = events_of(await stayed(web, home, {**TYPED, "cache_prompt": False}, path))
    assert [unclocked(event) for event in typed] == [unclocked(event) for event in alone]
    assert typed[-1]["response"]["created_at"] == typed[0]["response"]["created_at"]
    assert typed[-1]["response"]["usage"]["output_tokens"] == 900


@pytest.mark.soak
@pytest.mark.parametrize("architecture", ["llama", "qwen35moe"])
async def test_a_typed_stream_that_leaves_with_its_prompt_goes_on_with_its_numbers(
    pair: Callable[..., Pair], web: aiohttp.ClientSession, session: str, architecture: str
) -> None:
    home, away = pair(architecture)
    path = "/v1/responses"
    request = {**TYPED, "input": "Stones lie in the river, and nobody counts them all. " * 60}
    moving = Follower(web, session, request, "alone", path)
    with home.slowed():
        leaving = asyncio.ensure_future(asked_to_move(session, home, away, 1, "alone"))
        await moving.read(home, {1: away})
        assert (await leaving).kind == "live"
    assert moving.moves == [name_of(session, 1)]
    alone = await stayed(web, home, {**request, "cache_prompt": False}, path)
    assert [unclocked(event) for event in events_of(moving)] == [unclocked(event) for event in events_of(alone)]


@pytest.mark.soak
async def test_a_typed_answer_in_one_piece_moves(
    pair: Callable[..., Pair], web: aiohttp.ClientSession, session: str
) -> None:
    home, away = pair("llama")
    path = "/v1/responses"

    async def ask(engine: EngineProcess, at: str, **more: str) -> tuple[int, dict[str, Any]]:
        whole = {**TYPED, "stream": False}
        async with web.post(engine.base_url + at, json=whole, headers=headers(session, "p", **more)) as response:
            return response.status, await response.json()

    asking = asyncio.ensure_future(ask(home, path))
    with home.slowed():
        await asyncio.to_thread(until_it_runs, home)
        await asked_to_move(session, home, away, 1)
    assert (await asking)[1]["error"]["code"] == "generation_moved"
    _, whole = await ask(away, f"/handoffs/{name_of(session, 1)}/stream", **{"X-Hydra-Path": path})
    _, alone = await ask(home, path)
    assert whole["output"][0]["content"] == alone["output"][0]["content"]


def events_of(follower: Follower) -> list[dict[str, Any]]:
    """A typed stream's events."""
    return [json.loads(event.partition(b"\ndata: ")[2]) for event in follower.events if event.startswith(b"event: ")]


def unclocked(event: dict[str, Any]) -> dict[str, Any]:
    """Without what a clock says, and how much of a prompt was at hand."""
    if "response" not in event:
        return event
    response = {
        name: value for name, value in event["response"].items() if not name.endswith("_at") and name != "timings"
    }
    return {**event, "response": {**response, "usage": (response.get("usage") or {}).get("output_tokens")}}


def choices_of(follower: Follower) -> dict[int, dict[str, Any]]:
    """Each choice's text, reasons, and log probabilities as the stream had them."""
    found: dict[int, dict[str, Any]] = {}
    for chunk in follower.chunks:
        for choice in chunk.get("choices", ()):
            mine = found.setdefault(choice["index"], {"text": "", "reasons": [], "logprobs": []})
            mine["text"] += choice.get("delta", {}).get("content") or choice.get("text") or ""
            mine["reasons"] += [choice["finish_reason"]] if choice.get("finish_reason") else []
            mine["logprobs"] += (choice.get("logprobs") or {}).get("content") or []
    return found


def assert_alike(moved: dict[int, dict[str, Any]], alone: dict[int, dict[str, Any]]) -> None:
    """The same text, and of each token one log probability, the same but for rounding."""
    assert moved.keys() == alone.keys()
    for number, mine in moved.items():
        other = alone[number]
        assert (mine["text"], mine["reasons"]) == (other["text"], other["reasons"])
        assert [entry["token"] for entry in mine["logprobs"]] == [entry["token"] for entry in other["logprobs"]]
        for entry, expected in zip(mine["logprobs"], other["logprobs"], strict=True):
            assert abs(entry["logprob"] - expected["logprob"]) < 0.01
            assert len(entry["top_logprobs"]) == len(expected["top_logprobs"])


@pytest.mark.parametrize(
    "architecture", ["llama", *(pytest.param(name, marks=pytest.mark.soak) for name in ("qwen35", "qwen35moe"))]
)
async def test_all_choices_of_a_request_move_together_and_so_do_log_probabilities(
    pair: Callable[..., Pair], web: aiohttp.ClientSession, session: str, architecture: str
) -> None:
    home, away = pair(architecture)
    request = body(count=900, n=2, logprobs=True, top_logprobs=2)
    moving = Follower(web, session, request, "c")
    reading = asyncio.ensure_future(moving.read(home, {1: away, 2: home}))
    with home.slowed(), away.slowed():
        await moving.until(30)
        first = await asked_to_move(session, home, away, 1)
        await moving.until(len(moving.events) + 30)
        await asked_to_move(session, away, home, 2)
    await reading
    alone = await stayed(web, away, {**request, "cache_prompt": False})
    assert moving.moves == [name_of(session, 1), name_of(session, 2)]
    assert_alike(choices_of(moving), choices_of(alone))
    assert (moving.usage["completion_tokens"], first.kind) == (1800, "live")
    # The prompt's blocks went once, the other choice shares them.
    assert architecture != "llama" or first.skipped_bytes > 0
    for engine in (home, away):
        await asyncio.to_thread(engine.wait_idle)


async def test_choices_that_have_ended_are_counted_where_the_others_go_on(
    pair: Callable[..., Pair], web: aiohttp.ClientSession, session: str
) -> None:
    home, away = pair("llama")
    # The longer prompt leaves room for less of an answer.
    request = {"prompt": ["A river. " * 420, "A stone. " * 20], "max_tokens": 2000, "temperature": 0, "ignore_eos": True,
               "stream": True, "stream_options": {"include_usage": True}, "logprobs": 1}  # fmt: skip
    path = "/v1/completions"
    moving = Follower(web, session, request, "e", path)
    reading = asyncio.ensure_future(moving.read(home, {1: away}))
    async with asyncio.timeout(30):
        while not moving.finish_reasons:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    await asked_to_move(session, home, away, 1)
    await reading
    alone = await stayed(web, home, request, path)
    assert moving.moves
    assert len(moving.finish_reasons) == 2
    assert moving.usage["completion_tokens"] == alone.usage["completion_tokens"]
    texts = [[choice["text"] for chunk in one.chunks for choice in chunk["choices"] if choice["index"] == number]
             for one in (moving, alone) for number in (0, 1)]  # fmt: skip
    assert ["".join(text) for text in texts[:2]] == ["".join(text) for text in texts[2:]]


@pytest.mark.parametrize("count", [200, pytest.param(1200, marks=pytest.mark.soak)])
async def test_choices_that_wait_for_a_slot_are_waited_for(
    pair: Callable[..., Pair], web: aiohttp.ClientSession, session: str, count: int
) -> None:
    """The two that have slots, by one of which the move was begun, end meanwhile."""
    home, away = pair("llama")
    request = body(count=count, n=3)
    moving = Follower(web, session, request, "w")
    reading = asyncio.ensure_future(moving.read(home, {1: away}))
    with home.slowed():
        await moving.until(30)
        await asked_to_move(session, home, away, 1)
    await reading
    assert moving.moves
    assert_alike(choices_of(moving), choices_of(await stayed(web, home, {**request, "cache_prompt": False})))
    assert moving.usage["completion_tokens"] == 3 * count


@pytest.mark.soak
async def test_several_choices_in_one_piece_move_with_their_log_probabilities(
    pair: Callable[..., Pair], web: aiohttp.ClientSession, session: str
) -> None:
    home, away = pair("llama")
    request = body(count=900, n=2, stream=False, logprobs=True)

    async def ask(engine: EngineProcess, path: str, **more: str) -> tuple[int, dict[str, Any]]:
        async with web.post(engine.base_url + path, json=request, headers=headers(session, "o", **more)) as response:
            return response.status, await response.json()

    asking = asyncio.ensure_future(ask(home, PATH))
    with home.slowed():
        await asyncio.to_thread(until_it_runs, home)
        await asked_to_move(session, home, away, 1)
    assert (await asking)[1]["error"]["code"] == "generation_moved"
    status, whole = await ask(away, f"/handoffs/{name_of(session, 1)}/stream", **{"X-Hydra-Path": PATH})
    assert status == 200
    _, alone = await ask(home, PATH)
    assert [choice["message"] for choice in whole["choices"]] == [choice["message"] for choice in alone["choices"]]
    for choice in whole["choices"]:
        assert len(choice["logprobs"]["content"]) == 900
    assert whole["usage"]["completion_tokens"] == 1800
