"""What a person wished for a conversation is met at every replica of the site, and not lost on the way."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from django.db import OperationalError
from django.db.backends.utils import CursorWrapper

from engines.client import close_client_session
from engines.models import Engine
from pools.db import in_db, in_db_within
from sessions import known_engines, leases, services, split, turn
from sessions.dialects import CHAT
from sessions.identity import Identity, Owner
from sessions.models import ChatSession, Handoff, SlotLease, Turn
from sessions.relay import ask_engine
from sessions.relayed_request import dispatcher, lease_desk
from sessions.services import TurnStart
from sessions.turn import wait_for_writes
from tests.frozen_table import frozen
from tests.rows import add_engine, add_model, set_ready
from tests.sessions.loopback_engine import ENDING, frame, loopback_engine, streaming
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db(transaction=True)

PATIENCE_S = 30.0
ME = Identity(Owner(), "c" * 64)
MESSAGES = [
    {"role": "user", "content": "Name a colour."},
    {"role": "assistant", "content": "Red"},
    {"role": "user", "content": "Another."},
]
CALL = CHAT.read(json.dumps({"messages": MESSAGES, "stream": True}).encode())


@pytest.fixture
async def two(
    background: None, tiny_model: Callable[..., SyntheticModel], tmp_path: Path
) -> AsyncIterator[tuple[Engine, Engine]]:
    def write(port: int) -> tuple[Engine, Engine]:
        variant = add_model(tiny_model("llama").path, tmp_path)
        first, second = (add_engine(variant, name=name) for name in ("one", "two"))
        set_ready(first, port)
        set_ready(second, port)
        return first, second

    async with loopback_engine(streaming(frame({"content": "Red"}), ENDING)) as port:
        yield await in_db(write, port)
        await close_client_session()


def start(engine_id: int) -> TurnStart:
    return TurnStart(uuid.uuid4(), ME, "api", "Name a colour.", "tiny", engine_id)


def wanted() -> int | None:
    return ChatSession.objects.values_list("wanted_engine_id", flat=True).get()


def move(engine_id: int) -> bool:
    """As another replica of the site would write it."""
    return services.move_session(ChatSession.objects.get().pk, engine_id)


async def warm(home: Engine) -> None:
    """The conversation has a turn, and this replica knows where."""
    await in_db(services.begin_turn, start(home.pk))
    dispatcher().places.note(ME.key_hash, home.pk, 40)


async def ask() -> int:
    """The engine that answers a turn, once all of it is written."""
    answer = await ask_engine(CALL, ME)
    async for _ in answer.raw():
        pass
    await answer.aclose()
    await wait_for_writes(PATIENCE_S)
    await lease_desk().settled()
    return answer.engine.engine_id


async def test_a_wish_that_another_replica_wrote_is_met_where_the_conversation_is_warm(
    two: tuple[Engine, Engine],
) -> None:
    home, target = two
    await warm(home)
    assert await ask() == home.pk
    assert await in_db(move, target.pk)
    # A turn that was on its way before knows nothing of it.
    await in_db(services.begin_turn, start(home.pk))
    assert await in_db(wanted) == target.pk
    assert await ask() == target.pk
    assert await in_db(wanted) is None
    newest = await in_db(lambda: Turn.objects.latest("started_at"))
    assert (newest.engine_id, newest.explanation["chosen"]["engine_id"]) == (target.pk, target.pk)
    assert newest.explanation["why"] == "an operator asked for it"
    assert [dispatcher().board.running(one) for one in await dispatcher().ready.of("tiny")] == [0, 0]
    assert await in_db(SlotLease.objects.count) == 0


async def test_a_wish_that_cannot_be_met_is_over_once_it_was_looked_at(two: tuple[Engine, Engine]) -> None:
    home, target = two
    await warm(home)
    await in_db(move, target.pk)
    await in_db(lambda: Engine.objects.filter(pk=target.pk).update(state="stopped"))
    assert await ask() == home.pk
    assert await in_db(wanted) is None
    assert [dispatcher().board.running(one) for one in await dispatcher().ready.of("tiny")] == [0]


async def test_a_warm_turn_asks_the_database_once_before_its_engine(
    two: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    home, _ = two
    # However long all of this takes, what it knows of the engines is not old.
    monkeypatch.setattr(known_engines, "READY_CACHE_S", 600.0)
    await warm(home)
    await ask()
    asked: list[str] = []
    execute = CursorWrapper.execute

    def counted(cursor: Any, query: Any, params: Any = None) -> Any:
        asked.append(str(query))
        return execute(cursor, query, params)

    monkeypatch.setattr(turn, "START_DELAY_S", 1.5)
    monkeypatch.setattr(CursorWrapper, "execute", counted)
    answer = await ask_engine(CALL, ME)
    before = list(asked)
    await answer.aclose()
    await wait_for_writes(PATIENCE_S)
    assert [query for query in before if "pg_" not in query] == [leases.ACQUIRE]
    assert any("hydra_sessions_turn" in query for query in asked), "its row is written behind it"


async def test_a_warm_turn_goes_on_while_the_database_hangs(two: tuple[Engine, Engine]) -> None:
    home, _ = two
    await warm(home)
    await ask()
    with frozen("hydra_sessions_chatsession"):
        answer = await ask_engine(CALL, ME)
        assert answer.engine.engine_id == home.pk
    await answer.aclose()
    await wait_for_writes(PATIENCE_S)
    await lease_desk().settled()


async def test_what_the_database_writes_too_late_is_taken_back(two: tuple[Engine, Engine]) -> None:
    """Else a turn would run for an hour, and a planned move keep its conversation where it is."""
    first, second = two
    await in_db(services.begin_turn, start(first.pk))
    until_s = time.monotonic() + 0.1
    with frozen("hydra_sessions_turn"), pytest.raises(OperationalError):
        await in_db_within(0.2, services.begin_turn, start(first.pk), until_s)
    with frozen("hydra_sessions_handoff"), pytest.raises(OperationalError):
        await in_db_within(0.2, split.planned, ME.key_hash, first.pk, second.pk, str(uuid.uuid4()), until_s)
    await asyncio.sleep(0.2)  # who was frozen comes to an end
    assert await in_db(lambda: (Turn.objects.count(), Handoff.objects.count())) == (1, 0)
