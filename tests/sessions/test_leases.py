"""Places on engines, leased over all replicas of the site."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from django.db import connection, connections
from django.db.models.functions import Now

from engines.services import EngineEndpoint
from pools.db import in_db
from sessions import lease_desk, leases
from sessions.lease_desk import LeaseDesk
from sessions.lease_line import LeaseLine
from sessions.leases import Wanted
from sessions.models import SlotLease
from tests.frozen_table import frozen
from tests.rows import add_engine, add_model
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def engine_ids(tiny_model: Callable[..., SyntheticModel], tmp_path: Path, transactional_db: None) -> list[int]:
    variant = add_model(tiny_model("llama").path, tmp_path)
    return [add_engine(variant, name=f"cpu-{number}").pk for number in range(3)]


def wanted(
    engine_ids: list[int], session: str = "", *, owner: str = "a", most: int = 2, idempotency: str = ""
) -> Wanted:
    return Wanted(uuid.uuid4(), session, owner, tuple(engine_ids), (most,) * len(engine_ids), idempotency)


def end_connection(pid: int) -> None:
    """As if the server had restarted, for one of its clients."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(%s)", [pid])


def test_the_best_engine_with_room_is_leased_until_all_are_full(engine_ids: list[int]) -> None:
    got = [leases.acquire(wanted(engine_ids, most=1)) for _ in range(4)]
    assert [lease.engine_id for lease in got] == [*engine_ids, None]
    assert [lease.outcome for lease in got] == ["leased", "leased", "leased", "busy"]
    assert leases.live() == dict.fromkeys(engine_ids, 1)


def test_a_session_runs_on_one_engine_at_a_time_whoever_asks(engine_ids: list[int]) -> None:
    first = wanted(engine_ids, "s")
    assert leases.acquire(first).engine_id == engine_ids[0]
    turned = list(reversed(engine_ids))
    assert leases.acquire(wanted(turned, "s", owner="b")).engine_id == engine_ids[0]
    assert leases.acquire(wanted(turned, "other", owner="b")).engine_id == engine_ids[2]
    # Full there means busy, not somewhere else.
    assert leases.acquire(wanted(turned, "s", owner="b")).outcome == "busy"
    # An engine that is gone is not among those that are asked for.
    assert leases.acquire(wanted(engine_ids[1:], "s", owner="b")).engine_id == engine_ids[1]


def test_a_request_that_moves_on_has_one_lease(engine_ids: list[int]) -> None:
    request = wanted(engine_ids, "s")
    leases.acquire(request)
    moved = leases.acquire(Wanted(request.request_id, "s", "a", (engine_ids[1],), (1,)))
    assert (moved.engine_id, SlotLease.objects.count()) == (engine_ids[1], 1)


def test_what_must_not_run_twice_runs_once_at_a_time(engine_ids: list[int]) -> None:
    first = wanted(engine_ids, idempotency="k")
    assert leases.acquire(first).outcome == "leased"
    assert leases.acquire(wanted(engine_ids, owner="b", idempotency="k")).outcome == "duplicate"
    assert leases.release([first.request_id], "another") == 0
    leases.release([first.request_id], first.owner)
    assert leases.acquire(wanted(engine_ids, owner="b", idempotency="k")).outcome == "leased"


def test_leases_of_a_dead_process_end_by_themselves(engine_ids: list[int]) -> None:
    dead, alive = wanted(engine_ids), wanted(engine_ids)
    leases.acquire(dead)
    leases.acquire(alive)
    with connection.cursor() as cursor:
        cursor.execute("UPDATE hydra_sessions_slotlease SET expires_at = now() - interval '1 second'")
    assert leases.prolong([alive.request_id]) == 1
    assert leases.live() == {engine_ids[0]: 1}
    assert leases.sweep() == 0, "it may live, and have no database for a while"
    with connection.cursor() as cursor:
        cursor.execute("UPDATE hydra_sessions_slotlease SET expires_at = expires_at - interval '2 minutes'")
    assert leases.prolong([alive.request_id]) == 1
    assert leases.sweep() == 1
    assert SlotLease.objects.get().pk == alive.request_id


