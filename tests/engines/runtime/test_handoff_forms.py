"""Answers of all forms that change engines: constrained, calls, other dialects, whole ones, choices, log probabilities."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from engines.wire_handoff import HandoffAnswer
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


async def moved(
    web: aiohttp.ClientSession,
    session: str,
    engines: Pair,
    request: dict[str, Any],
    path: str = PATH,
    *,
    fences: tuple[int, ...] = (1,),
) -> tuple[Follower, list[HandoffAnswer]]:
    """A stream that was moved to the other engine and, with a second fence, back again; and what each move told."""
    home, away = engines
    places = dict(zip(fences, (away, home), strict=False))
    moving = Follower(web, session, request, "alone", path)  # the id of one that stays, which events repeat
    reading = asyncio.ensure_future(moving.read(home, places))
    told, source = [], home
    with home.slowed(), away.slowed():
        for fence, target in places.items():
            await moving.until(len(moving.events) + 30)
            told.append(await asked_to_move(session, source, target, fence))
            source = target
    await reading
    assert moving.moves == [name_of(session, fence) for fence in fences]
    return moving, told


async def moved_whole(
    web: aiohttp.ClientSession, session: str, engines: Pair, request: dict[str, Any], path: str = PATH
) -> tuple[dict[str, Any], dict[str, Any]]:
    """An answer in one piece that was moved while it was written, as the other engine gives it, and one that stayed."""
    home, away = engines

    async def ask(engine: EngineProcess, at: str, **more: str) -> tuple[int, dict[str, Any]]:
        async with web.post(engine.base_url + at, json=request, headers=headers(session, "w", **more)) as response:
            return response.status, await response.json()

    asking = asyncio.ensure_future(ask(home, path))
    with home.slowed():
        await asyncio.to_thread(until_it_runs, home)
        await asked_to_move(session, home, away, 1)
    status, told = await asking
    assert (status, told["error"]["code"], told["error"]["param"]) == (409, "generation_moved", name_of(session, 1))
    status, whole = await ask(away, f"/handoffs/{name_of(session, 1)}/stream", **{"X-Hydra-Path": path})
    assert status == 200
    return whole, (await ask(home, path))[1]


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
    engines = pair("llama")
    whole, alone = await moved_whole(web, session, engines, body(count=1500, stream=False))
    assert whole["choices"] == alone["choices"]
    assert whole["usage"]["completion_tokens"] == 1500

    completion = {"prompt": "A river. " * 30, "max_tokens": 1500, "temperature": 0, "ignore_eos": True, "stream": True}
    moving, _ = await moved(web, session, engines, completion, "/v1/completions", fences=(2,))
    assert moving.text == (await stayed(web, engines[0], completion, "/v1/completions")).text


async def test_a_typed_stream_that_moves_twice_goes_on_with_its_numbers(
    pair: Callable[..., Pair], web: aiohttp.ClientSession, session: str
) -> None:
    engines, path = pair("llama"), "/v1/responses"
    moving, _ = await moved(web, session, engines, TYPED, path, fences=(1, 2))
    typed = events_of(moving)
    assert [event["sequence_number"] for event in typed] == list(range(len(typed)))
    alone = events_of(await stayed(web, engines[0], {**TYPED, "cache_prompt": False}, path))
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
    whole, alone = await moved_whole(web, session, pair("llama"), {**TYPED, "stream": False}, "/v1/responses")
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
    home, away = engines = pair(architecture)
    request = body(count=900, n=2, logprobs=True, top_logprobs=2)
    moving, (first, _) = await moved(web, session, engines, request, fences=(1, 2))
    alone = await stayed(web, away, {**request, "cache_prompt": False})
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
    request = {"prompt": ["A river. " * 500, "A stone. " * 20], "max_tokens": 2000, "temperature": 0, "ignore_eos": True,
               "stream": True, "stream_options": {"include_usage": True}, "logprobs": 1}  # fmt: skip
    path = "/v1/completions"
    moving = Follower(web, session, request, "e", path)
    with home.slowed():
        reading = asyncio.ensure_future(moving.read(home, {1: away}))
        async with asyncio.timeout(60):
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
    engines, request = pair("llama"), body(count=count, n=3)
    moving, _ = await moved(web, session, engines, request)
    assert_alike(choices_of(moving), choices_of(await stayed(web, engines[0], {**request, "cache_prompt": False})))
    assert moving.usage["completion_tokens"] == 3 * count


@pytest.mark.soak
async def test_several_choices_in_one_piece_move_with_their_log_probabilities(
    pair: Callable[..., Pair], web: aiohttp.ClientSession, session: str
) -> None:
    request = body(count=900, n=2, stream=False, logprobs=True)
    whole, alone = await moved_whole(web, session, pair("llama"), request)
    assert [choice["message"] for choice in whole["choices"]] == [choice["message"] for choice in alone["choices"]]
    for choice in whole["choices"]:
        assert len(choice["logprobs"]["content"]) == 900
    assert whole["usage"]["completion_tokens"] == 1800
