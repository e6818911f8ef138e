"""Exclusive use of something, as a row with an owner and an end: the only writer of Reservation.

A resource is a short text that all who compete for it agree on, such as `gpu:7:load`; an owner is one, too, and for what a
host's processes reserve begins with `owner_of(host)`. Each reservation has a row of its own, so that its key (`Lease.id`) is
higher than that of every earlier one: whoever writes under a lease can fence with it.

A lease ends by `release`, by its expiry (told by the database's clock), or when its owner is known to be gone. Nobody can be
kept waiting by a dead owner for longer than the lease was asked for.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import IntegrityError, transaction
from django.db.models import Q
from django.db.models.functions import Now

from pools.errors import Reserved
from pools.models import Host, Reservation

MAX_TTL_S = 3600.0
MAX_NAME_CHARS = 128

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Lease:
    """A reservation that was had. `id` is higher than that of every lease of this resource before."""

    id: int
    resource: str
    owner: str


@dataclass(frozen=True)
class ReservationView:
    """Who has what until when."""

    id: int
    resource: str
    owner: str
    purpose: str
    reserved_at: datetime
    expires_at: datetime


def owner_of(host_name: str, agent_epoch: int, what: str = "") -> str:
    """The owner's name of something on a host. When the host joins again, what its earlier epochs reserved is freed."""
    return f"host:{host_name}:{agent_epoch}" + (f":{what}" if what else "")


def reserve(resource: str, owner: str, ttl_s: float, purpose: str = "") -> Lease | None:
    """Have `resource` for `ttl_s` seconds, or None while somebody has it; that may also be a lease of the same owner."""
    _check(resource, owner, ttl_s)
    with transaction.atomic():
        Reservation.objects.filter(resource=resource, expires_at__lte=Now()).delete()
        try:
            with transaction.atomic():
                row = Reservation.objects.create(
                    resource=resource,
                    owner=owner,
                    purpose=purpose[:200],
                    reserved_at=Now(),
                    expires_at=Now() + timedelta(seconds=ttl_s),
                )
        except IntegrityError:
            return None
    return Lease(row.pk, resource, owner)


def keep(resource: str, owner: str, ttl_s: float, purpose: str = "") -> bool:
    """Have `resource` until `ttl_s` seconds from now, newly or for longer than so far; False while somebody else has it."""
    _check(resource, owner, ttl_s)
    own = Reservation.objects.filter(resource=resource, owner=owner, expires_at__gt=Now())
    if own.update(expires_at=Now() + timedelta(seconds=ttl_s)):
        return True
    return reserve(resource, owner, ttl_s, purpose) is not None


def release(lease: Lease) -> bool:
    """Give it back. False when it had ended already, which is a normal answer."""
    deleted, _ = Reservation.objects.filter(pk=lease.id, owner=lease.owner).delete()
    return bool(deleted)


@contextmanager
def held(resource: str, owner: str, ttl_s: float, purpose: str = "") -> Iterator[Lease]:
    """Have `resource` for the duration of the block. Raises Reserved, with who has it, while somebody else does."""
    lease = reserve(resource, owner, ttl_s, purpose)
    if lease is None:
        holder = holder_of(resource)
        by = f" by {holder.owner} ({holder.purpose})" if holder else ""
        raise Reserved(f"{resource} is in use{by}")
    try:
        yield lease
    finally:
        release(lease)


def holder_of(resource: str) -> ReservationView | None:
    """Who has `resource` now; None when it is free."""
    return next(iter(_views(Q(resource=resource, expires_at__gt=Now()))), None)


def held_of(resources: Iterable[str]) -> frozenset[str]:
    """Those of `resources` that somebody has now; one question for all."""
    held = Reservation.objects.filter(resource__in=list(resources), expires_at__gt=Now())
    return frozenset(held.values_list("resource", flat=True))


def reservations() -> list[ReservationView]:
    """Everything that is reserved now, by resource."""
    return _views(Q(expires_at__gt=Now()))


def release_owner(owner: str) -> int:
    """Free all that `owner` has, and whoever's name begins with its own and a colon; returns how many."""
    deleted, _ = Reservation.objects.filter(Q(owner=owner) | Q(owner__startswith=f"{owner}:")).delete()
    return deleted


def sweep() -> int:
    """Remove what has ended, and what earlier epochs of a host that joined again have left; returns how many rows went.

    A host that is only lost keeps its leases until they end: it may still be at work behind a broken network.
    """
    removed, _ = Reservation.objects.filter(expires_at__lte=Now()).delete()
    epochs = dict(Host.objects.values_list("name", "agent_epoch"))
    for owner in set(Reservation.objects.filter(owner__startswith="host:").values_list("owner", flat=True)):
        name, _, rest = owner.removeprefix("host:").partition(":")
        if name in epochs and rest.partition(":")[0] != str(epochs[name]):
            left, _ = Reservation.objects.filter(owner=owner).delete()
            logger.info("freed %d reservations that host %s left behind when it restarted", left, name)
            removed += left
    return removed


def _views(which: Q) -> list[ReservationView]:
    fields = tuple(ReservationView.__dataclass_fields__)
    return [ReservationView(*row) for row in Reservation.objects.filter(which).values_list(*fields)]


def _check(resource: str, owner: str, ttl_s: float) -> None:
    if not 0 < ttl_s <= MAX_TTL_S:
        raise ValueError(f"a reservation ends after at most {MAX_TTL_S:g} s; {ttl_s:g} were asked for")
    for name in (resource, owner):
        if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
            raise ValueError(f"resources and owners are named by 1 to {MAX_NAME_CHARS} printable characters")