def test_many_at_once_never_put_a_session_on_two_engines(engine_ids: list[int]) -> None:
    got: list[int | None] = []

    def ask(turn: int) -> None:
        order = engine_ids[turn % 3 :] + engine_ids[: turn % 3]
        got.append(leases.acquire(wanted(order, "s", owner=str(turn), most=50)).engine_id)
        connections.close_all()

    threads = [threading.Thread(target=ask, args=(turn,)) for turn in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 12
    assert len(set(got)) == 1


async def test_a_lease_moves_with_its_request_and_goes_when_there_is_no_place_for_it(engine_ids: list[int]) -> None:
    desk = LeaseDesk()
    endpoints = [EngineEndpoint(engine_id, "e", "http://127.0.0.1:1", "m", 1, 2, 100) for engine_id in engine_ids]
    request = uuid.uuid4()
    assert (await desk.acquire(request, "s", endpoints, [2, 2, 2])).engine_id == engine_ids[0]
    assert (await desk.acquire(request, "s", endpoints[1:], [2, 2])).engine_id == engine_ids[1]
    await desk.settled()
    assert await in_db(leases.live) == {engine_ids[1]: 1}
    assert (await desk.acquire(request, "s", endpoints[2:], [0])).outcome == "busy"
    await desk.settled()
    assert (desk.count, await in_db(leases.live)) == (0, {})
    await desk.close(5)


async def test_a_lease_that_is_written_after_its_request_has_ended_is_given_back(
    engine_ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_desk, "DATABASE_PATIENCE_S", 0.05)
    desk = LeaseDesk()
    request = uuid.uuid4()
    endpoint = EngineEndpoint(engine_ids[0], "e", "http://127.0.0.1:1", "m", 1, 2, 100)
    with frozen("hydra_sessions_slotlease"):
        assert (await desk.acquire(request, "", [endpoint], [2])).engine_id == engine_ids[0], "it goes on without"
        desk.release(request)
        await asyncio.sleep(0.1)
    await desk.settled()
    assert await in_db(leases.live) == {}
    await desk.close(5)


async def test_a_lease_that_is_written_late_lasts_as_long_as_its_request(
    engine_ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_desk, "DATABASE_PATIENCE_S", 0.05)
    monkeypatch.setattr(lease_desk, "PROLONG_EVERY_S", 0.02)
    desk = LeaseDesk()
    request = uuid.uuid4()
    endpoint = EngineEndpoint(engine_ids[0], "e", "http://127.0.0.1:1", "m", 1, 2, 100)
    with frozen("hydra_sessions_slotlease"):
        assert (await desk.acquire(request, "", [endpoint], [2])).engine_id == engine_ids[0], "it goes on without"
    monkeypatch.setattr(lease_desk, "DATABASE_PATIENCE_S", 5.0)
    await desk.settled()
    await in_db(lambda: SlotLease.objects.update(expires_at=Now() - timedelta(seconds=1)))
    for _ in range(200):
        if await in_db(leases.live):
            break
        await asyncio.sleep(0.02)
    assert await in_db(leases.live) == {engine_ids[0]: 1}
    desk.release(request)
    await desk.settled()
    assert await in_db(leases.live) == {}
    await desk.close(5)


async def test_leases_have_a_straight_line_and_go_round_it_when_it_breaks(
    engine_ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LeaseLine, "kept", True)
    desk = LeaseDesk()
    endpoints = [EngineEndpoint(engine_id, "e", "http://127.0.0.1:1", "m", 1, 2, 100) for engine_id in engine_ids]
    assert await desk.line.acquire(wanted(engine_ids)) is None, "none is open yet"
    while desk.line._opening is not None:
        await asyncio.wait([desk.line._opening])
    request = wanted(engine_ids, "s")
    assert await desk.line.acquire(request) == await in_db(leases.acquire, request)
    await in_db(end_connection, desk.line._free[0].info.backend_pid)
    assert (await desk.acquire(request.request_id, "s", endpoints, [2, 2, 2])).engine_id == engine_ids[0]
    desk.release(request.request_id)
    await desk.settled()
    assert await in_db(leases.live) == {}
    await desk.close(5)


async def test_a_desk_gives_back_what_it_took_also_when_the_asker_left(
    engine_ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_desk, "PROLONG_EVERY_S", 0.02)
    desk = LeaseDesk()
    endpoints = [EngineEndpoint(engine_id, "e", "http://127.0.0.1:1", "m", 1, 2, 100) for engine_id in engine_ids]
    requests = [uuid.uuid4() for _ in range(6)]
    for request in requests:
        assert (await desk.acquire(request, "", endpoints, [2, 2, 2])).outcome == "leased"
    assert (await desk.acquire(uuid.uuid4(), "", endpoints, [2, 2, 2])).outcome == "busy"
    await asyncio.sleep(0.1)
    for request in requests:
        desk.release(request)
        desk.release(request)
    await desk.settled()
    assert (desk.count, await in_db(SlotLease.objects.count)) == (0, 0)
    left = asyncio.create_task(desk.acquire(uuid.uuid4(), "", endpoints, [2, 2, 2]))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.wait([left])
    await desk.settled()
    assert not desk.count
    assert await in_db(SlotLease.objects.count) == 0
    await desk.close(5)
