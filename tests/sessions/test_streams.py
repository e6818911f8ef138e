"""Streams that outlive their connection, as their clients have them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from django.test import AsyncClient

from pools.db import in_db
from sessions import api_keys
from sessions.models import Turn
from sessions.turn import wait_for_writes
from tests.sessions.counting_engine import BODY, PATIENCE_S, CountingEngine, counting_engine, rest, words
from tests.sessions.local_client import LocalClient
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
async def counting(tiny_model: Callable[..., SyntheticModel], tmp_path: Path) -> AsyncIterator[CountingEngine]:
    async with counting_engine(tiny_model("llama"), tmp_path) as counting:
        yield counting


@pytest.fixture
def api(counting: CountingEngine, settings: Any) -> AsyncClient:
    settings.ALLOWED_HOSTS = ["localhost"]
    return LocalClient()


async def ask(api: AsyncClient, **headers: str) -> Any:
    named = {"X-Hydra-Resumable": "1", **{name.replace("_", "-"): value for name, value in headers.items()}}
    return await api.post("/v1/chat/completions", json.dumps(BODY).encode(), content_type="text/plain", headers=named)


async def read(answer: Any, events: int) -> list[bytes]:
    """The first events of a response, without pings; then the client leaves in the middle of waiting for more."""
    received: list[bytes] = []
    async with asyncio.timeout(PATIENCE_S):
        parts = aiter(answer)
        while len(received) < events:
            part = await anext(parts)
            received += [event + b"\n\n" for event in part.split(b"\n\n") if event and not event.startswith(b":")]
    waiting = asyncio.ensure_future(anext(parts))
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.wait([waiting])
    return received


async def test_a_cut_stream_goes_on_and_is_read_on_from_where_it_was_cut(
    api: AsyncClient, counting: CountingEngine
) -> None:
    counting.allow(2)
    answer = await ask(api)
    first = await read(answer, 2)
    counting.allow(6)
    again = await api.get(f"/v1/stream/{answer['X-Request-Id']}?from=2")
    assert (again["Content-Type"], again["X-Hydra-Engine"]) == ("text/event-stream", "cpu-0")
    second = await rest(again)
    assert words(b"".join(first)) + words(second) == "0 1 2 3 4 5 "
    assert second.endswith(b"data: [DONE]\n\n")
    assert counting.asked == 1
    await wait_for_writes(10)
    assert (await in_db(Turn.objects.get)).state == "done"


async def test_a_stream_that_has_ended_can_be_read_again_from_anywhere(
    api: AsyncClient, counting: CountingEngine
) -> None:
    counting.allow(6)
    answer = await ask(api, X_Conversation_Id="mine")
    whole = await rest(answer)
    assert b": ping" not in whole
    for name in (answer["X-Request-Id"], "mine"):
        assert await rest(await api.get(f"/v1/stream/{name}")) == whole
        assert words(await rest(await api.get(f"/v1/stream/{name}?from=4"))) == "4 5 "
    (listed,) = (await api.get("/v1/streams?conversation_id=mine")).json()["data"]
    assert (listed["id"], listed["status"], listed["events"]) == (answer["X-Request-Id"], "done", 8)
    assert listed["path"] == "/v1/chat/completions"
    assert (await api.get("/v1/streams?conversation_id=other")).json()["data"] == []
    assert await rest(await api.get("/v1/stream/mine?from=8")) == b""


async def test_two_may_listen_to_one_stream(api: AsyncClient, counting: CountingEngine) -> None:
    answer = await ask(api, X_Conversation_Id="mine")
    other = await api.get("/v1/stream/mine")
    counting.allow(6)
    assert await rest(answer) == await rest(other)


async def test_without_being_asked_for_a_stream_ends_with_its_client(
    api: AsyncClient, counting: CountingEngine
) -> None:
    counting.allow(2)
    answer = await ask(api, X_Hydra_Resumable="0", X_Conversation_Id="mine")
    await read(answer, 2)
    async with asyncio.timeout(PATIENCE_S):
        await counting.client_left.wait()
    assert (await api.get("/v1/stream/mine")).status_code == 404


async def test_stopping_frees_the_engine_and_keeps_what_was_said(api: AsyncClient, counting: CountingEngine) -> None:
    counting.allow(2)
    answer = await ask(api)
    await read(answer, 2)
    path = f"/v1/stream/{answer['X-Request-Id']}"
    for _ in range(2):
        assert (await api.delete(path)).json()["status"] == "stopped"
    async with asyncio.timeout(PATIENCE_S):
        await counting.client_left.wait()
    assert words(await rest(await api.get(path))) == "0 1 "
    await wait_for_writes(10)
    assert (await in_db(Turn.objects.get)).state == "cancelled"


async def test_another_owner_does_not_find_it(api: AsyncClient, counting: CountingEngine) -> None:
    _, key = await in_db(api_keys.create_key, "other")
    counting.allow(6)
    answer = await ask(api, X_Conversation_Id="mine")
    stranger = {"Authorization": f"Bearer {key}"}
    for name in (answer["X-Request-Id"], "mine"):
        assert (await api.get(f"/v1/stream/{name}", headers=stranger)).status_code == 404
        assert (await api.delete(f"/v1/stream/{name}", headers=stranger)).status_code == 404
    assert (await api.get("/v1/streams", headers=stranger)).json()["data"] == []
    assert words(await rest(answer)) == "0 1 2 3 4 5 "


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/v1/stream/nothing", 404, "stream_unknown"),
        ("/v1/stream/00000000-0000-0000-0000-000000000000", 404, "stream_unknown"),
        ("/v1/stream/mine?from=9", 400, "invalid_request"),
        ("/v1/stream/mine?from=-1", 400, "invalid_request"),
        ("/v1/stream/mine?from=" + "9" * 5000, 400, "invalid_request"),
    ],
)
async def test_what_is_not_there_cannot_be_read(
    api: AsyncClient, counting: CountingEngine, path: str, status: int, code: str
) -> None:
    counting.allow(6)
    await rest(await ask(api, X_Conversation_Id="mine"))
    answer = await api.get(path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


async def test_only_streams_can_be_resumed(api: AsyncClient) -> None:
    body = json.dumps({**BODY, "stream": False, "resumable": True}).encode()
    answer = await api.post("/v1/chat/completions", body, content_type="text/plain")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "resumable")
    assert (await ask(api, X_Hydra_Resumable="maybe")).status_code == 400
