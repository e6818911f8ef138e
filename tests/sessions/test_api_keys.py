"""API keys as rows."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.utils import timezone

from sessions import api_keys
from sessions.models import ApiKey

pytestmark = pytest.mark.django_db


def test_a_key_is_stored_only_as_its_hash_and_found_by_itself(db: None) -> None:
    view, key = api_keys.create_key("laptop")
    assert key.startswith(view.prefix)
    row = ApiKey.objects.get()
    assert key not in {str(value) for value in vars(row).values()}
    found = api_keys.find_key(key)
    assert found is not None
    assert found.id == view.id
    assert api_keys.find_key(key + "x") is None
    assert api_keys.find_key("\udc80") is None


def test_revoked_and_expired_keys_are_not_valid(db: None) -> None:
    revoked, _ = api_keys.create_key("revoked")
    api_keys.create_key("expired", expires_at=timezone.now() - timedelta(seconds=1))
    api_keys.create_key("open", expires_at=timezone.now() + timedelta(days=1))
    assert api_keys.revoke_keys([revoked.id]) == 1
    assert api_keys.revoke_keys([revoked.id]) == 0
    assert {key.name: key.is_valid for key in api_keys.keys_by_prefix()} == {
        "revoked": False,
        "expired": False,
        "open": True,
    }
    assert api_keys.count_valid_keys() == 1


def test_use_of_a_key_is_written_once_a_minute(db: None) -> None:
    view, _ = api_keys.create_key("busy")
    assert api_keys.touch_key(view.id)
    assert not api_keys.touch_key(view.id)
    ApiKey.objects.update(last_used_at=timezone.now() - timedelta(seconds=api_keys.TOUCH_INTERVAL_S + 1))
    assert api_keys.touch_key(view.id)
