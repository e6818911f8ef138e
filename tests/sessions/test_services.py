"""Conversations and turns as rows."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from celery import current_app
from django.utils import timezone

from engines.models import Engine
from sessions import services
from sessions.identity import Identity, Owner
from sessions.models import ChatSession, Turn
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


@pytest.mark.parametrize("state", ["cancelled", "done"])
def test_a_turn_that_goes_on_at_another_replica_counts_once(engine: Engine, state: str) -> None:
    """Also where the first one wrote down that it broke off; what was done there is only read again."""
    begun = start(engine)
    told = replace(end(engine, state), prompt_tokens=10, completion_tokens=0 if state == "cancelled" else 5)
    services.end_turn(services.begin_turn(begun), told)
    again = services.begin_turn(replace(begun, resumed=True))
    chat, turn = ChatSession.objects.get(), Turn.objects.get()
    counted = (10, 5) if state == "done" else (0, 0)
    assert (chat.prompt_tokens, chat.completion_tokens) == (turn.prompt_tokens, turn.completion_tokens) == counted
    assert services.end_turn(again, end(engine)) is (state == "cancelled")
    chat, turn = ChatSession.objects.get(), Turn.objects.get()
    assert (chat.turn_count, chat.prompt_tokens, chat.completion_tokens) == (1, 10, 5)
    assert (turn.state, turn.prompt_tokens, turn.completion_tokens) == ("done", 10, 5)


def test_a_split_that_did_not_begin_says_so_at_its_turns_end(engine: Engine) -> None:
    plan = {"why": "it costs least", "split": {"prefill": "cpu-0", "decode": "cpu-1", "state": "running"}}
    turn = services.begin_turn(replace(start(engine), route="pd", explanation=plan))
    assert services.recent_sessions()[0].split_engines == ("cpu-0", "cpu-1")
    services.end_turn(turn, end(engine))
    told = Turn.objects.get().explanation
    assert (told["why"], told["split"]["state"]) == ("it costs least", "")
    assert told["split"]["fell_back"] == "another engine had to take it"
    assert services.recent_sessions()[0].split_engines == ()


def test_a_last_turn_has_its_sessions_place_given_up_on_commit(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, django_capture_on_commit_callbacks: Any
) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(current_app, "send_task", lambda name, **options: sent.append((name, options)))
    last = replace(end(engine), ends_session=True)
    turns = [services.begin_turn(start(engine)) for _ in range(2)]
    with django_capture_on_commit_callbacks(execute=True):
        services.end_turn(turns[0], end(engine))
        services.end_turn(turns[1], last)
        services.end_turn(turns[1], last)
        assert sent == []
    (told,) = sent
    assert told == ("sessions.tasks.end_session", {"args": [turns[1]], "queue": "control", "expires": 300.0})
    # Behind the first one came another, so nothing ends with it.
    assert [services.session_to_end(turn) for turn in (*turns, 0)] == [None, "a" * 64, None]
    aside = services.begin_turn(replace(start(engine), is_background=True))
    with django_capture_on_commit_callbacks(execute=True):
        services.end_turn(aside, last)
    assert len(sent) == 1
    assert services.session_to_end(turns[1]) == "a" * 64


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
