"""Ages read on plain pages as they do on live ones."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from django.utils import timezone

from hydra_site.templatetags.ages import ago

NOW = datetime(2026, 1, 2, tzinfo=UTC)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (-3, "just now"),
        (4, "just now"),
        (5, "5 s ago"),
        (59.9, "59 s ago"),
        (60, "1 min ago"),
        (3599, "59 min ago"),
        (3600, "1 h ago"),
        (172_799, "47 h ago"),
        (172_800, "2 d ago"),
    ],
)
def test_an_age_is_told_in_its_largest_whole_unit(monkeypatch: pytest.MonkeyPatch, seconds: float, said: str) -> None:
    monkeypatch.setattr(timezone, "now", lambda: NOW)
    assert ago(NOW - timedelta(seconds=seconds)) == said
