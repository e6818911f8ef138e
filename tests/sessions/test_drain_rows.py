"""Drains as rows: what is closed and when, whose they are, how they end; and the tasks that move on with them."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from aiohttp import web
from django.conf import LazySettings
from django.core.management import CommandError, call_command
from django.db import connections
from django.db.models.functions import Now

from engines import draining, emptying, leaving
from engines import services as engines
from engines.choices import StopReason
from engines.client import close_client_session
from engines.models import Engine
from pools.choices import HostDuty
from pools.db import in_db
from pools.models import Host
from sessions import drain_moves, drains, tasks
from sessions.choices import DrainKind
from sessions.drains import Moved
from sessions.errors import DrainGoesOn, DrainUnknown, NothingToDrain
from sessions.management.commands import drain as drain_command
from sessions.models import ChatSession, Drain, Handoff
from tests.rows import add_engine, add_model, set_ready
from tests.sessions.drain_rates import RATES
from tests.sessions.loopback_engine import loopback_engine
from tests.sessions.task_queue import clear_tasks, do_a_task
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db(transaction=True)
ME, ANOTHER = uuid4(), uuid4()
STAYS = Moved("a" * 64, "", "one", "", 5, "stays", "idle", reason="no room")


@pytest.fixture
def two(tiny_model: Callable[..., SyntheticModel], tmp_path: Path, transactional_db: None) -> tuple[Engine, Engine]:
    variant = add_model(tiny_model("llama").path, tmp_path)
    first, second = (add_engine(variant, name=name, host_name=f"on-{name}") for name in ("one", "two"))
    for engine in (first, second):
        set_ready(engine, 1)
    return first, second


async def no_slots(_request: web.Request) -> web.StreamResponse:
    return web.json_response([])


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
    assert drains.claim(drain_id, ME)
    assert not drains.claim(drain_id, ME), "one moves at a time"
    assert drains.serve_again(drains.subject_of(kind, subject.id))
    assert taking() == ["one", "two"]
    assert drains.beat(drain_id, ME, []) is None
    assert not drains.finish(drain_id, ME, [])
    assert not drains.serve_again(subject)


def test_an_engine_stops_once_its_conversations_have_left_and_not_before(two: tuple[Engine, Engine]) -> None:
    one = two[0].pk
    drain_id = drains.begin(drains.named(DrainKind.ENGINE, "one"), stops=True, send=False)
    assert drains.claim(drain_id, ME)
    assert drains.beat(drain_id, ME, [Moved("a" * 64, "A", "one", "two", 5, "moving")])
    assert Engine.objects.get(pk=one).state == "ready"
    assert drains.finish(drain_id, ME, [Moved("a" * 64, "A", "one", "two", 5, "moved")])
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


async def test_a_host_drains_as_a_whole_and_its_idle_engines_wait_for_their_moves(
    two: tuple[Engine, Engine], settings: LazySettings
) -> None:
    settings.HYDRA_HOST_NAME = "on-one"

    def look() -> None:
        subject = drains.named(DrainKind.HOST, "on-one")
        drain_id = drains.begin(subject, stops=True, send=False)
        host = Host.objects.get(pk=subject.id)
        assert host.duty == HostDuty.DRAINING
        Host.objects.filter(pk=host.pk).update(duty_since=Now() - timedelta(seconds=60))
        assert leaving.idle_engines() == frozenset()
        assert drains.claim(drain_id, ME)
        assert drains.finish(drain_id, ME, [])
        assert leaving.idle_engines() == {two[0].pk}
        assert Engine.objects.get(pk=two[0].pk).wanted == "running", "it starts again when the host serves again"
        assert drains.serve_again(drains.subject_of(DrainKind.HOST, subject.id))
        assert (Host.objects.get(pk=host.pk).duty, taking()) == (HostDuty.ACTIVE, ["one", "two"])

    async with loopback_engine(no_slots) as port:
        await in_db(Engine.objects.filter(pk=two[0].pk).update, http_port=port)
        await in_db(look)


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


async def test_an_engine_that_does_not_answer_is_named(
    two: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain_moves, "SETTLE_S", 0.0)
    monkeypatch.setattr(drain_moves, "SILENT_S", 0.0)
    command = functools.partial(call_command, "drain", "one", stdout=(said := StringIO()))
    await in_db(command)
    assert said.getvalue() == f"one: {drain_moves.SILENT}\n"
    with pytest.raises(CommandError, match="1 stay"):
        await in_db(functools.partial(command, go=True))
    assert await in_db(taking) == ["two"]
    await in_db(functools.partial(command, serve=True))
    assert await in_db(taking) == ["one", "two"]


# --- a person and a mover at once ---------------------------------------------------------------------


def test_who_serves_again_is_not_closed_by_a_mover_that_looks_just_then(
    two: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = drains.named(DrainKind.ENGINE, "one")
    drain_id = drains.begin(subject, stops=False, send=False)
    assert drains.claim(drain_id, ME)
    close = emptying.close

    def serve() -> None:
        drains.serve_again(subject)
        connections.close_all()

    person = threading.Thread(target=serve)

    def slowly(engine_ids: Collection[int], held_s: float) -> int:
        person.start()
        person.join(0.3)  # As long as somebody may take between the two writes of a beat.
        return close(engine_ids, held_s)

    monkeypatch.setattr(emptying, "close", slowly)
    drains.beat(drain_id, ME, [])
    person.join()
    assert (drains.view(drain_id).state, taking()) == ("ended", ["one", "two"])


def test_who_is_part_of_a_drain_serves_again_with_the_whole_of_it(two: tuple[Engine, Engine]) -> None:
    host = drains.begin(drains.named(DrainKind.HOST, "on-one"), stops=False, send=False)
    for kind, name in ((DrainKind.ENGINE, "one"), (DrainKind.CARD, "on-one/cpu0")):
        with pytest.raises(DrainGoesOn, match="The whole host on-one is being drained"):
            drains.serve_again(drains.named(kind, name))
    assert taking() == ["two"]
    engine = drains.begin(drains.named(DrainKind.ENGINE, "one"), stops=False, send=False)
    assert drains.serve_again(drains.named(DrainKind.HOST, "on-one"))
    assert [drains.view(one).state for one in (host, engine)] == ["ended", "ended"], (
        "else its engine would be closed again"
    )
    assert taking() == ["one", "two"]


def test_a_drain_of_what_was_deleted_ends(two: tuple[Engine, Engine]) -> None:
    begun = [drains.begin(drains.named(DrainKind.ENGINE, name), stops=True, send=False) for name in ("one", "two")]
    assert all(drains.claim(drain_id, ME) for drain_id in begun)
    Engine.objects.all().delete()
    assert drains.beat(begun[0], ME, []) is None
    assert drains.finish(begun[1], ME, [])
    told = [drains.view(drain_id) for drain_id in begun]
    assert [(one.state, one.ended_at is not None) for one in told] == [("ended", True), ("done", True)]
    assert drains.stuck() == []


# --- whose it is --------------------------------------------------------------------------------------


def test_a_mover_that_was_silent_and_replaced_writes_nothing_any_more(two: tuple[Engine, Engine]) -> None:
    drain_id = drains.begin(drains.named(DrainKind.ENGINE, "one"), stops=True, send=False)
    assert drains.claim(drain_id, ME)
    assert drains.stuck() == []
    Drain.objects.update(
        beat_at=Now() - timedelta(seconds=drains.BEAT_LOST_S + 1),
        created_at=Now() - timedelta(seconds=drains.JUST_BEGUN_S + 1),
    )
    assert drains.stuck() == [drain_id]
    assert drains.claim(drain_id, ANOTHER)
    assert drains.beat(drain_id, ANOTHER, [STAYS])
    assert drains.beat(drain_id, ME, []) is None
    drains.pause(drain_id, ME, [])
    assert not drains.finish(drain_id, ME, [])
    assert not drains.claim(drain_id, ME)
    view = drains.view(drain_id)
    assert (view.state, view.moves) == ("running", (STAYS,))
    assert Engine.objects.get(pk=two[0].pk).wanted == "running"


def test_two_are_moved_at_once_and_the_others_wait_for_their_turn_closed(two: tuple[Engine, Engine]) -> None:
    clear_tasks()
    names = ((DrainKind.ENGINE, "one"), (DrainKind.HOST, "on-one"), (DrainKind.ENGINE, "two"))
    begun = [drains.begin(drains.named(*name), stops=False, send=False) for name in names]
    Drain.objects.update(created_at=Now() - timedelta(seconds=drains.JUST_BEGUN_S + 1))
    assert drains.stuck() == begun[:2]
    assert [drains.claim(drain_id, ME, drains.MOST_MOVERS) for drain_id in begun] == [True, True, False]
    assert drains.stuck() == []
    Engine.objects.update(held_until=None, takes_new=True)
    tasks.sweep_drains()
    assert [(row.name, row.takes_new) for row in Engine.objects.exclude(held_until=None)] == [("two", False)]
    drains.pause(begun[0], ME, [])
    assert drains.stuck() == [begun[2]], "who has waited longest is next"
    Engine.objects.all().delete()
    assert do_a_task() == "sessions.tasks.run_drain"
    assert drains.view(begun[2]).state == "ended", "it was sent when the other one paused"
    tasks.sweep_drains()
    assert drains.view(begun[0]).state == "ended"


# --- how it ends --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stops", [True, False])
def test_who_crashed_or_came_up_meanwhile_is_closed_and_stopped_too(two: tuple[Engine, Engine], stops: bool) -> None:
    for name in ("up", "failed", "finishes"):
        engines.ensure_engine(
            name,
            host_id=two[0].host_id,
            gpu_id=two[0].gpu_id,
            variant_id=two[0].variant_id,
            slots=1,
            context_tokens=256,
            threads=1,
        )
    drain_id = drains.begin(drains.named(DrainKind.CARD, "on-one/cpu0"), stops=stops, send=False)
    assert drains.claim(drain_id, ME)
    states = {"up": "starting", "failed": "failed", "finishes": "draining"}
    for name, state in states.items():
        Engine.objects.filter(name=name).update(state=state, takes_new=True)
    assert drains.finish(drain_id, ME, [])
    rows = {row.name: row for row in Engine.objects.exclude(name="two")}
    assert {row.takes_new for row in rows.values()} == {False}
    assert {row.wanted for row in rows.values()} == {"stopped" if stops else "running"}
    assert {row.stop_reason for row in rows.values()} == {StopReason.PERSON if stops else ""}
    assert rows["one"].state == ("draining" if stops else "ready")
    assert rows["finishes"].state == "draining", "what runs there is not cut off"


def test_one_that_stays_is_not_forgotten_among_many_that_moved(two: tuple[Engine, Engine]) -> None:
    drain_id = drains.begin(drains.named(DrainKind.ENGINE, "one"), stops=False, send=False)
    assert drains.claim(drain_id, ME)
    many = [Moved(f"{number:064x}", "", "one", "two", 1, "moved") for number in range(drains.MOST_TOLD + 50)]
    assert drains.finish(drain_id, ME, [STAYS, *many])
    view = drains.view(drain_id)
    assert (view.state, len(view.moves), view.moves[0]) == ("partial", drains.MOST_TOLD, STAYS)


@pytest.mark.parametrize(("kind", "state"), [(DrainKind.ENGINE, "done"), (DrainKind.HOST, "partial")])
def test_what_a_host_keeps_in_its_own_store_has_not_left_it(two: tuple[Engine, Engine], kind: str, state: str) -> None:
    drain_id = drains.begin(drains.named(kind, "on-one" if kind == DrainKind.HOST else "one"), stops=False, send=False)
    assert drains.claim(drain_id, ME)
    assert drains.finish(drain_id, ME, [replace(STAYS, outcome="saved", target="the store")])
    assert drains.view(drain_id).state == state


def test_old_drains_are_forgotten(two: tuple[Engine, Engine], settings: LazySettings) -> None:
    old, young = (
        drains.begin(drains.named(DrainKind.ENGINE, name), stops=False, send=False) for name in ("one", "two")
    )
    Drain.objects.filter(pk=old).update(
        state="done", ended_at=Now() - timedelta(days=settings.HYDRA_SESSION_RETENTION_DAYS + 1)
    )
    tasks.expire_sessions()
    assert [row.pk for row in Drain.objects.all()] == [young]


# --- what it waits for --------------------------------------------------------------------------------


@pytest.fixture
async def telling(two: tuple[Engine, Engine], background: None) -> AsyncIterator[dict[str, dict[str, Any]]]:
    """What the two engines tell of themselves, to be changed."""
    told: dict[str, dict[str, Any]] = {
        "one": asdict(replace(RATES, sessions={"a" * 64: 100})),
        "two": asdict(replace(RATES, free_slots=0)),
    }

    def tell(name: str) -> Callable[[web.Request], Any]:
        async def answer(_request: web.Request) -> web.StreamResponse:
            return web.json_response(json.loads(json.dumps(told[name])))

        return answer

    async with AsyncExitStack() as stack:
        for engine in two:
            port = await stack.enter_async_context(loopback_engine(no_slots, tell(engine.name)))
            await in_db(Engine.objects.filter(pk=engine.pk).update, http_port=port)
        await in_db(ChatSession.objects.create, key_hash="a" * 64, model_name="tiny")
        yield told
        await close_client_session()


async def begun_of_one() -> int:
    subject = await in_db(drains.named, DrainKind.ENGINE, "one")
    return await in_db(functools.partial(drains.begin, subject, stops=False, send=False))


@pytest.mark.parametrize("passing", ["full", "unhealthy"])
async def test_what_is_in_the_way_for_a_moment_is_waited_for(
    telling: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, passing: str
) -> None:
    monkeypatch.setattr(drain_moves, "SETTLE_S", 0.0)
    monkeypatch.setattr(drain_moves, "LOOK_S", 0.02)
    monkeypatch.setattr(drain_moves, "MOST_TRIES", 1)
    one = Engine.objects.filter(name="one")
    if passing == "full":
        telling["two"] |= {"free_slots": 2, "cells": 50}
    elif passing == "unhealthy":
        await in_db(one.update, state="unhealthy")
    drain_id = await begun_of_one()
    assert not await drain_moves.carry_on(drain_id, 0.1), "it may pass"
    view = await in_db(drains.view, drain_id)
    assert [move.outcome for move in view.moves] == ["stays"]
    # It passes: the conversation is moved, as far as two engines without a handoff port can.
    telling["two"] |= {"free_slots": 2, "cells": 8192}
    await in_db(one.update, state="ready")
    assert await drain_moves.carry_on(drain_id)
    view = await in_db(drains.view, drain_id)
    assert [(move.reason, move.tries) for move in view.moves] == [
        ("one of the two engines does not serve", drain_moves.MOST_TRIES + 1)
    ]
    assert view.state == "partial"


async def test_an_engine_that_nobody_could_ask_has_not_become_empty(
    telling: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SETTLE_S", "SILENT_S"):
        monkeypatch.setattr(drain_moves, name, 0.0)
    await in_db(functools.partial(Engine.objects.filter(name="one").update, state="unhealthy"))
    drain_id = await begun_of_one()
    assert await drain_moves.carry_on(drain_id)
    view = await in_db(drains.view, drain_id)
    assert (view.state, [(move.source, move.reason) for move in view.moves]) == (
        "partial",
        [("one", drain_moves.SILENT)],
    )


async def test_nothing_is_moved_any_more_once_a_person_has_ended_it(
    telling: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    telling["two"] |= {"free_slots": 2}
    drain_id = await begun_of_one()
    beat, beats = drains.beat, []

    def ended(*args: Any) -> Any:
        beats.append(args)
        if len(beats) == 2:  # The one right before the first move.
            drains.serve_again(drains.named(DrainKind.ENGINE, "one"))
        return beat(*args)

    monkeypatch.setattr(drains, "beat", ended)
    assert await drain_moves.carry_on(drain_id)
    assert len(beats) == 2
    assert (await in_db(drains.view, drain_id)).state == "ended"
    assert not await in_db(Handoff.objects.exists)


async def test_the_command_waits_for_what_a_worker_has_taken_up(
    telling: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain_moves, "SETTLE_S", 0.0)
    monkeypatch.setattr(drain_command, "LOOK_S", 0.05)
    for name in telling:
        telling[name] |= {"sessions": {}}
    said = StringIO()
    command = functools.partial(call_command, "drain", "one", "two", go=True, stdout=said)

    def taken_up() -> int | None:
        row = Drain.objects.filter(subject="two").first()
        return row.pk if row is not None and drains.claim(row.pk, ME) else None

    async with asyncio.timeout(20):
        running = asyncio.ensure_future(in_db(command))
        while (drain_id := await in_db(taken_up)) is None:  # noqa: ASYNC110 -- nothing tells of it
            await asyncio.sleep(0.01)
        while await in_db(Drain.objects.filter(subject="one", state="running").exists):  # noqa: ASYNC110 -- nothing tells of it
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert not running.done()
        assert await in_db(drains.finish, drain_id, ME, [replace(STAYS, source="two")])
        with pytest.raises(CommandError, match="1 stay"):
            await running
    assert "stays: no room" in said.getvalue()
