"""How long records of what is over are kept (HYDRA_SESSION_RETENTION days), and their end in bounded parts."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db.models import QuerySet
from django.utils import timezone

AT_ONCE, MOST_PARTS = 500, 20


def kept_since() -> datetime:
    """What ended before has had its time."""
    return timezone.now() - timedelta(days=settings.HYDRA_SESSION_RETENTION_DAYS)


def expire(due: QuerySet[Any], oldest_first: str, at_once: int = AT_ONCE) -> int:
    """Delete the rows of `due`, in the order of an indexed field; returns how many. Bounded a call, and a transaction."""
    expired = 0
    for _ in range(MOST_PARTS):
        oldest = due.order_by(oldest_first).values("pk")[:at_once]
        gone, _by_model = due.filter(pk__in=oldest).delete()
        expired += gone
        if gone < at_once:
            break
    return expired
