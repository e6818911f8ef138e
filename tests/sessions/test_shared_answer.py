"""Retries under one key, and equal requests at once, cost an engine one answer; and nobody leaves a place leased."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from django.utils import timezone

from engines.client import close_client_session
from engines.models import Engine
from pools.db import in_db
from sessions import leases, relayed_request
from sessions.identity import Identity, Owner
from sessions.models import SlotLease
from sessions.relayed_request import lease_desk
from sessions.shared_answer import lease_name, shared_answers
from sessions.turn import wait_for_writes
from tests.rows import add_engine, add_model, set_ready
from tests.sessions.local_client import LocalClient
from tests.sessions.loopback_engine import ENDING, frame, loopback_engine
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db(transaction=True)

PATIENCE_S = 30.0


class SlowEngine:
    """Answers when it is let; keeps the headers that it was sent."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.asked: list[dict[str, str]] = []
        self.left = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append({name.lower(): value for name, value in request.headers.items()})
        body = json.loads(await request.read())
        try:
            if not body.get("stream"):
                await self.go_on.wait()
                choice = {"message": {"content": "Red"}, "finish_reason": "stop"}
                return web.json_response({"choices": [choice], "usage": {"prompt_tokens": 5, "completion_tokens": 1}})
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await response.write(frame({"content": "Red"}))
            await self.go_on.wait()
            await response.write(ENDING)
        except asyncio.CancelledError:
            self.left += 1
            raise
        return response


@pytest.fixture
async def engine(tiny_model: Callable[..., SyntheticModel], tmp_path: Path, settings: Any) -> AsyncIterator[SlowEngine]:
    settings.ALLOWED_HOSTS = ["localhost"]
    slow = SlowEngine()
    async with loopback_engine(slow.answer) as port:
        await in_db(lambda: set_ready(add_engine(add_model(tiny_model("llama").path, tmp_path)), port))
        yield slow
        slow.go_on.set()
        await wait_for_writes(10)
        await lease_desk().settled()
        assert await in_db(leases.live) == {}
        await close_client_session()


async def ask(text: str = "Name a colour.", headers: dict[str, str] | None = None, **fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": text}], **fields}
    return await LocalClient().post(
        "/v1/chat/completions", json.dumps(body), content_type="application/json", headers=headers or {}
    )


async def first_asked(engine: SlowEngine) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not engine.asked:  # noqa: ASYNC110 -- the engine is asked from within the site
            await asyncio.sleep(0.01)


async def test_a_retry_under_the_same_key_waits_for_the_first_answer(engine: SlowEngine) -> None:
    key = {"Idempotency-Key": "k"}
    first = asyncio.create_task(ask(headers=key))
    await first_asked(engine)
    again = asyncio.create_task(ask(headers=key))
    await asyncio.sleep(0.1)
    other = await ask("Name a stone.", headers=key)
    assert other.status_code == 400
    engine.go_on.set()
    answers = [await first, await again]
    assert [answer.json()["choices"][0]["message"]["content"] for answer in answers] == ["Red", "Red"]
    assert len({answer["X-Request-Id"] for answer in answers}) == 1
    # It can be had again for a while.
    assert (await ask(headers=key))["X-Request-Id"] == answers[0]["X-Request-Id"]
    assert len(engine.asked) == 1


def leased_elsewhere(name: str) -> None:
    """As another replica of the site would have it."""
    key = lease_name(Identity(Owner(), ""), name)
    later = timezone.now() + timedelta(minutes=1)
    engine_id = Engine.objects.get().pk
    SlotLease.objects.create(request_id=uuid.uuid4(), engine_id=engine_id, owner="b", idempotency=key, expires_at=later)


async def test_a_retry_at_another_replica_waits_for_the_first_one_to_end(
    engine: SlowEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.go_on.set()
    await in_db(leased_elsewhere, "k")
    key = {"Idempotency-Key": "k"}
    again = asyncio.create_task(ask(headers=key))
    assert (await ask()).status_code == 200, "nobody else is held up"
    await asyncio.sleep(0.2)
    assert not again.done()
    await in_db(lambda: SlotLease.objects.filter(owner="b").delete())
    assert (await again).status_code == 200
    monkeypatch.setattr(relayed_request, "DUPLICATE_PATIENCE_S", 0.0)
    await in_db(leased_elsewhere, "late")
    refused = await ask(headers={"Idempotency-Key": "late"})
    assert (refused.status_code, refused["Retry-After"]) == (409, "2")
    await in_db(lambda: SlotLease.objects.filter(owner="b").delete())


async def test_equal_requests_without_chance_are_answered_once_and_others_each(engine: SlowEngine) -> None:
    same = [asyncio.create_task(ask(temperature=0, stream=True)) for _ in range(3)]
    await first_asked(engine)
    async with asyncio.timeout(PATIENCE_S):
        while [shared.readers for shared in shared_answers()._running.values()] != [3]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    engine.go_on.set()
    texts = [b"".join([part async for part in await task]) for task in same]
    assert len(set(texts)) == 1
    assert texts[0].endswith(b"data: [DONE]\n\n")
    assert len(engine.asked) == 1
    await asyncio.gather(*(ask(temperature=1) for _ in range(2)))
    assert len(engine.asked) == 3


async def test_when_all_who_share_an_answer_have_left_its_engine_is_let_go(engine: SlowEngine) -> None:
    tasks = [asyncio.create_task(ask(temperature=0)) for _ in range(2)]
    await first_asked(engine)
    for task in tasks:
        task.cancel()
    async with asyncio.timeout(PATIENCE_S):
        while not engine.left:  # noqa: ASYNC110 -- the engine notices within the site
            await asyncio.sleep(0.01)


async def test_only_the_site_says_whose_a_request_is(engine: SlowEngine) -> None:
    engine.go_on.set()
    forged = {"X-Hydra-Session": "mine", "X-Hydra-Tenant": "00", "X-Hydra-Resume-From": "10.0.0.1:9500"}
    answer = await ask(headers={**forged, "X-Session-Id": "s"})
    sent = engine.asked[-1]
    assert sent["x-hydra-session"] == answer["X-Hydra-Session"] != "mine"
    assert len(sent["x-hydra-tenant"]) == 32
    assert "x-hydra-resume-from" not in sent
    assert (answer["X-Hydra-Node"], answer["X-Hydra-Route"], answer["X-Hydra-Model"]) == ("here", "solo", "tiny")
    assert len(answer["X-Hydra-Trace"]) == 32
    traced = await ask(headers={"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"})
    assert traced["X-Hydra-Trace"] == "ab" * 16
    assert 0 < float(engine.asked[-1]["x-hydra-budget-s"]) <= 1800
    await ask(headers={"X-Hydra-Timeout": "5"})
    assert 0 < float(engine.asked[-1]["x-hydra-budget-s"]) <= 5
    # A program's own question goes without a conversation.
    await ask("Generate a concise, 3-5 word title for this chat.")
    assert "x-hydra-session" not in engine.asked[-1]
    await ask(headers={"X-Session-Id": "s", "X-Hydra-Background": "1"})
    assert "x-hydra-session" not in engine.asked[-1]


async def test_an_operator_may_name_the_engine(engine: SlowEngine) -> None:
    engine.go_on.set()
    assert (await ask(headers={"X-Hydra-Force-Engine": "cpu-0"}))["X-Hydra-Engine"] == "cpu-0"
    assert (await ask(headers={"X-Hydra-Force-Engine": "none"})).status_code == 503
    assert (await ask(headers={"X-Hydra-Force-Mode": "nonsense"})).status_code == 400
