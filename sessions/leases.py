"""Leases of places on engines: who runs what where, for all replicas of the site. The only writer of SlotLease rows.

A place is asked for in one round trip: a function of the database (see the migrations) takes a lock for the session, gives it
to the engine that runs a request of it already, else to the first of the wanted ones that has room, and writes the lease.
Leases end with their requests; those of a replica that died end by themselves, since nobody prolongs them.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from django.db import connection
from django.db.models import Count
from django.db.models.functions import Now

from sessions.models import SlotLease

LEASE_S = 60.0
# Who could not reach the database for long prolongs what it holds once it can: a lease that has ended counts nowhere, but is
# kept for so long.
ENDED_KEPT_S = 60.0
ACQUIRE = (
    "SELECT outcome, leased_engine, others, wanted_engine"
    " FROM hydra_lease(%s, %s, %s, %s::bigint[], %s::integer[], %s, %s)"
)
Outcome = Literal["leased", "busy", "duplicate"]


@dataclass(frozen=True)
class Wanted:
    """A place on one of `engine_ids`, the best first; on each no more than `limits` requests may run or wait.

    `owner` names the asking process, `session` a conversation ("" none), `idempotency` a request that must not run twice at once.
    """

    request_id: uuid.UUID
    session: str
    owner: str
    engine_ids: tuple[int, ...]
    limits: tuple[int, ...]
    idempotency: str = ""


@dataclass(frozen=True)
class Lease:
    """What came of it. `engine_id` is None unless it is leased; `others` were on that engine before. `wanted_engine_id` is where
    a person wants the session's next turn, leased there or not."""

    outcome: Outcome
    engine_id: int | None = None
    others: int = 0
    wanted_engine_id: int | None = None


def acquire(wanted: Wanted) -> Lease:
    """One round trip. The lease lasts LEASE_S unless it is prolonged."""
    with connection.cursor() as cursor:
        cursor.execute(ACQUIRE, arguments(wanted))
        return Lease(*cursor.fetchone())


def arguments(wanted: Wanted) -> list[object]:
    """What ACQUIRE is executed with."""
    return [
        wanted.request_id,
        wanted.session,
        wanted.owner,
        list(wanted.engine_ids),
        list(wanted.limits),
        wanted.idempotency,
        timedelta(seconds=LEASE_S),
    ]


def release(request_ids: Sequence[uuid.UUID], owner: str) -> int:
    """Give places of this owner back; returns how many were still leased."""
    return SlotLease.objects.filter(pk__in=request_ids, owner=owner).delete()[0]


def prolong(request_ids: Sequence[uuid.UUID]) -> int:
    """Have these leases last LEASE_S from now on, by the database's clock; returns how many there are."""
    return SlotLease.objects.filter(pk__in=request_ids).update(expires_at=Now() + timedelta(seconds=LEASE_S))


def release_all(owner: str) -> int:
    """A process ends, and none of its requests goes on."""
    return SlotLease.objects.filter(owner=owner).delete()[0]


def sweep() -> int:
    """Remove leases of processes that died; returns how many."""
    return SlotLease.objects.filter(expires_at__lt=Now() - timedelta(seconds=ENDED_KEPT_S)).delete()[0]


def engines_of(sessions: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Where requests of these conversations run or wait; those with none are left out."""
    leased = SlotLease.objects.filter(session__in=[one for one in sessions if one], expires_at__gte=Now())
    found: dict[str, tuple[int, ...]] = {}
    for session, engine_id in leased.order_by("created_at").values_list("session", "engine_id"):
        found[session] = (*found.get(session, ()), engine_id)
    return found


def live() -> dict[int, int]:
    """How many leases each engine has."""
    leased = SlotLease.objects.filter(expires_at__gte=Now())
    return dict(leased.values_list("engine_id").annotate(Count("pk")).order_by("engine_id"))
