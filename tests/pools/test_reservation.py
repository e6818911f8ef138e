"""Reservations: one owner at a time, whatever races, dies or hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from django.db import connection
from django.db.models.functions import Now

from pools import host_services, reservation
from pools.errors import Reserved
from pools.models import Reservation
from pools.reservation import Lease, held, owner_of, release, reserve, sweep

THREADS = 8


def expire(lease: Lease) -> None:
    Reservation.objects.filter(pk=lease.id).update(expires_at=Now() - timedelta(seconds=1))


@pytest.mark.django_db
def test_a_resource_has_one_owner_until_it_is_released() -> None:
    lease = reserve("gpu:1:load", "engine:1:1", 60)
    assert lease is not None
    assert reserve("gpu:1:load", "engine:2:1", 60) is None
    assert reserve("gpu:1:load", "engine:1:1", 60) is None, "a task that runs twice has it once"
    assert reserve("gpu:2:load", "engine:2:1", 60) is not None
    assert release(lease)
    assert not release(lease)
    later = reserve("gpu:1:load", "engine:2:1", 60)
    assert later is not None and later.id > lease.id


@pytest.mark.django_db
def test_a_lease_that_ended_is_another_owners_and_its_first_owner_can_do_nothing_with_it() -> None:
    first = reserve("gpu:1:load", "engine:1:1", 60)
    assert first is not None
    expire(first)
    second = reserve("gpu:1:load", "engine:2:1", 60)
    assert second is not None
    assert not release(first)
    holder = reservation.holder_of("gpu:1:load")
    assert holder is not None and holder.owner == "engine:2:1"


@pytest.mark.django_db
def test_the_block_that_holds_one_gives_it_back_also_when_it_fails() -> None:
    with pytest.raises(ZeroDivisionError), held("host:a:build", "host:a:1", 60, "sm_86"):
        with pytest.raises(Reserved, match=r"host:a:1 \(sm_86\)"), held("host:a:build", "host:b:1", 60):
            pass
        raise ZeroDivisionError
    assert reservation.reservations() == []


@pytest.mark.django_db
def test_the_sweep_frees_what_ended_and_what_a_restarted_host_left() -> None:
    host = host_services.join_host("a")
    host_services.join_host("b")
    ended = reserve("one", owner_of("a", 1), 60)
    assert ended is not None
    expire(ended)
    reserve("two", owner_of("a", 1, "download"), 60)
    reserve("three", owner_of("b", 1), 60)
    reserve("four", "engine:7:3", 60)
    assert sweep() == 1
    assert host_services.join_host("a") == host
    reserve("five", owner_of("a", 2, "build"), 60)
    assert sweep() == 1
    assert [view.resource for view in reservation.reservations()] == ["five", "four", "three"]
    assert reservation.release_owner("engine:7") == 1


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("resource", "owner", "ttl_s"), [("", "a", 1), ("a", "", 1), ("a", "a", 0), ("a\n", "a", 1), ("a", "b" * 129, 1)]
)
def test_what_cannot_be_reserved_is_refused(resource: str, owner: str, ttl_s: float) -> None:
    with pytest.raises(ValueError, match=r"reservation|named"):
        reserve(resource, owner, ttl_s)


def in_threads(work: Callable[[int], object]) -> list[object]:
    """`work(number)` in THREADS threads that begin together, each with a connection of its own."""
    together = threading.Barrier(THREADS)

    def run(number: int) -> object:
        try:
            together.wait()
            return work(number)
        finally:
            connection.close()

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(run, range(THREADS)))


@pytest.mark.django_db(transaction=True)
def test_of_many_who_ask_at_once_one_gets_it() -> None:
    for round_number in range(10):
        leases = in_threads(lambda number, key=round_number: reserve(f"r{key}", f"owner-{number}", 60))
        assert sum(lease is not None for lease in leases) == 1


@pytest.mark.django_db(transaction=True)
def test_of_many_who_take_over_an_ended_one_one_gets_it() -> None:
    for round_number in range(10):
        resource = f"r{round_number}"
        ended = reserve(resource, "gone", 60)
        assert ended is not None
        expire(ended)
        # A sweep in the middle of it must not free the new owner's.
        leases = in_threads(lambda number, r=resource: reserve(r, f"owner-{number}", 60) if number else sweep())
        assert sum(isinstance(lease, Lease) for lease in leases) <= 1
        assert Reservation.objects.filter(resource=resource, expires_at__gt=Now()).count() <= 1


@pytest.mark.django_db(transaction=True)
def test_nobody_is_ever_inside_with_somebody_else() -> None:
    inside: list[int] = []
    seen: list[int] = []

    def work(number: int) -> int:
        times = 0
        for _ in range(40):
            lease = reserve("the one thing", f"owner-{number}", 60)
            if lease is None:
                time.sleep(0.002)
                continue
            inside.append(number)
            seen.append(len(inside))
            inside.remove(number)
            assert release(lease)
            times += 1
        return times

    assert sum(int(str(times)) for times in in_threads(work)) == len(seen) > 0
    assert set(seen) == {1}
