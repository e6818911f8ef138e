"""Transactions that meet at rows in an order that a test sets: so that two which could wait for each other surely do."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from django.db import connection, connections, transaction
from django.db.models import QuerySet

PATIENCE_S = 60.0


def meet(held: QuerySet[Any], *works: Callable[[], Any]) -> list[Any]:
    """Each work in a thread of its own, begun when the one before it waits; the first waits for the `held` rows, which are let go
    when all wait. Returns what they return; raises what one of them does, as of a deadlock."""
    with ThreadPoolExecutor(len(works)) as threads:
        with transaction.atomic():
            assert list(held.select_for_update())
            begun = []
            for count, work in enumerate(works, 1):
                begun.append(threads.submit(_closing, work))
                _until_waiting(count)
        return [one.result(PATIENCE_S) for one in begun]


def _closing(work: Callable[[], Any]) -> Any:
    try:
        return work()
    finally:
        connections.close_all()


def _until_waiting(count: int) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while _waiting() < count:
        assert time.monotonic() < until_s, f"fewer than {count} wait"
        time.sleep(0.01)


def _waiting() -> int:
    """Transactions of this database that wait for another's rows."""
    with connection.cursor() as cursor:
        # Else who runs is what it was at the transaction's first look.
        cursor.execute("SELECT pg_stat_clear_snapshot()")
        cursor.execute(
            "SELECT count(DISTINCT waiter.pid) FROM pg_locks waiter JOIN pg_stat_activity one USING (pid)"
            " WHERE NOT waiter.granted AND one.datname = current_database()"
        )
        return int(cursor.fetchone()[0])
