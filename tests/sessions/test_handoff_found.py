"""Moves whose source cannot say what came of them: their target is asked, and what it says is written down."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from django.db.models.functions import Now
from prometheus_client import CollectorRegistry

from engines.errors import EngineError, HandoffUnknown, SessionNotHeld, TargetRefused
from engines.models import Engine
from engines.rpc_exchange import Exchange
from engines.rpc_serving import RpcServer, Service, Terms
from engines.wire import MAX_CONFIGURE_BYTES, Opcode, Status
from engines.wire_handoff import AdoptedAnswer, AskBody
from engines.wire_json import read_json
from pools.db import in_db
from sessions import handoffs
from sessions.models import ChatSession, Handoff, SlotLease
from tests.engine_process import free_port
from tests.rows import add_engine, add_model, set_ready
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db(transaction=True)
SECRET = "a secret of the tests, long enough"
REQUEST, LATER = uuid.uuid4(), uuid.uuid4()


@asynccontextmanager
async def peer(state: str, asked: list[AskBody], refusal: EngineError | None = None) -> AsyncIterator[int]:
    """An engine that holds nothing of a session (or refuses to move it by `refusal`), and knows the move that it is asked for
    as `state` ("": not at all)."""

    async def ask(exchange: Exchange, body: bytes) -> None:
        asked.append(read_json(AskBody, body, "ADOPT_ASK"))
        if not state:
            raise HandoffUnknown("There is no such handoff here.")
        await exchange.answer(Status.OK, AdoptedAnswer(state, 77))

    async def handoff(_exchange: Exchange, _body: bytes) -> None:
        raise refusal or SessionNotHeld("This engine holds nothing of the session that could move.")

    services = {
        Opcode.ADOPT_ASK: Service(ask, MAX_CONFIGURE_BYTES, None),
        Opcode.HANDOFF: Service(handoff, MAX_CONFIGURE_BYTES, None),
    }
    port = free_port()
    terms = Terms(host="127.0.0.1", port=port, name="peer", secret=SECRET, connections=8, idle_s=30.0, stall_s=30.0)
    server = RpcServer(terms, services, {}, CollectorRegistry())
    await server.start()
    try:
        yield port
    finally:
        await server.close(1.0)


def rows(model: SyntheticModel, folder: Path, source_port: int, target_port: int, *, serves: bool) -> int:
    """A move that was begun a while ago, and two leases at its source: one of before, one of since then."""
    variant = add_model(model.path, folder)
    source, target = (add_engine(variant, name=name) for name in ("cpu-0", "cpu-1"))
    for engine, port in ((source, source_port), (target, target_port)):
        Engine.objects.filter(pk=engine.pk).update(rpc_port=port, rpc_secret=SECRET)
        set_ready(engine, port)
    chat = ChatSession.objects.create(key_hash="a" * 64, model_name="tiny", engine=source)
    move = handoffs.start(chat.pk, source.pk, target.pk, send=False)
    Handoff.objects.update(state="running", started_at=Now() - timedelta(seconds=20))
    for request_id, age_s in ((REQUEST, 30), (LATER, 10)):
        SlotLease.objects.create(
            request_id=request_id,
            session=chat.key_hash,
            engine=source,
            owner="a site",
            created_at=Now() - timedelta(seconds=age_s),
            expires_at=Now() + timedelta(seconds=60),
        )
    if not serves:
        Engine.objects.filter(pk=source.pk).update(state="unhealthy", rpc_port=None)
    return move


@pytest.mark.parametrize(
    ("source", "state"),
    [("gone", "going"), ("started anew", "going"), ("does not serve", "going"), ("gone", "over"), ("started anew", "")],
)
async def test_a_move_that_came_to_its_end_is_written_down_by_what_its_target_knows(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path, source: str, state: str
) -> None:
    asked: list[AskBody] = []
    async with peer(state, asked) as target, peer("", []) as fresh:
        port = fresh if source == "started anew" else free_port()
        move = await in_db(rows, tiny_model("llama"), tmp_path, port, target, serves=source != "does not serve")
        seen = await handoffs.run(move)
        assert await handoffs.run(move) == seen
    # What was still on its way is not taken any more.
    assert asked == [AskBody(handoffs.name_of(move), move, drop=True)]
    chat = await in_db(lambda: ChatSession.objects.select_related("engine", "wanted_engine").get())
    leased = await in_db(lambda: dict(SlotLease.objects.values_list("request_id", "engine__name")))
    if state == "going":
        assert (seen.state, seen.reason, seen.tokens, seen.pause_ms) == ("committed", "", 77, None)
        assert (chat.engine.name, chat.wanted_engine.name) == ("cpu-1", "cpu-1")
        assert leased == {REQUEST: "cpu-1", LATER: "cpu-0"}
    else:
        told = {"gone": "the source was lost", "started anew": "session_not_held", "does not serve": "one of the two"}
        assert seen.state == "failed"
        assert seen.reason.startswith(told[source])
        assert (chat.engine.name, set(leased.values())) == ("cpu-0", {"cpu-0"})


async def test_a_move_whose_target_gets_empty_meanwhile_is_written_down_too(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path
) -> None:
    asked: list[AskBody] = []
    async with peer("going", asked) as target:
        move = await in_db(rows, tiny_model("llama"), tmp_path, free_port(), target, serves=True)
        await in_db(lambda: Engine.objects.filter(name="cpu-1").update(state="draining"))
        assert (await handoffs.run(move)).state == "committed"
        later = await in_db(anew, move)
        assert (await handoffs.run(later)).reason == "one of the two engines does not serve"
    assert len(asked) == 1


async def test_the_row_of_a_move_has_what_its_target_refused_with(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path
) -> None:
    """Whatever that is: it is not the source that lost the move, started anew or takes no more connections."""
    asked: list[AskBody] = []
    for number, code in enumerate(("state_too_large", "engine_stopping", "too_many_connections")):
        refusal = TargetRefused("The state has 900 tokens; the context holds fewer.", param=code, hint="Mend it.")
        async with peer("going", asked) as target, peer("", [], refusal) as source:
            folder = tmp_path / str(number)
            folder.mkdir()
            await in_db(lambda: (ChatSession.objects.all().delete(), SlotLease.objects.all().delete()))
            move = await in_db(rows, tiny_model("llama"), folder, source, target, serves=True)
            seen = await handoffs.run(move)
        assert (seen.state, seen.hint) == ("failed", "Mend it.")
        assert seen.reason == f"its target refused, {code}: The state has 900 tokens; the context holds fewer."
        assert seen.to_dict()["hint"] == "Mend it."
    assert asked == []


async def test_a_source_that_says_nothing_of_a_move_keeps_it_running_until_its_time_is_long_over(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path
) -> None:
    """As one that takes no more connections, or speaks with another secret since its start."""
    asked: list[AskBody] = []
    async with peer("going", asked) as target, peer("", []) as source:
        move = await in_db(rows, tiny_model("llama"), tmp_path, source, target, serves=True)
        await in_db(lambda: Engine.objects.filter(name="cpu-0").update(rpc_secret="another one, long enough too"))
        assert ((await handoffs.run(move)).state, asked) == ("running", [])
        await in_db(lambda: Handoff.objects.update(started_at=Now() - timedelta(seconds=200)))
        assert ((await handoffs.run(move)).state, len(asked)) == ("committed", 1)
        assert not await in_db(handoffs.give_up, move)
        # Nobody has asked for this one yet, so nothing of it goes on.
        later = await in_db(anew, move)
        seen = await handoffs.run(later)
        assert (seen.state, seen.reason.split(":")[0]) == ("failed", "not_authenticated")


def anew(move: int) -> int:
    row = Handoff.objects.get(pk=move)
    assert row.source_id is not None
    assert row.target_id is not None
    return handoffs.start(row.chat_id, row.source_id, row.target_id, send=False)
