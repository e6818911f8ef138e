"""One request over two engines through the site: the first computes the prompt, the second writes the answer."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from pools.db import in_db
from pools.models import Model
from sessions import kv_losses, kv_measuring, kv_probe, split_terms
from sessions.dialects import CHAT
from sessions.dispatch import Wishes
from sessions.identity import Identity, Owner
from sessions.known_engines import ReadyEngines
from sessions.models import Handoff, SlotLease, Turn
from sessions.rates_board import RatesBoard
from sessions.relay import ask_engine
from sessions.relayed_request import dispatcher, lease_desk
from sessions.split_terms import KvLosses
from sessions.turn import wait_for_writes
from tests.sessions.local_client import LocalClient
from tests.sessions.routed_pool import Conversation, RoutedPool, routed_pools
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db(transaction=True)
PATIENCE_S = 60.0
SPLIT = {"X-Hydra-Force-Mode": "pd"}


@pytest.fixture
async def start(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path, settings: Any
) -> AsyncIterator[Callable[..., Any]]:
    """`await start(architecture)`: two engines that have measured themselves, their rows written."""
    settings.ALLOWED_HOSTS = ["localhost"]
    async with routed_pools(tmp_path) as start_pool:

        async def make(architecture: str, *, family: str = "", **options: Any) -> RoutedPool:
            model = tiny_model(architecture, tie_free=True, **options)
            others, row = {}, {}
            if family:
                others, row = {1: tiny_model(architecture, tie_free=True, seed=1, **options)}, {"kv_family": family}
            pool = await start_pool(model, 2, row, moves=True, others=others, kv_family=family)
            async with asyncio.timeout(PATIENCE_S):
                while not await asyncio.to_thread(lambda: all(map(shares, pool.engines.values()))):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            await ask_again()
            return pool

        yield make


async def ask_again() -> None:
    """What the site heard of the engines before was too early. A request would not wait for their answers for long."""
    board = dispatcher().board = RatesBoard()
    endpoints = await dispatcher().ready.of("tiny")
    async with asyncio.timeout(PATIENCE_S):
        while not all(board._of(endpoint).rates for endpoint in endpoints):
            await board.look(endpoints)
            await asyncio.sleep(0.01)


def shares(engine: Any) -> bool:
    """Its file has been read for a digest, and all."""
    rates = engine.get("/rates")
    return bool(rates["kv_group"] and rates["streams_kv"])


async def settled() -> Turn:
    """The newest turn, once it has ended in the database, and nothing is held any more."""
    await wait_for_writes(PATIENCE_S)
    await lease_desk().settled()
    turn: Turn = await in_db(lambda: Turn.objects.select_related("engine").latest("started_at"))
    assert await in_db(SlotLease.objects.count) == 0
    return turn


@pytest.mark.soak  # the sample of `make test` is in test_split_chosen.py
async def test_a_request_is_shared_by_two_engines_and_answers_as_one_alone_would(start: Any) -> None:
    pool = await start("llama", layers=12)
    talk = Conversation(LocalClient(), {"X-Session-Id": "shared", **SPLIT})
    # An answer that is over before the prompt's state has left would not be shared.
    with pool.slowed():
        headers, usage = await talk.say("Tell of the river.", max_tokens=600)
    assert (headers["X-Hydra-Route"], usage["completion_tokens"]) == ("pd", 600)
    prefill, decode = headers["X-Hydra-Prefill-Engine"], headers["X-Hydra-Decode-Engine"]
    assert {prefill, decode} == set(pool.engines)
    assert headers["X-Hydra-Engine"] == decode
    assert "X-Hydra-Kv-Kl" not in headers  # they are of one quant
    alone = Conversation(LocalClient(), {"X-Session-Id": "alone", "X-Hydra-Force-Engine": decode})
    await alone.say("Tell of the river.", max_tokens=600)
    assert talk.messages == alone.messages
    await settled()
    turn = await in_db(lambda: Turn.objects.select_related("engine").order_by("-started_at")[1])
    assert (turn.state, turn.route, turn.engine.name) == ("done", "pd", decode)
    split = turn.explanation["split"]
    assert (split["state"], split["prefill"], split["decode"]) == ("committed", prefill, decode)
    assert "fell_back" not in split
    assert turn.explanation["chosen"]["mode"] == "pd"
    move = await in_db(Handoff.objects.get)
    assert (move.state, move.kind, move.request_id) == ("committed", "live", str(turn.request_id))
    for engine in pool.engines.values():
        await asyncio.to_thread(engine.wait_idle)
    # The next turn finds it where it was written.
    headers, usage = await Conversation(LocalClient(), {"X-Session-Id": "shared"}, talk.messages).say("And the stones?")
    assert headers["X-Hydra-Engine"] == decode
    assert usage["prompt_tokens_details"]["cached_tokens"] > 600


@pytest.mark.soak
@pytest.mark.parametrize("lost", ["decode", "prefill"])
async def test_the_other_one_answers_alone_where_one_of_the_two_is_gone(start: Any, lost: str) -> None:
    pool = await start("llama", layers=12)
    first = Conversation(LocalClient(), {"X-Session-Id": "first", **SPLIT})
    headers, _ = await first.say("Tell of the river.", max_tokens=8)
    prefill, decode = headers["X-Hydra-Prefill-Engine"], headers["X-Hydra-Decode-Engine"]
    await settled()
    gone = {"prefill": prefill, "decode": decode}[lost]
    pool.engines[gone].process.kill()
    talk = Conversation(LocalClient(), {"X-Session-Id": "second", **SPLIT})
    headers, usage = await talk.say("Tell of the stones.", max_tokens=40)
    left = decode if lost == "prefill" else prefill
    assert (headers["X-Hydra-Route"], headers["X-Hydra-Engine"], usage["completion_tokens"]) == ("solo", left, 40)
    turn = await settled()
    assert (turn.state, turn.route, turn.engine.name) == ("done", "solo", left)
    assert turn.explanation["split"]["fell_back"]
    assert await in_db(Handoff.objects.filter(state__in=["planned", "running"]).count) == 0
    await asyncio.to_thread(pool.engines[left].wait_idle)


@pytest.mark.soak
@pytest.mark.parametrize("lost", ["decode", "prefill"])
async def test_a_client_sees_nothing_of_an_engine_that_dies_while_the_prompt_is_computed(start: Any, lost: str) -> None:
    pool = await start("llama", layers=12)
    text = "Tell a story about a river that nobody has crossed. " * 32
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    call = CHAT.read(json.dumps({**body, "stream": True}).encode())
    await ask_again()
    with pool.slowed():
        stream = await ask_engine(call, Identity(Owner(), "d" * 64), wishes=Wishes(mode="pd"))
        assert stream.split is not None
        engines = {"prefill": stream.split.prefill.name, "decode": stream.split.decode.name}
        target = pool.engines[engines["decode"]]
        async with asyncio.timeout(PATIENCE_S):
            while all(slot["state"] == "idle" for slot in await asyncio.to_thread(target.get, "/slots")):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        pool.engines[engines[lost]].process.kill()
    chunks = [chunk async for chunk in stream]
    await stream.aclose()
    left = next(name for name in pool.engines if name != engines[lost])
    said = [chunk["choices"][0] for chunk in chunks if chunk.get("choices")]
    assert said[-1]["finish_reason"] == "length", chunks[-1]
    turn = await settled()
    assert (turn.state, turn.route, turn.engine.name) == ("done", "solo", left)
    alone = await ask_engine(call, Identity(Owner(), "e" * 64), wishes=Wishes(engine_name=left))
    other = [chunk["choices"][0] async for chunk in alone if chunk.get("choices")]
    await alone.aclose()
    texts = ["".join(one["delta"].get("content") or "" for one in chosen) for chosen in (said, other)]
    assert texts[0] == texts[1]
    await asyncio.to_thread(pool.engines[left].wait_idle)


@pytest.mark.soak
async def test_what_cannot_be_shared_is_refused_to_who_insists_and_else_not_looked_at(start: Any) -> None:
    await start("llama", layers=12)
    client = LocalClient()
    body = {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 4, "n": 2}

    async def post(headers: dict[str, str]) -> Any:
        return await client.post(
            "/v1/chat/completions", json.dumps(body), content_type="application/json", headers=headers
        )

    refused = await post({"X-Session-Id": "two", **SPLIT})
    assert refused.status_code == 503
    assert "cannot change engines" in refused.json()["error"]["message"]
    assert (await post({"X-Session-Id": "two"})).headers["X-Hydra-Route"] == "solo"
    assert (await post({"X-Session-Id": "two", "X-Hydra-Run-Mode": "slow"})).status_code == 400
    assert (await post({"X-Session-Id": "two", "X-Hydra-Run-Mode": "fast"})).status_code == 200
    await settled()
    modes = await in_db(lambda: [turn.explanation["run_mode"] for turn in Turn.objects.order_by("started_at")])
    assert modes[-2:] == ["auto", "fast"]


@pytest.mark.soak
async def test_quants_of_a_family_share_a_request_once_their_loss_is_known(start: Any) -> None:
    pool = await start("llama", layers=4, family="tiny-quants")
    await in_db(lambda: Model.objects.update(shares_kv_family=True))
    dispatcher().ready = ReadyEngines()
    with pytest.raises(AssertionError, match="was never measured"):
        await Conversation(LocalClient(), {"X-Session-Id": "early", **SPLIT}).say("Tell of the river.")
    pairs = await in_db(kv_losses.due)
    assert len(pairs) == 2
    for pair in pairs:
        assert await in_db(kv_losses.claim, pair)
        assert not await in_db(kv_losses.claim, pair)
        found = await kv_measuring.measure(pair)
        assert found is not None
        assert (found.places, found.same_top) == (8, 8)
        assert 0 < found.kl_mean <= found.kl_max < 0.1
    assert await in_db(kv_losses.due) == []
    assert {view.kl_mean is not None for view in await in_db(kv_losses.views)} == {True}
    dispatcher().kv_losses = KvLosses()
    talk = Conversation(LocalClient(), {"X-Session-Id": "mixed", **SPLIT})
    with pool.slowed():
        headers, _ = await talk.say("Tell of the river.", max_tokens=600)
    assert headers["X-Hydra-Route"] == "pd"
    first = next(pair for pair in pairs if pair.prefill.name == headers["X-Hydra-Prefill-Engine"])
    loss = (await in_db(kv_losses.among, [first.prefill.variant_id, first.decode.variant_id]))[
        first.prefill.variant_id, first.decode.variant_id
    ]
    assert float(headers["X-Hydra-Kv-Kl"]) == pytest.approx(loss, abs=1e-6)
    turn = await settled()
    assert turn.explanation["chosen"]["kv_loss"] == pytest.approx(loss)
    # A person finds that too much.
    await in_db(lambda: Model.objects.update(most_kv_loss=0.0))
    dispatcher().ready = ReadyEngines()
    with pytest.raises(AssertionError, match="too much is lost"):
        await Conversation(LocalClient(), {"X-Session-Id": "late", **SPLIT}).say("Tell of the river.")


def test_the_divergence_is_taken_over_what_is_told_and_the_rest_as_one() -> None:
    even = {"a": math.log(0.5), "b": math.log(0.25)}
    assert kv_probe.divergence(even, even) == 0.0
    other = {"a": math.log(0.25), "b": math.log(0.5)}
    assert kv_probe.divergence(even, other) == pytest.approx(0.25 * math.log(2))
    # Nothing in common: what the other side did not name has at most half of what it left over.
    apart = kv_probe.divergence({"a": math.log(0.9)}, {"b": math.log(0.9)})
    assert apart == pytest.approx(0.9 * math.log(0.9 / 0.05) + 0.1 * math.log(0.1 / 0.95))
    assert kv_probe.places(769)[0] == 48
    assert kv_probe.places(769)[-1] == 768
    assert len(kv_probe.places(769)) == 8


@pytest.mark.parametrize(
    ("fields", "movable"),
    [
        ({}, True),
        ({"n": 1, "logprobs": False, "top_logprobs": None}, True),
        ({"n": 2}, False),
        ({"logprobs": True, "top_logprobs": 3}, True),
        ({"reasoning_budget": 5}, True),
    ],
)
def test_answers_that_one_stream_cannot_continue_stay_where_they_begin(fields: dict[str, Any], movable: bool) -> None:
    call = CHAT.read(json.dumps({"messages": [{"role": "user", "content": 'say "n": 2'}], **fields}).encode())
    assert split_terms.is_movable(call, "a" * 64) is movable
    assert not split_terms.is_movable(call, "")
