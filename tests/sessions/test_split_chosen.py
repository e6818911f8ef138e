"""Nobody asks for a split: by what engines have told of their speeds one computes a long prompt and another writes the answer."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth.models import User
from django.core.management import call_command
from django.db import connections
from django.test import AsyncClient

from hydra_site.pool_snapshot import PoolSnapshot, take_snapshot
from pools.db import in_db
from pools.router_plan import Reason
from sessions import leases, services
from sessions.models import ChatSession, Handoff, Turn
from sessions.relayed_request import dispatcher
from sessions.services import TurnView
from tests.near_ties import WITH_LOGPROBS, assert_same_but_for_rounding, logprobs_of
from tests.sessions.local_client import LocalClient
from tests.sessions.routed_pool import Conversation, RoutedPool, routed_pools
from tests.sessions.test_split import ask_again, settled, shares
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db(transaction=True)
PATIENCE_S = 60.0
# Seconds of a step, and of a prompt's token: one card computes faster, the other has the faster memory. The first one alone takes
# seconds for an answer, in which the site asks it to move.
READER, WRITER = (0.04, 0.0005), (0.001, 0.006)
LONG_PROMPT = "The river carries stones past the mill, and nobody counts them. " * 20
ANSWER_TOKENS = 40
CHAT_PATH = "/v1/chat/completions"


@pytest.fixture
async def start(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path, settings: Any
) -> AsyncIterator[Callable[..., Any]]:
    """`await start(architecture)`: a reader, `cpu-0`, and a writer, `cpu-1`, that have measured themselves."""
    settings.ALLOWED_HOSTS = ["localhost", "testserver"]
    async with routed_pools(tmp_path) as start_pool:

        async def make(architecture: str) -> RoutedPool:
            pool = await start_pool(tiny_model(architecture, layers=4), 2, moves=True, cards=(READER, WRITER))
            async with asyncio.timeout(PATIENCE_S):
                while not await asyncio.to_thread(lambda: all(map(shares, pool.engines.values()))):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            await ask_again()
            return pool

        yield make


def body(text: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True, **fields}


async def alone(name: str, messages: list[dict[str, str]]) -> list[dict[str, Any]]:
    """What one engine says that computes all of it anew."""
    fields = {"messages": messages, "cache_prompt": False, **WITH_LOGPROBS}
    headers = {"X-Session-Id": f"alone {name}", "X-Hydra-Force-Engine": name}
    answer = await LocalClient().post(
        CHAT_PATH, json.dumps(body("", **fields)), content_type="application/json", headers=headers
    )
    assert (answer.status_code, answer.headers["X-Hydra-Route"]) == (200, "solo"), answer.content
    return logprobs_of(answer.json())


async def last_turn() -> TurnView:
    await settled()
    turn: TurnView = (await in_db(services.turn_views, None, 1))[0]
    assert turn.explanation is not None
    return turn


async def why_told() -> str:
    """What `manage.py why` says of the last request."""
    told = StringIO()
    await in_db(call_command, "why", "--limit", "1", stdout=told)
    return told.getvalue()


async def all_given_back(pool: RoutedPool) -> None:
    assert await in_db(leases.live) == {}
    assert [dispatcher().board.running(one) for one in await dispatcher().ready.of("tiny")] == [0, 0]
    for engine in pool.engines.values():
        await asyncio.to_thread(engine.wait_idle)


async def test_a_long_prompt_is_computed_by_one_and_answered_by_the_other(start: Any) -> None:
    pool = await start("llama")
    talk = Conversation(LocalClient(), {"X-Session-Id": "long"}, [])
    headers, usage = await talk.say(LONG_PROMPT, max_tokens=ANSWER_TOKENS, **WITH_LOGPROBS)
    told = {name: headers[f"X-Hydra-{name}"] for name in ("Route", "Prefill-Engine", "Decode-Engine", "Engine")}
    assert told == {"Route": "pd", "Prefill-Engine": "cpu-0", "Decode-Engine": "cpu-1", "Engine": "cpu-1"}
    assert not {"X-Hydra-Fell-Back", "X-Hydra-Kv-Kl"} & set(headers)
    # All but what the measuring requests began with too was computed.
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert usage["prompt_tokens"] > 1000 > 64 > cached
    turn = await last_turn()
    assert (turn.route, turn.engine_name, turn.cached_tokens, turn.state) == ("pd", "cpu-1", cached, "done")
    assert headers["X-Hydra-Cached"] == str(cached)
    explanation = turn.explanation or {}
    assert (explanation["why"], explanation["run_mode"]) == ("it costs least", "auto")
    costs = {(one["mode"], one["engine"]): one["cost_s"] for one in explanation["candidates"]}
    assert min(costs, key=costs.__getitem__) == ("pd", "cpu-0 → cpu-1")
    assert {("solo", "cpu-0"), ("solo", "cpu-1")} < set(costs)
    assert (explanation["split"]["state"], explanation["split"]["sent_bytes"] > 0) == ("committed", True)
    move = await in_db(Handoff.objects.get)
    assert (move.state, move.kind, move.request_id) == ("committed", "live", str(turn.request_id))
    seen = await why_told()
    assert re.search(r"split: cpu-0 → cpu-1: \d+ bytes, pause \d+\.?\d* ms", seen), seen
    assert re.search(r"cpu-0 → cpu-1 +pd +\d", seen), seen
    await all_given_back(pool)
    shared = talk.logprobs
    # What comes next is short, and goes on where the answer was written. The client has cut that: a random model's words may be
    # more tokens when they are read again.
    talk.messages[-1]["content"] = "Well."
    headers, again = await talk.say("And then?", max_tokens=8)
    assert (headers["X-Hydra-Route"], headers["X-Hydra-Engine"]) == ("solo", "cpu-1")
    assert again["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 1
    short = [one for one in (await last_turn()).explanation["refusals"] if one["mode"] == "pd"]  # type: ignore[index]
    assert [one["reason"] for one in short] == [Reason.SHORT.value]
    assert Reason.SHORT.value in await why_told()
    # The first computed the prompt as it does alone, so only rounding is between it and the shared answer.
    assert_same_but_for_rounding(shared, await alone("cpu-0", talk.messages[:1]))


class Page:
    """What the panel shows of the newest conversation."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def session(self) -> str:
        key = await in_db(lambda: ChatSession.objects.latest("last_active_at").key_hash)
        answer = await self._client.get(f"/sessions/{key}/")
        assert answer.status_code == 200
        found = re.search(r'data-testid="split">(.*?)</p>', answer.content.decode())
        return found[1] if found else ""

    async def pool(self) -> tuple[tuple[str, ...], PoolSnapshot]:
        snapshot, _ = await take_snapshot(None)
        chat = snapshot.sessions[0]
        return chat.split_engines, snapshot


