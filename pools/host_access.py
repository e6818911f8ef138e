"""Rows that say which database role and broker user a joined host has: the only writer of HostAccess."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from django.db import transaction
from django.db.models.functions import Now

from pools.models import HostAccess


@dataclass(frozen=True)
class AccessView:
    """A host's role and user. `broker_password_digest` is the SHA-256 of the user's password, as the broker takes it; "" for a
    user that was taken back.
    """

    host_id: int
    host_name: str
    database_role: str
    broker_user: str
    broker_password_digest: str


def record(host_id: int, *, database_role: str, broker_user: str, broker_password_digest: str) -> None:
    """Write what was made for a host, in place of what was made for it before."""
    values = {
        "database_role": database_role,
        "broker_user": broker_user,
        "broker_password_digest": broker_password_digest,
        "granted_at": Now(),
    }
    HostAccess.objects.update_or_create(host_id=host_id, defaults=values)


def accesses() -> list[AccessView]:
    """What joined hosts have, by host name."""
    fields = ("host_id", "host__name", "database_role", "broker_user", "broker_password_digest")
    return [AccessView(*row) for row in HostAccess.objects.order_by("host__name").values_list(*fields)]


@contextmanager
def granted(host_id: int) -> Iterator[AccessView | None]:
    """A host's access for the duration of the block, in which nobody can take it back; None where it has none (any more)."""
    fields = ("host_id", "host__name", "database_role", "broker_user", "broker_password_digest")
    with transaction.atomic():
        rows = (
            HostAccess.objects.select_for_update(of=("self",))
            .filter(host_id=host_id)
            .exclude(broker_password_digest="")
        )
        row = rows.values_list(*fields).first()
        yield None if row is None else AccessView(*row)


def take_back(host_id: int) -> bool:
    """From now on nobody makes the host's broker user again; False when it had been taken back already.

    The row stays: it says that the host had joined.
    """
    rows = HostAccess.objects.filter(host_id=host_id).exclude(broker_password_digest="")
    return bool(rows.update(broker_password_digest=""))


def access_of(host_id: int) -> AccessView | None:
    """What one host has; None for the host of the site itself."""
    return next((access for access in accesses() if access.host_id == host_id), None)
