"""The event that every request leaves, answered or refused, and the headers by which an error answer is found again."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from engines.models import Engine
from pools.db import in_db
from sessions.turn import wait_for_writes
from tests.rows import add_engine, add_model, set_ready
from tests.sessions.local_client import LocalClient
from tests.sessions.loopback_engine import ENDING, frame, loopback_engine, refusing, streaming
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db(transaction=True)

PATH = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Name a colour."}], "stream": True}
ANSWER = streaming(frame({"role": "assistant", "content": ""}), frame({"content": "Red"}), ENDING)
TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACED = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
BOTH = {
    "event", "request_id", "session", "model", "engine", "node", "route", "why", "background", "request_bytes", "state",
    "error_code", "duration_s",
}  # fmt: skip
ANSWERED = BOTH | {
    "predicted_first_token_s", "routed_s", "sent_s", "answered_s", "finish_reason", "prompt_tokens", "cached_tokens",
    "completion_tokens", "queue_s", "first_token_s", "tokens_per_s", "answer_bytes", "expected", "queue_ms",
}  # fmt: skip
REFUSED = BOTH | {"candidates", "refusals"}
FULL = {
    "model": "tiny", "slots": 2, "free_slots": 0, "decoding": 2, "pending_tokens": [], "queue_length": 8, "queue_limit": 8,
    "context_tokens": 256, "cells": 512, "resident_tokens": 100, "prefill_token_s": 1e-3, "prefill_pair_s": 0.0,
    "steps": [[1, 0.01]], "resident_token_s": 0.0, "request_s": 3.0, "chunk_s": 0.1, "interleaves": True, "kv_group": "",
    "restore_bytes_per_s": 0.0, "sessions": {}, "idle_tokens": 0, "idle_s": 0.0,
}  # fmt: skip


@pytest.fixture
async def engine(
    background: None, tiny_model: Callable[..., SyntheticModel], tmp_path: Path, settings: Any
) -> AsyncIterator[Engine]:
    """Wanted, and not there yet."""
    settings.ALLOWED_HOSTS = ["localhost"]
    yield await in_db(lambda: add_engine(add_model(tiny_model("llama").path, tmp_path)))


@pytest.fixture
def events(caplog: pytest.LogCaptureFixture) -> Callable[[], list[dict[str, Any]]]:
    """What was told so far."""
    caplog.set_level(logging.INFO, "hydra.request_timeline")
    return lambda: [json.loads(one.message) for one in caplog.records if one.name == "hydra.request_timeline"]


async def post(body: dict[str, Any], headers: dict[str, str] | None = None) -> Any:
    return await LocalClient().post(PATH, json.dumps(body), content_type="application/json", headers=headers or {})


async def text_of(answer: Any) -> bytes:
    whole = b"".join([part async for part in answer.streaming_content])
    await wait_for_writes(10)
    return whole


async def test_a_request_leaves_one_event_with_its_times_tokens_and_bytes(engine: Engine, events: Any) -> None:
    async with loopback_engine(ANSWER) as port:
        await in_db(set_ready, engine, port)
        answer = await post(HELLO)
        whole = await text_of(answer)
    (event,) = events()
    assert set(event) >= ANSWERED
    assert "route_headers" not in event
    assert (event["event"], event["request_id"]) == ("request_timeline", answer["X-Request-Id"])
    assert (event["engine"], event["node"], event["model"]) == ("cpu-0", "here", "tiny")
    assert (event["state"], event["error_code"], event["finish_reason"]) == ("done", "", "stop")
    assert (event["prompt_tokens"], event["cached_tokens"], event["completion_tokens"]) == (10, 4, 2)
    assert (event["request_bytes"], event["answer_bytes"]) == (len(json.dumps(HELLO)), len(whole))
    assert (event["route"], event["why"]) == ("solo", "no other engine can")
    assert event["session"] == answer["X-Hydra-Session"][:16]
    assert 0 <= event["routed_s"] <= event["sent_s"] <= event["answered_s"] <= event["first_token_s"]
    assert event["first_token_s"] <= event["duration_s"]


async def test_a_form_that_no_engine_has_is_refused_with_an_event_that_says_what_was_weighed(
    engine: Engine, events: Any
) -> None:
    async with loopback_engine(ANSWER) as port:
        await in_db(set_ready, engine, port)
        answer = await post(HELLO, {"X-Hydra-Force-Mode": "combined", **TRACED})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_engine_ready")
    (event,) = events()
    assert set(event) == REFUSED
    assert (event["state"], event["error_code"], event["request_bytes"]) == (
        "refused",
        "no_engine_ready",
        len(json.dumps(HELLO)),
    )
    assert event["why"] == "no engine can take it"
    assert [(one["engine"], one["reason"]) for one in event["refusals"]] == [
        ("cpu-0", "the operator asked for another form")
    ]
    assert (answer["X-Request-Id"], answer["X-Hydra-Trace"]) == (event["request_id"], TRACE)


async def test_full_lines_are_told_with_who_was_full(engine: Engine, events: Any) -> None:
    async def rates(_request: web.Request) -> web.StreamResponse:
        return web.json_response(FULL)

    async with loopback_engine(ANSWER, rates) as port:
        await in_db(set_ready, engine, port)
        answer = await post(HELLO)
    assert (answer.status_code, answer.json()["error"]["code"], answer["Retry-After"]) == (429, "pool_busy", "2")
    (event,) = events()
    assert (event["state"], event["error_code"]) == ("refused", "pool_busy")
    assert event["refusals"] == [
        {"mode": "solo", "engine": "cpu-0", "reason": "its waiting line is full", "detail": "8 wait"}
    ]
    assert answer["X-Request-Id"] == event["request_id"]
    assert answer["X-Hydra-Trace"] == event["request_id"].replace("-", "")


async def test_a_model_that_nobody_knows_leaves_an_event_and_what_was_never_read_leaves_headers(
    engine: Engine, events: Any
) -> None:
    answer = await post({**HELLO, "model": "unknown"})
    (event,) = events()
    assert (answer.status_code, event["error_code"], event["model"]) == (404, "model_not_found", "unknown")
    assert (event["candidates"], event["refusals"], event["why"]) == ([], [], None)
    assert answer["X-Request-Id"] == event["request_id"]
    unread = await post({"messages": []}, TRACED)
    assert (unread.status_code, unread["X-Hydra-Trace"]) == (400, TRACE)
    assert unread["X-Request-Id"] not in ("", answer["X-Request-Id"])
    assert len(events()) == 1


async def test_an_engines_own_refusal_is_found_by_its_headers_too(engine: Engine, events: Any) -> None:
    async with loopback_engine(refusing(400, "context_length_exceeded")) as port:
        await in_db(set_ready, engine, port)
        answer = await post(HELLO)
    (event,) = events()
    assert (answer.status_code, event["state"], event["error_code"]) == (400, "failed", "context_length_exceeded")
    assert answer["X-Request-Id"] == event["request_id"]


async def test_a_stream_that_waited_for_its_model_names_its_request_and_its_event_says_that_headers_came_first(
    engine: Engine, events: Any
) -> None:
    answer = await post(HELLO)
    assert answer["X-Request-Id"]
    assert answer["X-Hydra-Session"]
    assert "X-Hydra-Engine" not in answer
    parts = aiter(answer.streaming_content)
    assert (await anext(parts)).startswith(b": loading ")
    async with loopback_engine(ANSWER) as port:
        await in_db(set_ready, engine, port)
        async with asyncio.timeout(20):
            rest = b"".join([part async for part in parts])
        await wait_for_writes(10)
    assert rest.endswith(ENDING)
    (event,) = events()
    assert (event["request_id"], event["state"]) == (answer["X-Request-Id"], "done")
    assert event["route_headers"] is False
    assert event["load_wait_s"] > 0


async def test_a_load_that_fails_while_a_stream_waits_is_told_once(engine: Engine, events: Any) -> None:
    answer = await post(HELLO)
    parts = aiter(answer.streaming_content)
    await anext(parts)
    await in_db(lambda: Engine.objects.filter(pk=engine.pk).update(state="failed"))
    async with asyncio.timeout(20):
        rest = b"".join([part async for part in parts])
    assert b"no_engine_ready" in rest
    (event,) = events()
    assert (event["request_id"], event["state"]) == (answer["X-Request-Id"], "refused")
    assert (event["error_code"], event["route_headers"]) == ("no_engine_ready", False)


async def test_whoever_wants_a_whole_answer_of_a_model_that_is_loaded_is_refused_with_an_event(
    engine: Engine, events: Any
) -> None:
    answer = await post({**HELLO, "stream": False})
    (event,) = events()
    assert (answer.status_code, event["state"], event["error_code"]) == (503, "refused", "model_loading")
    assert answer["X-Request-Id"] == event["request_id"]
