"""One-time tokens with which machines join: the only writer of JoinToken. A token is shown once; its digest is kept."""

import hashlib
import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.conf import settings
from django.db import transaction
from django.db.models import Q
from django.db.models.functions import Now

from pools.choices import HostDuty, HostState
from pools.errors import HostNameTaken, JoinTokenInvalid, PoolNotJoinable
from pools.events import publish_on_commit
from pools.host_services import LOST_AFTER_S
from pools.models import Host, JoinToken

TOKEN_MARK = "hydra-join-"
TOKEN_BYTES = 32
PREFIX_CHARS = 16
DEFAULT_MINUTES = 60
MAX_MINUTES = 7 * 24 * 60
MAX_TOKEN_CHARS = 128
KEPT_DAYS = 30


@dataclass(frozen=True)
class TokenView:
    """A token without its secret. `used_by` is the name of the host that used it."""

    id: int
    prefix: str
    note: str
    created_at: datetime
    expires_at: datetime
    used_at: datetime | None
    used_by: str | None
    is_open: bool


def check_joinable() -> None:
    """Raises PoolNotJoinable where the site's servers cannot be reached from other machines."""
    if settings.HYDRA_NOT_JOINABLE:
        raise PoolNotJoinable(settings.HYDRA_NOT_JOINABLE)


def create(note: str = "", minutes: int = DEFAULT_MINUTES) -> tuple[int, str]:
    """Make a token: its row's key, and its text, which nobody can read again.

    Raises ValueError for minutes out of bounds, PoolNotJoinable where it would be of no use.
    """
    check_joinable()
    if not 1 <= minutes <= MAX_MINUTES:
        raise ValueError(f"a token lives for 1 to {MAX_MINUTES} minutes")
    token = TOKEN_MARK + secrets.token_urlsafe(TOKEN_BYTES)
    row = JoinToken.objects.create(
        digest=_digest(token),
        prefix=token[:PREFIX_CHARS],
        note=note[:100],
        expires_at=Now() + timedelta(minutes=minutes),
    )
    return row.pk, token


def redeem(token: str, host_name: str, address: str) -> int:
    """Use a token up for the host of this name, whose row is made or taken over; returns that row's key.

    All or nothing: a token is not used up by a join that fails, as long as the caller's transaction is rolled back. Raises
    JoinTokenInvalid, HostNameTaken.
    """
    with transaction.atomic():
        usable = Q(digest=_digest(token[:MAX_TOKEN_CHARS]), used_at__isnull=True, expires_at__gt=Now())
        if not JoinToken.objects.filter(usable).update(used_at=Now()):
            raise JoinTokenInvalid("This token cannot be used.")
        host, made = Host.objects.get_or_create(name=host_name, defaults={"state": HostState.LOST})
        alive = Q(state=HostState.UP, last_seen_at__gt=Now() - timedelta(seconds=LOST_AFTER_S))
        # Only a host that joined, and is not heard of any more, gives its name away.
        free = Host.objects.filter(pk=host.pk).exclude(alive & ~Q(duty=HostDuty.RETIRED))
        if not made:
            # A join in the condition would make the UPDATE one over a subquery, which checks the row no second time.
            pk = free.filter(access__isnull=False).select_for_update(of=("self",)).values_list("pk", flat=True).first()
            if pk is None:
                raise HostNameTaken(f"The name {host_name} belongs to another host of the pool.")
        Host.objects.filter(pk=host.pk).update(
            address=address, duty=HostDuty.ACTIVE, duty_since=Now(), state=HostState.LOST
        )
        JoinToken.objects.filter(digest=_digest(token)).update(used_by=host)
        publish_on_commit("host", host.pk)
    return host.pk


def tokens() -> list[TokenView]:
    """All tokens that are kept, the newest first."""
    rows = JoinToken.objects.select_related("used_by").annotate(is_open=Q(used_at__isnull=True, expires_at__gt=Now()))
    return [
        TokenView(
            row.pk,
            row.prefix,
            row.note,
            row.created_at,
            row.expires_at,
            row.used_at,
            row.used_by.name if row.used_by else None,
            row.is_open,
        )
        for row in rows
    ]


def revoke(token_id: int) -> bool:
    """Make a token useless that nobody has used. False when it was used or has ended."""
    open_one = JoinToken.objects.filter(pk=token_id, used_at__isnull=True, expires_at__gt=Now())
    return bool(open_one.update(expires_at=Now()))


def sweep() -> int:
    """Remove tokens that ended more than KEPT_DAYS ago."""
    removed, _ = JoinToken.objects.filter(expires_at__lt=Now() - timedelta(days=KEPT_DAYS)).delete()
    return removed


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
