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

from engines.client import close_client_session
from engines.models import Engine
from pools.db import in_db
from sessions import failover
from sessions.dispatch import Wishes
from sessions.models import Turn
from sessions.relay import EngineAnswer, ask_engine
from sessions.turn import wait_for_writes
from tests.paced_engine import PacedEngine
from tests.rows import add_engine, add_model, set_ready
from tests.sessions.stream_readers import Reader, me, until
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db(transaction=True)
PATIENCE_S = 60.0
LONG, SHORT, ASKED = 1024, 128, 200
# All of it would take ten seconds.
STEP_S = 0.05
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
