"""What a drain's mover sees at each look, and what it waits for."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from django.core.management import CommandError, call_command

from engines.client import close_client_session
from engines.models import Engine
from pools.db import in_db
from sessions import drain_moves, drains
from sessions.choices import DrainKind
from sessions.management.commands import drain as drain_command
from sessions.models import ChatSession, Drain, Handoff
from tests.sessions.drain_pair import ME, STAYS, drain_pair, no_slots, taking
from tests.sessions.drain_rates import RATES
from tests.sessions.loopback_engine import loopback_engine
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def two(tiny_model: Callable[..., SyntheticModel], tmp_path: Path, transactional_db: None) -> tuple[Engine, Engine]:
    return drain_pair(tiny_model, tmp_path)


async def test_an_engine_that_does_not_answer_is_named(
    two: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain_moves, "SETTLE_S", 0.0)
    monkeypatch.setattr(drain_moves, "SILENT_S", 0.0)
    command = functools.partial(call_command, "drain", "one", stdout=(said := StringIO()))
    await in_db(command)
    assert said.getvalue() == f"one: {drain_moves.SILENT}\n"
    with pytest.raises(CommandError, match="1 stay"):
        await in_db(functools.partial(command, go=True))
    assert await in_db(taking) == ["two"]
    await in_db(functools.partial(command, serve=True))
    assert await in_db(taking) == ["one", "two"]


@pytest.fixture
async def telling(two: tuple[Engine, Engine], background: None) -> AsyncIterator[dict[str, dict[str, Any]]]:
    """What the two engines tell of themselves, to be changed."""
    told: dict[str, dict[str, Any]] = {
        "one": asdict(replace(RATES, sessions={"a" * 64: 100})),
        "two": asdict(replace(RATES, free_slots=0)),
    }

    def tell(name: str) -> Callable[[web.Request], Any]:
        async def answer(_request: web.Request) -> web.StreamResponse:
            return web.json_response(json.loads(json.dumps(told[name])))

        return answer

    async with AsyncExitStack() as stack:
        for engine in two:
            port = await stack.enter_async_context(loopback_engine(no_slots, tell(engine.name)))
            await in_db(Engine.objects.filter(pk=engine.pk).update, http_port=port)
        await in_db(ChatSession.objects.create, key_hash="a" * 64, model_name="tiny")
        yield told
        await close_client_session()


async def begun_of_one() -> int:
    subject = await in_db(drains.named, DrainKind.ENGINE, "one")
    return await in_db(functools.partial(drains.begin, subject, stops=False, send=False))


@pytest.mark.parametrize("passing", ["full", "unhealthy"])
async def test_what_is_in_the_way_for_a_moment_is_waited_for(
    telling: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, passing: str
) -> None:
    monkeypatch.setattr(drain_moves, "SETTLE_S", 0.0)
    monkeypatch.setattr(drain_moves, "LOOK_S", 0.02)
    monkeypatch.setattr(drain_moves, "MOST_TRIES", 1)
    one = Engine.objects.filter(name="one")
    if passing == "full":
        telling["two"] |= {"free_slots": 2, "cells": 50}
    elif passing == "unhealthy":
        await in_db(one.update, state="unhealthy")
    drain_id = await begun_of_one()
    assert not await drain_moves.carry_on(drain_id, 0.1), "it may pass"
    view = await in_db(drains.view, drain_id)
    assert [move.outcome for move in view.moves] == ["stays"]
    # It passes: the conversation is moved, as far as two engines without a handoff port can.
    telling["two"] |= {"free_slots": 2, "cells": 8192}
    await in_db(one.update, state="ready")
    assert await drain_moves.carry_on(drain_id)
    view = await in_db(drains.view, drain_id)
    assert [(move.reason, move.tries) for move in view.moves] == [
        ("one of the two engines does not serve", drain_moves.MOST_TRIES + 1)
    ]
    assert view.state == "partial"


async def test_an_engine_that_nobody_could_ask_has_not_become_empty(
    telling: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SETTLE_S", "SILENT_S"):
        monkeypatch.setattr(drain_moves, name, 0.0)
    await in_db(functools.partial(Engine.objects.filter(name="one").update, state="unhealthy"))
    drain_id = await begun_of_one()
    assert await drain_moves.carry_on(drain_id)
    view = await in_db(drains.view, drain_id)
    assert (view.state, [(move.source, move.reason) for move in view.moves]) == (
        "partial",
        [("one", drain_moves.SILENT)],
    )


async def test_nothing_is_moved_any_more_once_a_person_has_ended_it(
    telling: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    telling["two"] |= {"free_slots": 2}
    drain_id = await begun_of_one()
    beat, beats = drains.beat, []

    def ended(*args: Any) -> Any:
        beats.append(args)
        if len(beats) == 2:  # The one right before the first move.
            drains.serve_again(drains.named(DrainKind.ENGINE, "one"))
        return beat(*args)

    monkeypatch.setattr(drains, "beat", ended)
    assert await drain_moves.carry_on(drain_id)
    assert len(beats) == 2
    assert (await in_db(drains.view, drain_id)).state == "ended"
    assert not await in_db(Handoff.objects.exists)


async def test_the_command_waits_for_what_a_worker_has_taken_up(
    telling: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain_moves, "SETTLE_S", 0.0)
    monkeypatch.setattr(drain_command, "LOOK_S", 0.05)
    for name in telling:
        telling[name] |= {"sessions": {}}
    said = StringIO()
    command = functools.partial(call_command, "drain", "one", "two", go=True, stdout=said)

    def taken_up() -> int | None:
        row = Drain.objects.filter(subject="two").first()
        return row.pk if row is not None and drains.claim(row.pk, ME) else None

    async with asyncio.timeout(20):
        running = asyncio.ensure_future(in_db(command))
        while (drain_id := await in_db(taken_up)) is None:  # noqa: ASYNC110 -- nothing tells of it
            await asyncio.sleep(0.01)
        while await in_db(Drain.objects.filter(subject="one", state="running").exists):  # noqa: ASYNC110 -- nothing tells of it
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert not running.done()
        assert await in_db(drains.finish, drain_id, ME, [replace(STAYS, source="two")])
        with pytest.raises(CommandError, match="1 stay"):
            await running
    assert "stays: no room" in said.getvalue()
