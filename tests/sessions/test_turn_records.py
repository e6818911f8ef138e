"""What is kept of requests: for how long, and what the admin tells of them."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from engines.models import Engine
from sessions import retention, services, snapshots, tasks
from sessions.identity import Identity, Owner
from sessions.models import ChatSession, Turn
from sessions.services import TurnEnd, TurnStart
from tests.rows import add_engine, add_model
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db
LIST = reverse("admin:hydra_sessions_turn_changelist")


@pytest.fixture
def engine(db: None, tiny_model: Callable[..., SyntheticModel], tmp_path: Path) -> Engine:
    return add_engine(add_model(tiny_model("llama").path, tmp_path))


def request(engine: Engine, age_s: float = 0.0, first_token_s: float | None = 0.3, **values: Any) -> Turn:
    """The row of a request that ended `age_s` ago, of the conversation of requests without a name."""
    start = TurnStart(
        uuid.uuid4(), Identity(Owner(), "a" * 64), "api", "", "tiny", engine.pk,
        **{"explanation": {"why": "it costs least"}, "predicted_first_token_s": 0.2, **values},
    )  # fmt: skip
    turn_id = services.begin_turn(start)
    services.end_turn(turn_id, TurnEnd("done", engine.pk, 1.0, first_token_s=first_token_s))
    at = timezone.now() - timedelta(seconds=age_s)
    Turn.objects.filter(pk=turn_id).update(started_at=at, ended_at=at)
    return Turn.objects.get(pk=turn_id)


def test_requests_of_a_conversation_that_never_ends_are_forgotten_after_the_retention(
    engine: Engine, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.HYDRA_SESSION_RETENTION_DAYS = 2
    monkeypatch.setattr(snapshots, "TURNS_AN_EXPIRY", 2)
    fresh = request(engine, age_s=86400)
    for number in range(5):
        request(engine, age_s=3 * 86400 + number)
    running = services.begin_turn(TurnStart(uuid.uuid4(), Identity(Owner(), "a" * 64), "api", "", "tiny", engine.pk))
    Turn.objects.filter(pk=running).update(started_at=timezone.now() - timedelta(days=3))
    tasks.expire_sessions()
    assert set(Turn.objects.values_list("pk", flat=True)) == {fresh.pk, running}
    assert ChatSession.objects.get().turn_count == 7, "the conversation itself goes on"
    monkeypatch.setattr(retention, "MOST_PARTS", 1)
    for _ in range(5):
        request(engine, age_s=3 * 86400)
    assert snapshots.expire_turns() == 2, "bounded a call"


def test_the_list_tells_why_and_how_true_predictions_were(engine: Engine, settings: Any) -> None:
    settings.ALLOWED_HOSTS = ["testserver"]
    browser = Client()
    browser.force_login(get_user_model().objects.create_superuser("admin"))
    assert "first tokens:" not in browser.get(LIST).content.decode()
    for first_token_s in (0.1, 0.3, 0.5, None):
        request(engine, first_token_s=first_token_s)
    request(engine, first_token_s=0.2, is_background=True, explanation=None)
    Turn.objects.filter(is_background=True).update(state="failed")
    text = browser.get(LIST).content.decode()
    told = "4 first tokens: actual / predicted 1.25 in the middle, 0.50 to 2.50; 2 within a factor of 2"
    for shown in (told, "it costs least", "2.50 ×", "0.50 ×"):
        assert shown in text
    filtered = browser.get(LIST, {"is_background__exact": "1"}).content.decode()
    assert "1 first tokens: actual / predicted 1.00 in the middle" in filtered
    assert "it costs least" not in filtered
    column = list(browser.get(LIST).context["cl"].list_display).index("actual_to_predicted")
    ordered = browser.get(LIST, {"o": f"-{column}"}).content.decode()
    assert ordered.index("2.50 ×") < ordered.index("1.50 ×") < ordered.index("0.50 ×")
