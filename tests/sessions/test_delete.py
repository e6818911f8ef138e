"""Deleting a conversation that moves: whoever takes it in must not hold it for nobody."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engines.models import Engine
from engines.wire_handoff import HandoffAnswer
from pools.db import in_db
from sessions import handoffs, lifecycle, snapshots
from sessions.choices import HandoffState
from sessions.errors import SessionBusy, SessionUnknown
from sessions.models import ChatSession, Handoff
from tests.rows import add_engine, add_model, set_ready
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db(transaction=True)
KEY = "d" * 64
MOVED = HandoffAnswer("idle", 10, 1000, 0, 1000, 0.1, 0.0, 0.0, None)


def begun(model: SyntheticModel, folder: Path) -> tuple[int, int]:
    """A conversation and a planned move of it; nothing of it is held anywhere, as far as the engines tell."""
    variant = add_model(model.path, folder)
    source, target = (add_engine(variant, name=name) for name in ("cpu-0", "cpu-1"))
    set_ready(source, 1)
    chat = ChatSession.objects.create(key_hash=KEY, model_name="tiny", engine=source)
    return chat.pk, handoffs.start(chat.pk, source.pk, target.pk, send=False)


async def test_a_conversation_that_is_being_moved_is_deleted_behind_its_move(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path
) -> None:
    _, move = await in_db(begun, tiny_model("llama"), tmp_path)
    with pytest.raises(SessionBusy, match="being moved"):
        await lifecycle.delete(None, KEY)
    await in_db(lambda: Handoff.objects.update(state=HandoffState.RUNNING))
    with pytest.raises(SessionBusy, match="being moved"):
        await lifecycle.delete(None, KEY)
    assert await in_db(handoffs.commit, move, MOVED)
    await in_db(lambda: Engine.objects.update(state="stopped"))
    await lifecycle.delete(None, KEY)
    with pytest.raises(SessionUnknown):
        await lifecycle.delete(None, KEY)


def test_one_that_moved_since_its_engines_were_told_stays(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path
) -> None:
    chat_id, move = begun(tiny_model("llama"), tmp_path)
    assert not snapshots.delete_chat(chat_id, None)
    assert not snapshots.delete_chat(chat_id, move), "it goes on"
    Handoff.objects.update(state=HandoffState.RUNNING)
    handoffs.commit(move, MOVED)
    assert not snapshots.delete_chat(chat_id, None), "nobody knew of it"
    assert ChatSession.objects.filter(pk=chat_id).exists()
    assert snapshots.delete_chat(chat_id, move)
    assert not ChatSession.objects.exists()
    assert snapshots.delete_chat(chat_id, move), "it is gone already"
