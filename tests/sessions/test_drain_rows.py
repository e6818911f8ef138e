"""Drains as rows: what is closed and when, what stops behind them, and how they end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from django.conf import LazySettings
from django.db.models.functions import Now

from engines import draining, leaving
from engines import services as engines
from engines.choices import StopReason
from engines.models import Engine
from pools.choices import HostDuty
from pools.db import in_db
from pools.models import Host
from sessions import drains, tasks
from sessions.choices import DrainKind
from sessions.drains import Moved
from sessions.errors import DrainGoesOn, DrainUnknown, NothingToDrain
from sessions.models import Drain
from tests.sessions.drain_pair import ME, STAYS, drain_pair, no_slots, taking
from tests.sessions.loopback_engine import loopback_engine
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def two(tiny_model: Callable[..., SyntheticModel], tmp_path: Path, transactional_db: None) -> tuple[Engine, Engine]:
    return drain_pair(tiny_model, tmp_path)


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
