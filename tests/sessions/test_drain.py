"""What is foretold of a drain, and drains of real engines: everybody moves, or is saved."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from django.db.models.functions import Now

from engines import store_rows
from engines.choices import StoreState
from engines.client import close_client_session
from engines.config import SlotView
from engines.models import Engine, Store
from engines.services import EngineEndpoint
from pools.db import in_db
from sessions import drain_moves, drains, evacuation, handoffs
from sessions.choices import DrainKind, HandoffCause, HandoffState
from sessions.drains import Moved
from sessions.engine_call import EngineCall
from sessions.evacuation import Known, Place
from sessions.models import ChatSession, Drain, Handoff
from sessions.turn import wait_for_writes
from tests.engine_process import EngineProcess, free_port
from tests.engines.store.store_process import store_on_tmpfs
from tests.rows import add_engine, add_model, set_ready
from tests.sessions.drain_rates import RATES
from tests.sessions.stream_readers import Reader, call_of
from tests.sessions.task_queue import clear_tasks, do_a_task
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db(transaction=True)
SECRET = "a secret of the tests, long enough"
PATIENCE_S = 120.0


# --- what is foretold ---------------------------------------------------------------------------------


def place(number: int, slots: tuple[SlotView, ...] = (), **rates: Any) -> Place:
    endpoint = EngineEndpoint(number, f"cpu-{number}", "http://127.0.0.1:1", "tiny", 1, 4, 4096)
    return Place(endpoint, replace(RATES, **rates), slots)


def slot(prompt: int, done: int, decoded: int = 0, request: str = "r") -> SlotView:
    state = "decode" if decoded else "prefill"
    return SlotView(0, state, True, request, prompt, done, decoded, 0, 4096, 0.0)


def known(*sessions: str, running: tuple[str, ...] = ()) -> Known:
    chats = {name: (number, name.title()) for number, name in enumerate(sessions)}
    return Known(chats, {(0, name): {f"request of {name}"} for name in running}, {"tiny": (None, 7.5)})


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


def test_all_choices_of_a_request_need_a_slot_each_at_one_engine() -> None:
    choices = tuple(slot(100, 100, decoded, "request of a") for decoded in (20, 30, 40))
    of_others = slot(9, 9, 900)
    sources = [place(0, (*choices, of_others), sessions={"a": 140, "b": 10})]
    facts = known("a", "b", running=("a", "b"))

    def planned(*targets: Place) -> evacuation.PlannedMove:
        return next(move for move in evacuation.planned(sources, targets, facts) if move.session == "a")

    assert (planned(place(1, free_slots=2)).target, planned(place(1, free_slots=2)).reason) == (
        "",
        evacuation.FEW_SLOTS,
    )
    two = replace(place(1), rates=replace(RATES, slots=2, free_slots=2))
    assert planned(two).reason == evacuation.MANY_CHOICES
    apart = [place(1, free_slots=2), place(2, free_slots=2)]
    assert planned(*apart).reason == evacuation.FEW_SLOTS, "they go together"
    move = planned(place(1, free_slots=2), place(2, free_slots=3))
    assert (move.target, move.choices, move.tokens, move.foretold_bytes) == ("cpu-2", 3, 390, 39_000)
    # Three go to where four are free, then there is room for one more, not for two.
    (first, second) = evacuation.planned(sources, [place(1, free_slots=4)], facts)
    assert {first.target, second.target} == {"cpu-1"}
    (first, second) = evacuation.planned(sources, [place(1, free_slots=3)], facts)
    assert [move.reason for move in (first, second)].count("") == 1
    # Each may go on writing; a single one would have found room.
    sources, facts, room = [place(0, choices, sessions={"a": 140})], known("a", running=("a",)), 390 + 3 * 512
    assert planned(place(1, cells=room - 1)).reason == evacuation.NO_CELLS
    assert planned(place(1, cells=room)).target == "cpu-1"
    # No choice is longer than a context of 256, all three together are.
    assert planned(place(1, context_tokens=256)).target == "cpu-1"


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


def in_quant(quant: int, number: int, **rates: Any) -> Place:
    made = place(number, **rates)
    family = {"variant_id": quant, "kv_family": "quants", "most_kv_loss": 0.1}
    return replace(made, endpoint=replace(made.endpoint, **family))


def test_a_conversation_keeps_its_quant_where_it_can_and_else_goes_only_where_little_is_lost() -> None:
    sources = [in_quant(1, 0, sessions={"a": 10})]
    own, other = in_quant(1, 1, resident_tokens=8192), in_quant(2, 2)

    def moved(others: list[Place], **losses: float) -> evacuation.PlannedMove:
        facts = replace(known("a"), losses={(1, 2): losses["loss"]} if losses else {})
        (move,) = evacuation.planned(sources, others, facts)
        return move

    assert moved([other, own], loss=0.01).target == "cpu-1"
    assert moved([other], loss=0.01).target == "cpu-2"
    assert moved([other]).reason == evacuation.UNMEASURED
    assert moved([other], loss=0.2).reason == evacuation.LOSSY


def test_an_answer_that_runs_goes_where_it_may_become_as_long() -> None:
    sources = [place(0, sessions={"a": 10}, context_tokens=4096)]
    shorter, longer = place(1, context_tokens=2048), place(2, context_tokens=4096, resident_tokens=8192)
    (move,) = evacuation.planned(sources, [shorter, longer], known("a", running=("a",)))
    assert move.target == "cpu-2"
    (move,) = evacuation.planned(sources, [shorter, longer], known("a"))
    assert move.target == "cpu-1"


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


def died_over(drain_id: int, session: str) -> None:
    """A mover that began to move this conversation and has not been heard of since."""
    mover = uuid4()
    assert drains.claim(drain_id, mover)
    chat = ChatSession.objects.get(key_hash=session)
    ends = Engine.objects.in_bulk(field_name="name")
    handoffs.start(chat.pk, ends["cpu-0"].pk, ends["cpu-1"].pk, send=False, cause=HandoffCause.DRAIN)
    assert drains.beat(drain_id, mover, [Moved(session, "", "cpu-0", "cpu-1", 1, "moving", "idle", tries=1)])
    Drain.objects.update(beat_at=Now() - timedelta(seconds=drains.BEAT_LOST_S + 1))


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
        await in_db(died_over, drain_id, f"{0:064x}")
        assert await drain_moves.carry_on(drain_id, tell=told.append)
        await talking
    assert sorted((move.outcome, move.kind, move.target) for move in told) == [
        ("moved", "idle", "cpu-1"),
        ("moved", "live", "cpu-1"),
    ], "\n".join(map(str, told))
    view = await in_db(drains.view, drain_id)
    assert (view.state, set(view.moves)) == ("done", set(told))

    def rows() -> list[Any]:
        moves = Handoff.objects.filter(state=HandoffState.COMMITTED, target__name="cpu-1").count()
        chats = ChatSession.objects.order_by("engine__name", "pk")
        return [moves, *chats.values_list("engine__name", "wanted_engine")]

    await wait_for_writes(10)
    assert await in_db(rows) == [2, ("cpu-1", None), ("cpu-1", None)]
    alone = await Long(14).run()
    assert (alone.answer.engine.name, reader.said) == ("cpu-1", alone.said)
    # Now there is no other engine that takes anything: what is idle goes to the store, from where its next turn resumes. A worker
    # does it in several tasks, each of which has the next one sent.
    monkeypatch.setattr(drain_moves, "SLICE_S", 0.05)
    await asyncio.to_thread(clear_tasks)
    last = await in_db(
        functools.partial(drains.begin, await in_db(drains.named, DrainKind.ENGINE, "cpu-1"), stops=False)
    )
    tasks = 0
    while await in_db(drains.is_open, last):
        assert await asyncio.to_thread(do_a_task) == "sessions.tasks.run_drain"
        tasks += 1
        assert tasks < 20, await in_db(drains.view, last)
    assert tasks > 1
    view = await in_db(drains.view, last)
    assert view.state == "done"
    assert {(move.outcome, move.target) for move in view.moves} == {("saved", "the store")}
    assert len(view.moves) == 2
