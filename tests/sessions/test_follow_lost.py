"""Streams that move from an engine that is lost then or to one that is: none misses a word, and who was lost is suspected."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from engines.client import close_client_session
from engines.models import Engine
from engines.runtime.http_follow import move_event
from pools.db import in_db
from sessions import handoffs
from sessions.dialects import CHAT
from sessions.dispatch import Wishes
from sessions.failover import JOURNAL_BYTES_HEADER
from sessions.identity import Identity, Owner
from sessions.models import ChatSession
from sessions.relay import ask_engine
from sessions.stream_journal import StreamJournal
from sessions.turn import wait_for_writes
from tests.engine_process import free_port
from tests.rows import add_engine, add_model, set_ready
from tests.sessions.loopback_engine import ENDING, frame, loopback_engine, streaming
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db(transaction=True)
HEAD = b'event: hydra.begun\ndata: {"seed": 1}\n\n'
CALL = {"messages": [{"role": "user", "content": "Colours?"}], "stream": True}


def mark(*entries: Any) -> bytes:
    return b"event: hydra.mark\ndata: " + json.dumps(entries).encode() + b"\n\n"


def said(text: str, token: int) -> bytes:
    return frame({"content": text}) + mark([0, len(text), [token]])


def arrived(*written: Any) -> bytes:
    return mark([0, 0, [5, 6], {"total": 2, "written": written}])


CLOSED = mark([0, 0, [], {"closed": True}])


async def cut(response: web.StreamResponse) -> None:
    response._req.transport.abort()


def rows(model: SyntheticModel, folder: Path, *ports: int) -> str:
    """An engine behind each port, and a move from the first to the second, by its name."""
    variant = add_model(model.path, folder)
    for number, port in enumerate(ports):
        set_ready(add_engine(variant, name=f"cpu-{number}"), port)
    first, second = Engine.objects.order_by("name")
    chat = ChatSession.objects.create(key_hash="b" * 64, model_name="tiny", engine=first)
    return handoffs.name_of(handoffs.start(chat.pk, first.pk, second.pk, send=False))


async def shown() -> tuple[str, bool]:
    """What a client of the first engine is shown, and whether it is told of an error."""
    call = CHAT.read(json.dumps(CALL).encode())
    stream = await ask_engine(call, Identity(Owner(), "c" * 64), wishes=Wishes(engine_name="cpu-0"))
    chunks = [chunk async for chunk in stream]
    await stream.aclose()
    await wait_for_writes(10)
    await close_client_session()
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if "choices" in chunk)
    return text, any("error" in chunk for chunk in chunks)


def states() -> dict[str, str]:
    return dict(Engine.objects.values_list("name", "state"))


@pytest.mark.parametrize("is_lost", [True, False])
async def test_what_was_lost_on_the_way_with_the_source_is_written_once_more(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path, *, is_lost: bool
) -> None:
    asked: list[str] = []
    journals: list[bytes] = []
    opened = asyncio.Event()
    told = HEAD + said("Red", 5) + (b"" if is_lost else said(" and", 6))

    async def dies(response: web.StreamResponse) -> None:
        async with asyncio.timeout(20):
            await opened.wait()
        await cut(response)

    async def source(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        if request.path == "/continue":
            raw = await request.read()
            journals.append(raw[: int(request.headers[JOURNAL_BYTES_HEADER])])
            return await streaming(said(" and", 6), said(" blue.", 7), ENDING + CLOSED)(request)
        return await streaming(told + move_event("moving", names[0]), then=dies)(request)

    async def target(request: web.Request) -> web.StreamResponse:
        if request.path == "/continue":
            return await source(request)
        asked.append(request.path)
        opened.set()
        rest = arrived([0, len("Red and"), False])
        return await streaming(rest, said(" blue.", 7), ENDING + CLOSED)(request)

    async with loopback_engine(source) as first, loopback_engine(target) as second:
        names = [await in_db(rows, tiny_model("llama"), tmp_path, first, second)]
        assert await shown() == ("Red and blue.", False)
    assert asked == [CHAT.path, f"/handoffs/{names[0]}/stream", *(["/continue"] if is_lost else [])]
    # Just what the client was shown, nothing of what the target said.
    assert journals == ([b'{"seed": 1}\n[[0, 3, [5]]]\n'] if is_lost else [])
    assert (await in_db(states))["cpu-1"] == "ready"


async def test_a_source_that_has_done_its_part_is_not_taken_for_lost_where_the_target_is(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path
) -> None:
    """Where both were, nobody would be left to go on."""

    async def source(request: web.Request) -> web.StreamResponse:
        if request.path == "/continue":
            return await streaming(said(" and blue.", 7), ENDING + CLOSED)(request)
        return await streaming(HEAD + said("Red", 5) + move_event("moved", names[0]))(request)

    async with loopback_engine(source) as first:
        names = [await in_db(rows, tiny_model("llama"), tmp_path, first, free_port())]
        assert await shown() == ("Red and blue.", False)
    assert await in_db(states) == {"cpu-0": "ready", "cpu-1": "unhealthy"}


async def test_a_stream_follows_on_what_was_shown_of_each_choice_and_of_its_end() -> None:
    end = {"reason": "stop", "stats": {}}
    lines = (HEAD, mark([0, 3, [5]], [1, 2, [6]]), mark([1, 0, [], end], [0, 0, [], {"ping": True}]))
    for told, fits in (
        ([[0, 3, False], [1, 2, True]], True),
        ([[0, 3, False], [1, 2, True], [2, 0, False]], True),
        ([[0, 2, False], [1, 2, True]], False),
        ([[0, 4, False], [1, 2, True]], False),
        ([[0, 3, False], [1, 2, False]], False),
        ([[0, 3, True], [1, 2, True]], False),
        ([[0, 3, False]], False),
    ):
        journal = StreamJournal()
        for line in lines:
            journal.shown(line)
        kept = bytes(journal.lines)
        await journal.goes_along()
        rest = journal.shown(arrived(*told) + said(" more", 9))
        assert journal.has_gap is not fits
        assert bool(rest) is fits
        assert (bytes(journal.lines) == kept) is not fits


async def test_marks_are_counted_also_where_many_come_after_the_move_was_announced() -> None:
    journal = StreamJournal()
    journal.shown(HEAD + said("Red", 5) + move_event("moving", "handoff-1"))
    for number in range(3000):
        journal.shown(said("x" * (number % 5), number))
    for told, fits in ((3 + 6000, True), (3 + 5999, False)):
        await journal.goes_along()
        journal.shown(arrived([0, told, False]))
        assert journal.has_gap is not fits
    journal = StreamJournal(b"{}\n[1]\n")
    await journal.goes_along()
    assert journal.has_gap, "whoever cannot count does not follow"
