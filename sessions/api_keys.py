"""API keys: made, found, noted as used, closed. The only writer of ApiKey rows.

A key is random, shown once and kept as its digest only.
"""

import hashlib
import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db.models import Q
from django.utils import timezone

from sessions.models import ApiKey

KEY_MARK = "sk-hydra-"
KEY_BYTES = 32
PREFIX_CHARS = len(KEY_MARK) + 6
TOUCH_INTERVAL_S = 60.0


@dataclass(frozen=True)
class KeyView:
    """An API key without its secret."""

    id: int
    name: str
    prefix: str
    created_at: datetime
    last_used_at: datetime | None
    expires_at: datetime | None
    revoked_at: datetime | None
    is_valid: bool


def hash_key(key: str) -> str:
    """What is stored of a key."""
    return hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()


def create_key(
    name: str, *, created_by_id: int | None = None, expires_at: datetime | None = None
) -> tuple[KeyView, str]:
    """Make an API key; returns its view and the key itself, which cannot be had again."""
    key = KEY_MARK + secrets.token_urlsafe(KEY_BYTES)
    row = ApiKey.objects.create(
        name=name,
        prefix=key[:PREFIX_CHARS],
        key_hash=hash_key(key),
        created_by_id=created_by_id,
        expires_at=expires_at,
    )
    return _key_view(row), key


def change_key(key_id: int, name: str, expires_at: datetime | None) -> bool:
    """Change a key's name and when it expires (None: never); False when the row is gone."""
    return bool(ApiKey.objects.filter(pk=key_id).update(name=name, expires_at=expires_at))


def revoke_keys(key_ids: list[int]) -> int:
    """Close these keys for good; returns how many were open until now."""
    return ApiKey.objects.filter(pk__in=key_ids, revoked_at__isnull=True).update(revoked_at=timezone.now())


def find_key(key: str) -> KeyView | None:
    """The key that was presented, valid or not; None when there is none such."""
    row = ApiKey.objects.filter(key_hash=hash_key(key)).first()
    return None if row is None else _key_view(row)


def keys_by_prefix(prefix: str = "") -> list[KeyView]:
    """All keys whose first characters are `prefix`, newest first."""
    return [_key_view(row) for row in ApiKey.objects.filter(prefix__startswith=prefix)]


def touch_key(key_id: int) -> bool:
    """Note that a key was used; written at most once a minute, whatever the traffic."""
    now = timezone.now()
    stale = Q(last_used_at__isnull=True) | Q(last_used_at__lt=now - timedelta(seconds=TOUCH_INTERVAL_S))
    return bool(ApiKey.objects.filter(stale, pk=key_id).update(last_used_at=now))


def count_valid_keys() -> int:
    """How many keys open the API now."""
    alive = Q(expires_at__isnull=True) | Q(expires_at__gt=timezone.now())
    return ApiKey.objects.filter(alive, revoked_at__isnull=True).count()


def _key_view(row: ApiKey) -> KeyView:
    return KeyView(
        id=row.pk,
        name=row.name,
        prefix=row.prefix,
        created_at=row.created_at,
        last_used_at=row.last_used_at,
        expires_at=row.expires_at,
        revoked_at=row.revoked_at,
        is_valid=row.is_valid,
    )
