"""What a person wished for a conversation is met at every replica of the site, and not lost on the way."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from engines.client import close_client_session
from engines.models import Engine
from pools.db import in_db
from sessions import services
from sessions.dialects import CHAT
from sessions.dispatch import Dispatcher
from sessions.identity import Identity, Owner
from sessions.models import ChatSession
from sessions.services import TurnStart
from tests.frozen_table import frozen
from tests.rows import add_engine, add_model, set_ready
from tests.sessions.loopback_engine import loopback_engine, streaming
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db(transaction=True)

ME = Identity(Owner(), "c" * 64)
MESSAGES = [
    {"role": "user", "content": "Name a colour."},
    {"role": "assistant", "content": "Red"},
    {"role": "user", "content": "Another."},
]
CALL = CHAT.read(json.dumps({"messages": MESSAGES}).encode())


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

    async with loopback_engine(streaming()) as port:
        yield await in_db(write, port)
        await close_client_session()


def start(engine_id: int, seen: int | None = None) -> TurnStart:
    return TurnStart(uuid.uuid4(), ME, "api", "Name a colour.", "tiny", engine_id, seen_wanted_engine_id=seen)


def wanted() -> int | None:
    return ChatSession.objects.values_list("wanted_engine_id", flat=True).get()


async def test_a_move_at_one_replica_is_met_by_another_that_has_the_conversation_warm(
    two: tuple[Engine, Engine],
) -> None:
    home, target = two
    mover, other = Dispatcher(), Dispatcher()
    await in_db(services.begin_turn, start(home.pk))
    for replica in (mover, other):
        replica.places.note(ME.key_hash, home.pk, 40)
        assert (await replica.choose(CALL, ME)).endpoint.engine_id == home.pk

    chat_id = await in_db(lambda: ChatSession.objects.get().pk)
    assert await in_db(services.move_session, chat_id, target.pk)
    # A turn that was on its way before knows nothing of it.
    await in_db(services.begin_turn, start(home.pk))
    assert await in_db(wanted) == target.pk
    sent = await other.choose(CALL, ME)
    assert (sent.endpoint.engine_id, sent.seen_wanted_engine_id) == (target.pk, target.pk)
    await in_db(services.begin_turn, start(sent.endpoint.engine_id, sent.seen_wanted_engine_id))
    assert await in_db(wanted) is None


async def test_a_wish_that_cannot_be_met_is_over_once_it_was_looked_at(two: tuple[Engine, Engine]) -> None:
    home, target = two
    await in_db(services.begin_turn, start(home.pk))
    await in_db(services.move_session, await in_db(lambda: ChatSession.objects.get().pk), target.pk)
    await in_db(lambda: Engine.objects.filter(pk=target.pk).update(state="stopped"))
    replica = Dispatcher()
    replica.places.note(ME.key_hash, home.pk, 40)
    sent = await replica.choose(CALL, ME)
    assert (sent.endpoint.engine_id, sent.seen_wanted_engine_id) == (home.pk, target.pk)
    await in_db(services.begin_turn, start(home.pk, sent.seen_wanted_engine_id))
    assert await in_db(wanted) is None


async def test_a_warm_turn_goes_on_while_the_database_hangs(two: tuple[Engine, Engine]) -> None:
    home, _ = two
    replica = Dispatcher()
    await replica.choose(CALL, ME)
    replica.places.note(ME.key_hash, home.pk, 40)
    with frozen("hydra_sessions_chatsession"):
        assert (await replica.choose(CALL, ME)).endpoint.engine_id == home.pk
