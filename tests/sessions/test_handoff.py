"""Conversations that move between engines through the site: one unbroken stream for the client, one row with the figures."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web
from django.core.management import call_command
from django.db import connection
from django.db.models.functions import Now

from engines.client import close_client_session
from engines.models import Engine
from engines.runtime.http_follow import move_event
from engines.services import serving_engines
from engines.wire_handoff import HandoffAnswer
from hydra_site.supervisor.home import Services
from pools.db import in_db
from sessions import handoffs, lifecycle, tasks
from sessions.choices import HandoffCause, HandoffState
from sessions.dialects import CHAT
from sessions.dispatch import Wishes
from sessions.errors import SessionBusy, SessionUnknown
from sessions.identity import Identity, Owner
from sessions.models import ChatSession, Handoff, SlotLease, Turn
from sessions.relay import ask_engine
from sessions.turn import wait_for_writes
from tests.engine_process import free_port
from tests.paced_engine import PacedEngine
from tests.rows import add_engine, add_model, set_ready
from tests.sessions.loopback_engine import ENDING, frame, loopback_engine, mute_peer, refusing, streaming
from tests.sessions.site_process import Site
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db(transaction=True)
SECRET = "a secret of the tests, long enough"
PATIENCE_S = 60.0
COUNT, TYPED_COUNT = 1500, 800


def _write_rows(engines: dict[str, PacedEngine], model: SyntheticModel, folder: Path) -> None:
    variant = add_model(model.path, folder)
    for name, engine in engines.items():
        row = add_engine(variant, name=name, slots=engine.config.slots)
        values = {"context_tokens": 8192, "rpc_port": engine.config.rpc_port, "rpc_secret": SECRET}
        Engine.objects.filter(pk=row.pk).update(**values)
        set_ready(row, engine.config.port, engine.process.pid)


@pytest.fixture
async def pool(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path, servers: Services
) -> AsyncIterator[tuple[dict[str, PacedEngine], Site]]:
    """Two engines and a site of their own."""
    model = tiny_model("llama", tie_free=True, layers=12)
    engines = {
        name: PacedEngine(tmp_path, model.path, rpc_port=free_port(), rpc_secret=SECRET, context_tokens=8192, slots=2)
        for name in ("cpu-0", "cpu-1")
    }
    site = Site(tmp_path, servers)
    try:
        for engine in engines.values():
            await asyncio.to_thread(engine.__enter__)
        await in_db(_write_rows, engines, model, tmp_path)
        site.start()
        await asyncio.to_thread(site.wait_up)
        yield engines, site
    finally:
        await asyncio.to_thread(site.stop)
        for engine in engines.values():
            engine.stop()
        await close_client_session()


class Talk:
    """A streaming client, as any program with OpenAI's library."""

    def __init__(self, site: Site, name: str, about: str = "river") -> None:
        self._client = openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{site.port}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
        )
        self._headers, self._about = {"X-Session-Id": name}, about
        self.text, self.usage, self.reasons, self.count = "", None, [], 0

    async def run(self, count: int = COUNT, **more: Any) -> Talk:
        stream = await self._client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": f"Tell a story about a {self._about}. " * 12}],
            max_tokens=count,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_headers={**self._headers, **more},
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            self.count += 1
            self.usage = chunk.usage or self.usage
            for choice in chunk.choices:
                self.text += choice.delta.content or ""
                self.reasons += [choice.finish_reason] if choice.finish_reason else []
        await self._client.close()
        return self

    async def until(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.count < count:  # noqa: ASYNC110
                await asyncio.sleep(0.005)


class TypedTalk(Talk):
    """The same by the newer API; `events` are those that came, as the library gives them."""

    events: list[Any]

    async def run(self, count: int = COUNT, **more: Any) -> Talk:
        self.events = []
        stream = await self._client.responses.create(
            model="tiny",
            input=f"Tell a story about a {self._about}. " * 12,
            max_output_tokens=count,
            temperature=0,
            stream=True,
            extra_headers={**self._headers, **more},
            extra_body={"ignore_eos": True},
        )
        async for event in stream:
            self.events.append(event)
            if event.type == "response.output_text.delta":
                self.count += 1
                self.text += event.delta
        await self._client.close()
        return self

    @property
    def whole(self) -> Any:
        """The response that the last event tells of; what came before it must be just that."""
        assert [event.sequence_number for event in self.events] == list(range(len(self.events)))
        first, last = self.events[0].response, self.events[-1].response
        assert (last.id, last.created_at, last.output_text) == (first.id, first.created_at, self.text)
        return last


def _chat() -> tuple[str, str]:
    chat = ChatSession.objects.select_related("engine").latest("pk")
    return chat.key_hash, chat.engine.name


async def begun(talk: Talk, engines: dict[str, PacedEngine]) -> tuple[str, str, str]:
    """The session, the engine where it runs and the other one, once its turn is written and some of its text is here."""
    await talk.until(30)
    async with asyncio.timeout(PATIENCE_S):
        while not await in_db(Turn.objects.filter(state="running").count):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    session, home = await in_db(_chat)
    return session, home, next(name for name in engines if name != home)


async def test_a_client_that_streams_does_not_see_the_conversation_move_nor_the_source_die(
    pool: tuple[dict[str, PacedEngine], Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "TAKE_UP_S", 0.0)  # no worker runs here
    engines, site = pool
    # The engine that it moves to has kept a part of it from an earlier turn.
    await Talk(site, "river").run(20, **{"X-Hydra-Force-Engine": "cpu-1"})
    talk = Talk(site, "river")
    running = asyncio.ensure_future(talk.run(**{"X-Hydra-Force-Engine": "cpu-0"}))
    with engines["cpu-0"].slowed(), engines["cpu-1"].slowed():
        session, home, away = await begun(talk, engines)
        typed = TypedTalk(site, "typed")
        typing = asyncio.ensure_future(typed.run(TYPED_COUNT, **{"X-Hydra-Force-Engine": "cpu-0"}))
        await typed.until(30)
        async with asyncio.timeout(PATIENCE_S):
            while (await in_db(_chat))[0] == session:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        (typed_move,) = (await lifecycle.migrate(None, (await in_db(_chat))[0], away)).moves
        assert (typed_move.state, typed_move.kind) == ("committed", "live"), typed_move.reason
        held = {holder.endpoint.name for holder in (await lifecycle.inspected(None, session)).holders}
        assert (home, held) == ("cpu-0", set(engines))
        assert not (await lifecycle.migrate(None, session, home)).moves
        view = await lifecycle.migrate(None, session, away)
        assert not running.done()
        engines[home].process.kill()
    await running
    await typing
    assert (typed.whole.status, typed.whole.usage.output_tokens) == ("incomplete", TYPED_COUNT)
    (move,) = view.moves
    assert (move.state, move.kind, move.source, move.target) == ("committed", "live", home, away), move.reason
    assert move.sent_bytes > 0
    assert move.pause_ms is not None
    assert [holder.endpoint.name for holder in view.holders] == [away]
    assert (talk.reasons, talk.usage.completion_tokens) == (["length"], COUNT)
    alone = await Talk(site, "another").run(**{"X-Hydra-Force-Engine": away})
    assert talk.text == alone.text
    typed_alone = TypedTalk(site, "alone")
    await typed_alone.run(TYPED_COUNT, **{"X-Hydra-Force-Engine": away})
    assert typed.text == typed_alone.whole.output_text
    assert talk.usage.prompt_tokens == alone.usage.prompt_tokens

    def rows() -> Any:
        turns = Turn.objects.order_by("started_at")[1:3]
        return [(turn.state, turn.engine.name, turn.completion_tokens) for turn in turns], SlotLease.objects.count()

    async with asyncio.timeout(PATIENCE_S):
        while await in_db(rows) != ([("done", away, COUNT), ("done", away, TYPED_COUNT)], 0):  # noqa: ASYNC110 -- another process tells nobody
            await asyncio.sleep(0.05)
    await asyncio.to_thread(engines[away].wait_idle)


@pytest.mark.soak
async def test_a_drain_says_what_would_move_and_then_moves_it(
    pool: tuple[dict[str, PacedEngine], Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "TAKE_UP_S", 0.0)
    engines, site = pool
    force = {"X-Hydra-Force-Engine": "cpu-0"}
    await Talk(site, "idle", "stone").run(20, **force)
    talk = Talk(site, "running")
    running = asyncio.ensure_future(talk.run(**force))
    said = StringIO()
    command = functools.partial(call_command, "drain", "cpu-0", stdout=said)
    with engines["cpu-0"].slowed():
        await begun(talk, engines)
        await in_db(command)
        assert said.getvalue().count("→ cpu-1  about") == 2
        await in_db(functools.partial(command, go=True))
    assert said.getvalue().count("→ cpu-1  moved: ") == 2
    assert [one.name for one in await in_db(serving_engines)] == ["cpu-1"]
    await running
    assert (talk.reasons, talk.usage.completion_tokens) == (["length"], COUNT)
    moves = await in_db(lambda: sorted(Handoff.objects.values_list("state", "kind", "target__name")))
    assert moves == [("committed", "idle", "cpu-1"), ("committed", "live", "cpu-1")]
    held = [holder.endpoint.name for view in await lifecycle.listed(None) for holder in view.holders]
    assert held == ["cpu-1", "cpu-1"]


@pytest.mark.parametrize("moves", [True, False])
async def test_an_engine_that_dies_while_it_moves_is_followed_if_the_other_one_goes_on(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path, moves: bool
) -> None:
    asked: list[str] = []

    def rows(*ports: int) -> str:
        variant = add_model(tiny_model("llama").path, tmp_path)
        for number, port in enumerate(ports):
            set_ready(add_engine(variant, name=f"cpu-{number}"), port)
        first, second = Engine.objects.order_by("name")
        chat = ChatSession.objects.create(key_hash="b" * 64, model_name="tiny", engine=first)
        return handoffs.name_of(handoffs.start(chat.pk, first.pk, second.pk, send=False))

    async def dying(request: web.Request) -> web.StreamResponse:
        told = [frame({"content": "Red"}), move_event("moving", names[0]), frame({"content": " and"})]
        return await streaming(*told, then=cut)(request)

    async def cut(response: web.StreamResponse) -> None:
        response._req.transport.abort()

    async def going(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        if not moves:
            return await refusing(404, "handoff_unknown")(request)
        return await streaming(frame({"content": " blue"}), ENDING)(request)

    call = CHAT.read(json.dumps({"messages": [{"role": "user", "content": "Colours?"}], "stream": True}).encode())
    async with loopback_engine(dying) as first, loopback_engine(going) as second:
        names = [await in_db(rows, first, second)]
        stream = await ask_engine(call, Identity(Owner(), "c" * 64), wishes=Wishes(engine_name="cpu-0"))
        chunks = [chunk async for chunk in stream]
        await stream.aclose()
        await wait_for_writes(10)
        await close_client_session()
    said = [chunk["choices"][0]["delta"].get("content") for chunk in chunks if "choices" in chunk]
    assert said == (["Red", " and", " blue", None] if moves else ["Red", " and"])
    assert ("error" in chunks[-1]) is not moves
    assert set(asked) == {f"/handoffs/{names[0]}/stream"}
    turn = await in_db(Turn.objects.select_related("engine").get)
    assert (turn.state, turn.engine.name) == (("done", "cpu-1") if moves else ("failed", "cpu-0"))


def test_a_move_is_written_down_once(tiny_model: Callable[..., SyntheticModel], tmp_path: Path) -> None:
    variant = add_model(tiny_model("llama").path, tmp_path)
    source, target = (add_engine(variant, name=name) for name in ("cpu-0", "cpu-1"))
    set_ready(source, 1)
    chat = ChatSession.objects.create(key_hash="a" * 64, model_name="tiny", engine=source)
    chat_id = chat.pk
    move = handoffs.start(chat_id, source.pk, target.pk, send=False)
    assert handoffs.view(move).to_dict()["cause"] == "asked"
    with pytest.raises(SessionBusy):
        handoffs.start(chat.pk, source.pk, target.pk, send=False)
    answer = HandoffAnswer("live", 10, 1000, 0, 1000, 0.1, 1.5, 2.0, None)
    assert not handoffs.commit(move, answer)
    Handoff.objects.filter(pk=move).update(state=HandoffState.RUNNING)
    assert handoffs.commit(move, answer)
    assert not handoffs.commit(move, answer)
    assert not handoffs.fail(move, "too late")
    chat.refresh_from_db()
    assert (chat.engine_id, chat.wanted_engine_id) == (target.pk, target.pk)
    assert handoffs.view(move).mb_per_s == pytest.approx(0.01)
    later = handoffs.start(chat.pk, target.pk, source.pk, send=False)
    assert later > move
    assert handoffs.stuck() == []
    Handoff.objects.filter(pk=later).update(created_at="2020-01-01T00:00:00Z")
    assert handoffs.stuck() == []
    assert (handoffs.view(later).state, handoffs.view(later).reason) == ("failed", "no task took it up")
    lost = handoffs.start(chat.pk, target.pk, source.pk, send=False)
    Handoff.objects.filter(pk=lost).update(state=HandoffState.RUNNING, started_at="2020-01-01T00:00:00Z")
    assert handoffs.stuck() == [lost]
    assert json.dumps(handoffs.view(lost).to_dict())
    # Moves expire as requests do, also in a conversation that goes on; those that go on do not.
    Handoff.objects.filter(pk=move).update(ended_at="2020-01-01T00:00:00Z")
    tasks.expire_sessions()
    assert set(Handoff.objects.values_list("pk", flat=True)) == {later, lost}
    chat.delete()
    with pytest.raises(SessionUnknown):
        handoffs.view(lost)
    with pytest.raises(SessionUnknown):
        handoffs.start(chat_id, target.pk, source.pk, send=False)


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("cause", [HandoffCause.DRAIN, HandoffCause.ASKED])
def test_what_a_drain_moved_nobody_wished_there(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path, cause: HandoffCause, is_open: bool
) -> None:
    """Also where its source took requests again meanwhile; and what a person moved is wished there, closed or not."""
    variant = add_model(tiny_model("llama").path, tmp_path)
    source, target = (add_engine(variant, name=name) for name in ("cpu-0", "cpu-1"))
    set_ready(source, 1)
    Engine.objects.filter(pk=source.pk).update(takes_new=is_open)
    chat = ChatSession.objects.create(key_hash="a" * 64, model_name="tiny", engine=source, wanted_engine=source)
    move = handoffs.start(chat.pk, source.pk, target.pk, send=False, cause=cause)
    Handoff.objects.update(state=HandoffState.RUNNING)
    assert handoffs.commit(move, HandoffAnswer("idle", 10, 1000, 0, 1000, 0.1, 1.5, 2.0, None))
    chat.refresh_from_db()
    assert (chat.engine_id, chat.wanted_engine_id) == (target.pk, None if cause == "drain" else target.pk)


def test_a_site_of_the_release_before_may_still_write_moves(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path
) -> None:
    engine = add_engine(add_model(tiny_model("llama").path, tmp_path))
    chat = ChatSession.objects.create(key_hash="a" * 64, model_name="tiny", engine=engine)
    new = {"id", "deadline_s", "cause", "hint"}
    values = {field.attname: field.value_from_object(Handoff(chat=chat)) for field in Handoff._meta.concrete_fields}
    known = {name: value for name, value in values.items() if name not in new}
    with connection.cursor() as cursor:
        marks = ", ".join(["%s"] * len(known))
        cursor.execute(f"INSERT INTO {Handoff._meta.db_table} ({', '.join(known)}) VALUES ({marks})", [*known.values()])
    assert Handoff.objects.values_list("deadline_s", "cause").get() == (60.0, "asked")


async def test_a_source_that_says_nothing_yet_is_moving_and_one_that_is_gone_is_lost(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handoffs, "ASK_TARGET_S", 0.2)
    gone = free_port()

    def rows(mute: int) -> list[int]:
        variant = add_model(tiny_model("llama").path, tmp_path)
        target = add_engine(variant, name="cpu-9")
        moves = []
        # A split whose prompt takes long, a move that should be over, and one whose source died.
        for number, (port, deadline_s) in enumerate([(mute, 600.0), (mute, 60.0), (gone, 600.0)]):
            source = add_engine(variant, name=f"cpu-{number}")
            Engine.objects.filter(pk=source.pk).update(rpc_port=port, rpc_secret=SECRET)
            set_ready(source, port)
            chat = ChatSession.objects.create(key_hash=str(number) * 64, model_name="tiny", engine=source)
            moves.append(handoffs.start(chat.pk, source.pk, target.pk, send=False, deadline_s=deadline_s))
        Engine.objects.filter(pk=target.pk).update(rpc_port=mute, rpc_secret=SECRET)
        set_ready(target, mute)
        began_at = Now() - timedelta(seconds=200)
        Handoff.objects.filter(pk__in=moves).update(state=HandoffState.RUNNING, started_at=began_at)
        return moves

    async with mute_peer() as mute:
        moves = await in_db(rows, mute)
        await handoffs.sweep()
    views = [await in_db(handoffs.view, move) for move in moves]
    assert [view.state for view in views] == ["running", "failed", "failed"]
    assert views[1].reason == "its source has not answered for long"
    assert views[2].reason.startswith("the source was lost: ")
