"""Engines, cards and hosts that get empty: nothing new first, then everybody moves, then they stop; and what is foretold."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.conf import LazySettings
from django.core.management import CommandError, call_command
from django.db.models.functions import Now

from engines import draining, leaving, store_rows
from engines import services as engines
from engines.choices import StopReason, StoreState
from engines.client import close_client_session
from engines.config import SlotView
from engines.models import Engine, Store
from engines.rates_view import EngineRates
from engines.services import EngineEndpoint
from pools.choices import HostDuty
from pools.db import in_db
from pools.models import Host
from sessions import drain_moves, drains, evacuation
from sessions.choices import DrainKind, HandoffState
from sessions.drains import Moved
from sessions.engine_call import EngineCall
from sessions.errors import DrainGoesOn, DrainUnknown, NothingToDrain
from sessions.evacuation import Known, Place
from sessions.models import ChatSession, Drain, Handoff
from sessions.turn import wait_for_writes
from tests.engine_process import EngineProcess, free_port
from tests.engines.store.store_process import store_on_tmpfs
from tests.rows import add_engine, add_model, set_ready
from tests.sessions.stream_readers import Reader, call_of
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db(transaction=True)
SECRET = "a secret of the tests, long enough"
PATIENCE_S = 120.0
STEPS = ((1, 0.05),)
RATES = EngineRates(
    model="tiny", slots=4, free_slots=4, decoding=0, pending_tokens=(), queue_length=0, queue_limit=8, context_tokens=4096,
    cells=8192, resident_tokens=0, prefill_token_s=0.001, prefill_pair_s=0.0, steps=STEPS, resident_token_s=0.0,
    request_s=1.0, chunk_s=0.1, interleaves=False, kv_group="", restore_bytes_per_s=0.0, sessions={}, idle_tokens=0,
    idle_s=0.0, streams_kv=True, kv_token_bytes=100.0,
)  # fmt: skip


# --- what is foretold ---------------------------------------------------------------------------------


def place(number: int, slots: tuple[SlotView, ...] = (), **rates: Any) -> Place:
    endpoint = EngineEndpoint(number, f"cpu-{number}", "http://127.0.0.1:1", "tiny", 1, 4, 4096)
    return Place(endpoint, replace(RATES, **rates), slots)


def slot(prompt: int, done: int, decoded: int = 0) -> SlotView:
    state = "decode" if decoded else "prefill"
    return SlotView(0, state, True, "r", prompt, done, decoded, 0, 4096, 0.0)


def known(*sessions: str, running: tuple[str, ...] = ()) -> Known:
    chats = {name: (number, name.title()) for number, name in enumerate(sessions)}
    return Known(chats, frozenset((0, name) for name in running), {"tiny": (None, 7.5)})


def test_a_cache_full_of_idle_conversations_has_room_and_says_that_they_make_way() -> None:
    sources = [place(0, sessions={"a": 1000})]
    (move,) = evacuation.planned(sources, [place(1, resident_tokens=8192)], known("a"))
    assert (move.target, move.displaces, move.foretold_bytes, move.foretold_pause_ms) == ("cpu-1", True, 100_000, 0.0)
    (move,) = evacuation.planned(sources, [place(1, resident_tokens=8192), place(2)], known("a"))
    assert (move.target, move.displaces) == ("cpu-2", False)


def test_what_runs_at_the_target_does_not_make_way() -> None:
    sources = [place(0, sessions={"a": 3000})]
    busy = (slot(3000, 3000, 500), slot(2500, 100))
    (move,) = evacuation.planned(sources, [place(1, busy, free_slots=2, pending_tokens=(2400,))], known("a"))
    assert (move.target, move.reason) == ("", evacuation.NO_CELLS)
    (move,) = evacuation.planned(sources, [place(1, busy[:1], free_slots=3, pending_tokens=(3000,))], known("a"))
    assert (move.target, move.reason) == ("", evacuation.NO_CELLS), "a prompt that waits will need its cells too"
    (move,) = evacuation.planned(sources, [place(1, busy[:1], free_slots=3)], known("a"))
    assert move.target == "cpu-1"


def test_running_conversations_come_first_and_each_needs_a_slot() -> None:
    sources = [place(0, sessions={"old": 10, "r1": 10, "r2": 10, "new": 10})]
    facts = known("old", "r1", "r2", "new", running=("r1", "r2"))
    planned = evacuation.planned(sources, [place(1, free_slots=1)], facts)
    assert [move.running for move in planned] == [True, True, False, False]
    told = {move.session: move.target or move.reason for move in planned}
    assert sorted(told.items()) == [
        ("new", evacuation.NO_SLOT),
        ("old", evacuation.NO_SLOT),
        ("r1", evacuation.NO_SLOT),
        ("r2", "cpu-1"),
    ]
    assert planned[0].foretold_pause_ms == 7.5
    (line,) = evacuation.planned([place(0, sessions={"a": 9})], [place(1, free_slots=1, queue_length=1)], known("a"))
    assert line.reason == evacuation.NO_SLOT


@pytest.mark.parametrize(
    ("target", "sessions", "reason"),
    [
        ({}, {"stranger": 10}, evacuation.UNKNOWN),
        ({"context_tokens": 256}, {"a": 256}, evacuation.TOO_LONG),
        ({"streams_kv": False}, {"a": 10}, evacuation.NOBODY_SHARES),
        ({"kv_group": "one"}, {"a": 10}, ""),
        ({"sessions": {"a": 5}}, {"a": 10}, ""),
    ],
)
def test_why_a_conversation_stays(target: dict[str, Any], sessions: dict[str, int], reason: str) -> None:
    (move,) = evacuation.planned([place(0, sessions=sessions)], [place(1, **target)], known("a"))
    assert (move.reason, bool(move.target)) == (reason, not reason)


def test_what_is_elsewhere_already_needs_no_move_unless_it_runs() -> None:
    sources, other = [place(0, sessions={"a": 10})], place(1, sessions={"a": 10})
    assert evacuation.planned(sources, [other], known("a")) == []
    (move,) = evacuation.planned(sources, [other], known("a", running=("a",)))
    assert move.target == "cpu-1"


# --- the rows -----------------------------------------------------------------------------------------


@pytest.fixture
def two(tiny_model: Callable[..., SyntheticModel], tmp_path: Path, transactional_db: None) -> tuple[Engine, Engine]:
    variant = add_model(tiny_model("llama").path, tmp_path)
    first, second = (add_engine(variant, name=name, host_name=f"on-{name}") for name in ("one", "two"))
    for engine in (first, second):
        set_ready(engine, 1)
    return first, second


def taking() -> list[str]:
    return [endpoint.name for endpoint in engines.serving_engines(None)]


@pytest.mark.parametrize("kind", list(DrainKind))
def test_nothing_new_is_sent_there_from_its_first_moment_until_it_serves_again(
    two: tuple[Engine, Engine], kind: DrainKind
) -> None:
    name = {DrainKind.ENGINE: "one", DrainKind.CARD: "on-one/cpu0", DrainKind.HOST: "on-one"}[kind]
    subject = drains.named(kind, name)
    drain_id = drains.begin(subject, stops=False, send=False)
    assert taking() == ["two"]
    assert [endpoint.name for endpoint in engines.holding_engines(None)] == ["one", "two"]
    with pytest.raises(DrainGoesOn):
        drains.begin(subject, stops=False, send=False)
    assert drains.claim(drain_id)
    assert not drains.claim(drain_id), "one moves at a time"
    assert drains.serve_again(drains.subject_of(kind, subject.id))
    assert taking() == ["one", "two"]
    assert drains.beat(drain_id, []) is None
    assert not drains.finish(drain_id, [])
    assert not drains.serve_again(subject)


def test_an_engine_stops_once_its_conversations_have_left_and_not_before(two: tuple[Engine, Engine]) -> None:
    one = two[0].pk
    drain_id = drains.begin(drains.named(DrainKind.ENGINE, "one"), stops=True, send=False)
    assert drains.claim(drain_id)
    assert drains.beat(drain_id, [Moved("a" * 64, "A", "one", "two", 5, "moving")])
    assert Engine.objects.get(pk=one).state == "ready"
    assert drains.finish(drain_id, [Moved("a" * 64, "A", "one", "two", 5, "moved")])
    row = Engine.objects.get(pk=one)
    assert (row.state, row.stop_reason, row.held_until) == ("draining", StopReason.PERSON, None)
    assert drains.view(drain_id).state == "done"
    assert engines.engine_rpc(one) is None
    Engine.objects.filter(pk=one).update(rpc_port=1)
    assert engines.engine_rpc(one, leaving=True) is not None, "who drains can still hand over"
    assert drains.serve_again(drains.subject_of(DrainKind.ENGINE, one))
    row = Engine.objects.get(pk=one)
    assert (row.takes_new, row.wanted, row.stop_reason) == (True, "running", "")


def test_an_engine_that_drains_otherwise_waits_for_its_moves_too(two: tuple[Engine, Engine]) -> None:
    one = two[0].pk
    drains.begin(drains.named(DrainKind.ENGINE, "one"), stops=False, send=False)
    engines.drain(one, StopReason.SWAP)
    Engine.objects.filter(pk=one).update(state_since=Now() - timedelta(seconds=9), http_port=1)
    epoch = Engine.objects.get(pk=one).epoch
    assert draining.may_stop(one, epoch) is False
    Engine.objects.filter(pk=one).update(held_until=Now() - timedelta(seconds=1))
    assert draining.may_stop(one, epoch) is True


def test_a_host_drains_as_a_whole_and_its_idle_engines_wait_for_their_moves(
    two: tuple[Engine, Engine], settings: LazySettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.HYDRA_HOST_NAME = "on-one"
    subject = drains.named(DrainKind.HOST, "on-one")
    drain_id = drains.begin(subject, stops=True, send=False)
    host = Host.objects.get(pk=subject.id)
    assert host.duty == HostDuty.DRAINING
    Host.objects.filter(pk=host.pk).update(duty_since=Now() - timedelta(seconds=60))
    monkeypatch.setattr(leaving, "_is_idle", lambda *where: True)
    assert leaving.idle_engines() == frozenset()
    assert drains.claim(drain_id)
    assert drains.finish(drain_id, [])
    assert leaving.idle_engines() == {two[0].pk}
    assert Engine.objects.get(pk=two[0].pk).wanted == "running", "it starts again when the host serves again"
    assert drains.serve_again(drains.subject_of(DrainKind.HOST, subject.id))
    assert (Host.objects.get(pk=host.pk).duty, taking()) == (HostDuty.ACTIVE, ["one", "two"])


def test_what_has_no_engine_or_no_name(two: tuple[Engine, Engine]) -> None:
    Engine.objects.update(state="stopped", http_port=None)
    with pytest.raises(NothingToDrain):
        drains.begin(drains.named(DrainKind.CARD, "on-one/cpu0"), stops=True, send=False)
    with pytest.raises(DrainUnknown, match="there are: one, two"):
        drains.named(DrainKind.ENGINE, "three")
    with pytest.raises(DrainUnknown):
        drains.subject_of(DrainKind.CARD, 0)
    host = drains.named(DrainKind.HOST, "on-one")
    assert drains.begin(host, stops=True, send=False), "nothing is started there any more"


def test_a_drain_whose_mover_died_is_gone_on_with(two: tuple[Engine, Engine]) -> None:
    drain_id = drains.begin(drains.named(DrainKind.ENGINE, "one"), stops=False, send=False)
    assert drains.claim(drain_id)
    assert drains.stuck() == []
    Drain.objects.filter(pk=drain_id).update(beat_at=Now() - timedelta(seconds=drains.BEAT_LOST_S + 1))
    assert drains.stuck() == [drain_id]
    assert drains.claim(drain_id)


async def test_an_engine_that_does_not_answer_is_named(
    two: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain_moves, "SETTLE_S", 0.1)
    command = functools.partial(call_command, "drain", "one", stdout=(said := StringIO()))
    await in_db(command)
    assert said.getvalue() == f"one: {drain_moves.SILENT}\n"
    with pytest.raises(CommandError, match="1 stay"):
        await in_db(functools.partial(command, go=True))
    assert await in_db(taking) == ["two"]
    await in_db(functools.partial(command, serve=True))
    assert await in_db(taking) == ["one", "two"]


# --- real engines -------------------------------------------------------------------------------------


@pytest.fixture
async def pair(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path, background: None
) -> AsyncIterator[dict[str, EngineProcess]]:
    model = tiny_model("llama", tie_free=True, layers=12)
    running: dict[str, EngineProcess] = {}

    def write() -> None:
        variant = add_model(model.path, tmp_path)
        for name, engine in running.items():
            row = add_engine(variant, name=name)
            Engine.objects.filter(pk=row.pk).update(
                context_tokens=8192, rpc_port=engine.config.rpc_port, rpc_secret=SECRET
            )
            set_ready(row, engine.config.port, engine.process.pid)
        place = {"address": "127.0.0.1", "port": store.config.port, "secret": ""}
        kept = store_rows.ensure_store("here")
        assert kept is not None
        Store.objects.filter(pk=kept.store_id).update(state=StoreState.READY, **place)

    with ExitStack() as stack:
        store = stack.enter_context(store_on_tmpfs(tmp_path))
        settings = {"rpc_secret": SECRET, "context_tokens": 8192, "slots": 2, "store_port": store.config.port}
        for name in ("cpu-0", "cpu-1"):
            engine = EngineProcess(tmp_path, model.path, rpc_port=free_port(), **settings)
            running[name] = await asyncio.to_thread(stack.enter_context, engine)
        await in_db(write)
        yield running
        await wait_for_writes(10)
        await close_client_session()


class Long(Reader):
    """One whose answer takes longer than the look of a drain."""

    def call(self) -> EngineCall:
        return call_of(self.number, 1500)


async def test_a_drain_moves_what_runs_and_what_is_idle_and_leaves_no_wish(
    pair: dict[str, EngineProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain_moves, "SETTLE_S", 0.1)
    how = {"stops": False, "send": False}
    only = Engine.objects.filter(name="cpu-1")
    await in_db(functools.partial(only.update, takes_new=False))
    reader = Long(14)
    talking = asyncio.create_task(reader.run())
    async with asyncio.timeout(PATIENCE_S):
        await reader.begun.wait()
        await Reader(0).run()
        await in_db(functools.partial(only.update, takes_new=True))
        subject = await in_db(drains.named, DrainKind.CARD, "here/cpu0")
        assert len(subject.engines) == 2
        first = await in_db(drains.named, DrainKind.ENGINE, "cpu-0")
        drain_id = await in_db(functools.partial(drains.begin, first, **how))
        told: list[Moved] = []
        assert await drain_moves.carry_on(drain_id, tell=told.append)
        await talking
    assert sorted((move.outcome, move.kind, move.target) for move in told) == [
        ("moved", "idle", "cpu-1"),
        ("moved", "live", "cpu-1"),
    ], "\n".join(map(str, told))
    view = await in_db(drains.view, drain_id)
    assert (view.state, list(view.moves)) == ("done", told)

    def rows() -> list[Any]:
        moves = Handoff.objects.filter(state=HandoffState.COMMITTED, target__name="cpu-1").count()
        chats = ChatSession.objects.order_by("engine__name", "pk")
        return [moves, *chats.values_list("engine__name", "wanted_engine")]

    await wait_for_writes(10)
    assert await in_db(rows) == [2, ("cpu-1", None), ("cpu-1", None)]
    alone = await Long(14).run()
    assert (alone.answer.engine.name, reader.said) == ("cpu-1", alone.said)
    # Now there is no other engine that takes anything: what is idle goes to the store, from where its next turn resumes.
    last = await in_db(functools.partial(drains.begin, await in_db(drains.named, DrainKind.ENGINE, "cpu-1"), **how))
    assert await drain_moves.carry_on(last)
    view = await in_db(drains.view, last)
    assert view.state == "done"
    assert {(move.outcome, move.target) for move in view.moves} == {("saved", "the store")}
    assert len(view.moves) == 2
