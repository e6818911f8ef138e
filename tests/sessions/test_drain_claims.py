"""Whose a drain is: one moves at a time, a person has the last word, and nobody waits for another in a circle."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path

import pytest
from django.db import connections, transaction
from django.db.models.functions import Now

from engines import emptying
from engines import services as engines
from engines.models import Engine
from pools.models import Host
from sessions import drains, tasks
from sessions.choices import DrainKind
from sessions.errors import DrainGoesOn
from sessions.models import Drain
from tests.row_locks import meet
from tests.rows import set_ready
from tests.sessions.drain_pair import ANOTHER, ME, STAYS, drain_pair, taking
from tests.sessions.task_queue import clear_tasks, do_a_task
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def two(tiny_model: Callable[..., SyntheticModel], tmp_path: Path, transactional_db: None) -> tuple[Engine, Engine]:
    return drain_pair(tiny_model, tmp_path)


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


# --- two at once over the same engines ----------------------------------------------------------------


@pytest.fixture
def three(two: tuple[Engine, Engine]) -> list[Engine]:
    """The first host's engine, and two more of it."""
    one = two[0]
    for name in ("three", "four"):
        place = {"host_id": one.host_id, "gpu_id": one.gpu_id, "variant_id": one.variant_id}
        engines.ensure_engine(name, **place, slots=1, context_tokens=256, threads=1)
        set_ready(Engine.objects.get(name=name), 1)
    return list(Engine.objects.filter(host_id=one.host_id).order_by("pk"))


@pytest.mark.parametrize("other", ["begins", "serves again"])
def test_drains_of_a_host_and_of_its_engines_do_not_wait_for_each_other(three: list[Engine], other: str) -> None:
    first = Engine.objects.filter(pk=three[0].pk)
    host = drains.begin(drains.named(DrainKind.HOST, "on-one"), stops=False, send=False)
    assert drains.claim(host, ME)
    backwards = [drains.subject_of(DrainKind.ENGINE, engine.pk) for engine in reversed(three)]
    if other == "begins":
        beat, begun = meet(first, lambda: drains.beat(host, ME, []), lambda: drains.begin_all(backwards, stops=True))
        assert [drains.view(drain_id).subject for drain_id in begun] == [subject.name for subject in backwards]
    else:
        drains.begin_all(backwards, stops=True)
        subject = drains.named(DrainKind.HOST, "on-one")
        beat, again = meet(first, lambda: drains.beat(host, ME, []), lambda: drains.serve_again(subject))
        assert again
    assert beat is not None
    assert len(taking()) == (1 if other == "begins" else 4)


def test_a_host_that_joins_again_and_one_who_drains_it_do_not_wait_for_each_other(three: list[Engine]) -> None:
    subject = drains.named(DrainKind.HOST, "on-one")

    def join() -> bool:
        with transaction.atomic():
            Host.objects.filter(pk=subject.id).update(address="127.0.0.2")
            return drains.serve_again(subject)

    first = Engine.objects.filter(pk=three[0].pk)
    begun, again = meet(first, lambda: drains.begin(subject, stops=True, send=False), join)
    assert again, "it came after"
    assert (drains.view(begun).state, len(taking())) == ("ended", 4)
