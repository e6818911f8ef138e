"""An engine that dies where another one has a shorter context: the answer is not cut there, unless there is nobody else."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from engines.client import close_client_session
from engines.models import Engine
from pools.db import in_db
from sessions import failover
from sessions.dialects import CHAT
from sessions.dispatch import Wishes
from sessions.models import Turn
from sessions.relay import EngineAnswer, ask_engine
from sessions.turn import wait_for_writes
from tests.paced_engine import PacedEngine
from tests.rows import add_engine, add_model, set_ready
from tests.sessions.loopback_engine import Handler, frame, loopback_engine, refusing, streaming
from tests.sessions.stream_readers import Reader, me, until
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db(transaction=True)
PATIENCE_S = 60.0
LONG, SHORT, ASKED = 1024, 128, 200
# All of it would take ten seconds.
STEP_S = 0.05
END = b'data: [DONE]\n\nevent: hydra.mark\ndata: [[0,0,[],{"closed": true}]]\n\n'
CONTEXTS = {"first": LONG, "short": SHORT, "second": LONG}


@dataclass
class ReaderAt(Reader):
    """A client whose stream begins at a certain engine."""

    engine: str = ""
    ended: list[EngineAnswer] = field(default_factory=list)

    async def run(self) -> Reader:
        self.answer = await ask_engine(self.call(), me(self.number), wishes=Wishes(engine_name=self.engine))
        async for frames in self.answer.raw():
            self.text += b"".join(one + b"\n\n" for one in frames.split(b"\n\n") if one and one[:1] != b":")
            if self.text.count(b"\n\n") > 10:
                self.begun.set()
        await self.answer.aclose()
        return self

    @property
    def words(self) -> list[str]:
        return [choice["delta"].get("content", "") for chunk in self.said for choice in chunk["choices"]]


async def broken_off(reader: ReaderAt, engine: PacedEngine) -> asyncio.Task[Reader]:
    """The reader's task, once its engine has died in the middle of the answer."""
    with engine.slowed():
        running = asyncio.create_task(reader.run())
        await reader.begun.wait()
        engine.process.send_signal(signal.SIGKILL)
    return running


@pytest.mark.parametrize("bounded", [True, False])
async def test_who_would_cut_an_answer_is_asked_again_once_nobody_else_came(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bounded: bool
) -> None:
    """Of those that would, the one with the longest context; who does not even hold the prompt is not asked again."""
    # A request that says how long it may get is waited for longer.
    monkeypatch.setattr(failover, "BOUNDED_PATIENCE_S" if bounded else "UNBOUNDED_PATIENCE_S", 0.1)
    monkeypatch.setattr(failover, "UNBOUNDED_PATIENCE_S" if bounded else "BOUNDED_PATIENCE_S", PATIENCE_S)
    asked: list[tuple[str, str]] = []

    async def dying(request: web.Request) -> web.StreamResponse:
        if request.path == "/continue":
            return await refusing(503, "engine_stopping")(request)
        told = b'event: hydra.begun\ndata: {"seed": 1}\n\n' + frame({"content": "Red"})
        return await streaming(told + b"event: hydra.mark\ndata: [1]\n\n", then=abort)(request)

    async def abort(response: Any) -> None:
        response._req.transport.abort()

    def short(name: str, code: str) -> Handler:
        async def answer(request: web.Request) -> web.StreamResponse:
            may_cut = request.headers.get(failover.MAY_CUT_HEADER, "")
            asked.append((name, may_cut))
            if may_cut:
                return await streaming(frame({"content": " and"}, finish_reason="length") + END)(request)
            return await refusing(400 if code == "context_length_exceeded" else 422, code)(request)

        return answer

    async with (
        loopback_engine(dying) as lost,
        loopback_engine(short("shorter", "context_too_short")) as shorter,
        loopback_engine(short("short", "context_too_short")) as longer,
        loopback_engine(short("shortest", "context_length_exceeded")) as shortest,
    ):

        def write() -> None:
            variant = add_model(tiny_model("llama").path, tmp_path)
            contexts = {"lost": 2048, "shorter": 256, "short": 512, "shortest": 128}
            ports = (lost, shorter, longer, shortest)
            for (name, context), port in zip(contexts.items(), ports, strict=True):
                row = add_engine(variant, name=name)
                Engine.objects.filter(pk=row.pk).update(context_tokens=context)
                set_ready(row, port)

        await in_db(write)
        body = {"messages": [{"role": "user", "content": "Colours?"}], "stream": True}
        call = CHAT.read(json.dumps(body | ({"max_tokens": 900} if bounded else {})).encode())
        async with asyncio.timeout(PATIENCE_S):
            stream = await ask_engine(call, me(1), wishes=Wishes(engine_name="lost"))
            chunks = [chunk async for chunk in stream]
        await stream.aclose()
        await wait_for_writes(10)
        await close_client_session()
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks] == ["Red", " and"]
    assert sorted(asked[:3]) == [("short", ""), ("shorter", ""), ("shortest", "")]
    assert asked[3:] == [("short", "1")]


@pytest.mark.soak
async def test_an_answer_is_cut_only_where_there_is_nobody_else(
    tiny_model: Callable[..., SyntheticModel],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = tiny_model("llama", tie_free=True, layers=6)
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(PacedEngine(tmp_path, model.path, step_s=STEP_S, slots=2, context_tokens=context))
            for name, context in CONTEXTS.items()
        }

        def serves(name: str) -> None:
            set_ready(Engine.objects.get(name=name), engines[name].config.port, engines[name].process.pid)

        def write() -> None:
            variant = add_model(model.path, tmp_path)
            for name, context in CONTEXTS.items():
                row = add_engine(variant, name=name)
                Engine.objects.filter(pk=row.pk).update(context_tokens=context)
            serves("first")
            serves("short")

        await in_db(write)
        caplog.set_level(logging.INFO)
        async with asyncio.timeout(PATIENCE_S):
            alone = ReaderAt(0, ASKED, engine="first")
            await alone.run()
            # The only other engine would cut it, and so one is waited for that does not.
            waiting = ReaderAt(0, ASKED, engine="first")
            running = await broken_off(waiting, engines["first"])
            await until(lambda: any("context holds" in record.getMessage() for record in caplog.records))
            assert not running.done()
            await in_db(serves, "second")
            await running
            assert waiting.said == alone.said
            # Now there will be none.
            monkeypatch.setattr(failover, "BOUNDED_PATIENCE_S", 0.1)
            cut = ReaderAt(0, ASKED, engine="second")
            await (await broken_off(cut, engines["second"]))
        usage = cut.said[-1]["usage"]
        assert (cut.said[-2]["choices"][0]["finish_reason"], usage["total_tokens"]) == ("length", SHORT)
        assert cut.words[: usage["completion_tokens"]] == alone.words[: usage["completion_tokens"]]
        assert any("may end early" in record.getMessage() for record in caplog.records)
        await wait_for_writes(10)
        events = [json.loads(one.getMessage()) for one in caplog.records if "request_timeline" in one.getMessage()]
        told: list[dict[str, Any]] = [event for event in events if "failed_over_s" in event]
        assert [("shorter_context_s" in event, event["engine"]) for event in told] == [
            (False, "second"),
            (True, "short"),
        ]
        assert await in_db(lambda: set(Turn.objects.values_list("state", flat=True))) == {"done"}
        await close_client_session()