@pytest.fixture
async def page(transactional_db: None) -> AsyncIterator[Page]:
    client = AsyncClient()
    admin = await in_db(lambda: User.objects.create_superuser("admin", password="a password of the tests"))
    await client.aforce_login(admin)
    yield Page(client)
    await sync_to_async(connections.close_all)()


@pytest.mark.soak
@pytest.mark.parametrize("architecture", ["llama", "qwen35"])
async def test_the_panel_shows_a_split_while_it_runs_and_afterwards(start: Any, page: Page, architecture: str) -> None:
    pool = await start(architecture)
    text = f"Count the stones. {LONG_PROMPT}"
    stream = await LocalClient().post(
        CHAT_PATH, json.dumps(body(text, stream=True, **WITH_LOGPROBS)), content_type="application/json"
    )
    assert (stream.status_code, stream.headers["X-Hydra-Route"]) == (200, "pd")
    reading = asyncio.create_task(_chunks(stream))
    states: set[tuple[str, str]] = set()
    async with asyncio.timeout(PATIENCE_S):
        while await in_db(Turn.objects.filter(state="running", route="pd").count) == 0:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert await page.session() == "cpu-0 computes the prompt, cpu-1 goes on with the answer."
        assert "split: cpu-0 → cpu-1: under way" in await why_told()
        while not reading.done():
            engines, snapshot = await page.pool()
            if snapshot.sessions[0].state == "running":
                assert engines == ("cpu-0", "cpu-1")
            states |= {(card.engine.name, cell.state) for card in snapshot.engines for cell in card.cells}
    assert {("cpu-0", "prefill"), ("cpu-1", "restore"), ("cpu-1", "decode")} <= states, states
    turn = await last_turn()
    assert (turn.route, turn.completion_tokens) == ("pd", ANSWER_TOKENS)
    assert re.match(r"cpu-0 computed the prompt, cpu-1 wrote the answer: move \d+, ", await page.session())
    assert (await page.pool())[0] == ("cpu-0", "cpu-1")
    await all_given_back(pool)
    streamed = [
        one for chunk in reading.result() for one in (chunk["choices"][0].get("logprobs") or {}).get("content", ())
    ]
    assert_same_but_for_rounding(streamed, await alone("cpu-0", body(text)["messages"]))


async def _chunks(stream: Any) -> list[dict[str, Any]]:
    text = b"".join([part async for part in stream.streaming_content])
    values = [json.loads(frame[6:]) for frame in text.split(b"\n\n") if frame.startswith(b"data: {")]
    return [value for value in values if value.get("choices")]


@pytest.mark.soak
async def test_where_two_do_not_pay_one_answers_and_the_reason_is_told(start: Any) -> None:
    pool = await start("llama")
    client = LocalClient()
    # The writer has no place left.
    others = [
        Conversation(client, {"X-Hydra-Force-Engine": "cpu-1", "X-Session-Id": f"other {number}"}, [])
        for number in range(2)
    ]
    busy = [asyncio.create_task(one.say(f"Story {number}.", max_tokens=1500)) for number, one in enumerate(others)]
    async with asyncio.timeout(PATIENCE_S):
        while (await asyncio.to_thread(pool.engines["cpu-1"].get, "/rates"))["decoding"] < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    talk = Conversation(client, {"X-Session-Id": "late"}, [])
    headers, _ = await talk.say(LONG_PROMPT, max_tokens=8)
    assert (headers["X-Hydra-Route"], headers["X-Hydra-Engine"]) == ("solo", "cpu-0")
    assert "X-Hydra-Prefill-Engine" not in headers
    assert not all(task.done() for task in busy)
    turn = (await in_db(services.turn_views, None, 1))[0]
    await asyncio.gather(*busy)
    told = {(one["engine"], one["reason"]) for one in turn.explanation["refusals"]}
    assert ("cpu-0 → cpu-1", Reason.SLOT.value) in told
    assert "split" not in turn.explanation
    await settled()
    # It is free again; a model that is to serve many at once is still not shared.
    for mode, route in (("concurrency", "solo"), ("auto", "pd")):
        fresh = Conversation(client, {"X-Session-Id": mode, "X-Hydra-Run-Mode": mode}, [])
        headers, _ = await fresh.say(f"{mode}: {LONG_PROMPT}", max_tokens=ANSWER_TOKENS)
        assert headers["X-Hydra-Route"] == route
    await settled()
    assert await in_db(Handoff.objects.count) == 1
    await all_given_back(pool)
