"""Conversations, turns and keys as rows."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from django.utils import timezone

from engines.models import Engine
from sessions import services
from sessions.identity import Identity, Owner
from sessions.models import ApiKey, ChatSession, Turn
from sessions.services import TurnEnd, TurnStart
from tests.rows import add_engine, add_model
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db


@pytest.fixture
def engine(db: None, tiny_model: Callable[..., SyntheticModel], tmp_path: Path) -> Engine:
    return add_engine(add_model(tiny_model("llama").path, tmp_path))


def start(engine: Engine, key_hash: str = "a" * 64) -> TurnStart:
    identity = Identity(Owner(), key_hash)
    return TurnStart(uuid.uuid4(), identity, "api", "Name a colour.", "tiny", engine.pk)


def end(engine: Engine, state: str = "done") -> TurnEnd:
    return TurnEnd(state=state, engine_id=engine.pk, duration_s=1.5, prompt_tokens=10, completion_tokens=5)


def test_turns_of_one_conversation_share_its_row_and_add_up(engine: Engine) -> None:
    for _ in range(2):
        services.end_turn(services.begin_turn(start(engine)), end(engine))
    chat = ChatSession.objects.get()
    assert (chat.turn_count, chat.prompt_tokens, chat.completion_tokens) == (2, 20, 10)
    assert chat.engine == engine
    services.begin_turn(start(engine, "b" * 64))
    assert ChatSession.objects.count() == 2


def test_a_turn_ends_once(engine: Engine) -> None:
    turn = services.begin_turn(start(engine))
    assert services.end_turn(turn, end(engine, "cancelled"))
    assert not services.end_turn(turn, end(engine, "done"))
    assert Turn.objects.get().state == "cancelled"
    assert ChatSession.objects.get().prompt_tokens == 10


def test_a_turn_whose_site_died_is_closed_later(engine: Engine) -> None:
    services.begin_turn(start(engine))
    assert services.sweep_turns() == 0
    Turn.objects.update(started_at=timezone.now() - timedelta(seconds=services.TURN_LOST_AFTER_S + 1))
    assert services.sweep_turns() == 1
    assert (Turn.objects.get().state, Turn.objects.get().error_code) == ("failed", "site_lost")


def test_lists_show_the_newest_conversations_and_whether_they_run(engine: Engine) -> None:
    services.end_turn(services.begin_turn(start(engine)), end(engine))
    services.begin_turn(start(engine, "b" * 64))
    newest, older = services.recent_sessions()
    assert (newest.state, older.state) == ("running", "done")
    assert older.engine_name == "cpu-0"
    assert older.title == "Name a colour."
    assert len(services.recent_sessions(1)) == 1


def test_a_conversation_survives_its_engine(engine: Engine) -> None:
    services.begin_turn(start(engine))
    engine.delete()
    (chat,) = services.recent_sessions()
    assert chat.engine_name == ""


def test_a_key_is_stored_only_as_its_hash_and_found_by_itself(db: None) -> None:
    view, key = services.create_key("laptop")
    assert key.startswith(view.prefix)
    row = ApiKey.objects.get()
    assert key not in {str(value) for value in vars(row).values()}
    found = services.find_key(key)
    assert found is not None
    assert found.id == view.id
    assert services.find_key(key + "x") is None
    assert services.find_key("\udc80") is None


def test_revoked_and_expired_keys_are_not_valid(db: None) -> None:
    revoked, _ = services.create_key("revoked")
    services.create_key("expired", expires_at=timezone.now() - timedelta(seconds=1))
    services.create_key("open", expires_at=timezone.now() + timedelta(days=1))
    assert services.revoke_keys([revoked.id]) == 1
    assert services.revoke_keys([revoked.id]) == 0
    assert {key.name: key.is_valid for key in services.keys_by_prefix()} == {
        "revoked": False,
        "expired": False,
        "open": True,
    }
    assert services.count_valid_keys() == 1


def test_use_of_a_key_is_written_once_a_minute(db: None) -> None:
    view, _ = services.create_key("busy")
    assert services.touch_key(view.id)
    assert not services.touch_key(view.id)
    ApiKey.objects.update(last_used_at=timezone.now() - timedelta(seconds=services.TOUCH_INTERVAL_S + 1))
    assert services.touch_key(view.id)
