"""A source that is about to stop waits until whoever continues its stream is ready at the target, if somebody does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from engines.errors import HandoffUnknown
from engines.runtime import handoff_entry
from engines.runtime.handoff_in import ArrivingHandoffs
from engines.runtime.preparation import Preparation
from engines.wire_handoff import FORM, AdoptBody, AskBody
from tests.engines.runtime.test_core import generation, prompt_of
from tests.engines.runtime.test_state_desk import desk_of
from tests.synthetic_gguf import SyntheticModel

ASK, DROP = AskBody("h1", 1, reader=True), AskBody("h1", 1, drop=True)


@asynccontextmanager
async def arriving(model: SyntheticModel) -> AsyncIterator[ArrivingHandoffs]:
    """A running request's move has begun here."""
    async with desk_of(model, slots=2, context_tokens=1024) as (core, desk):
        arriving = ArrivingHandoffs(Preparation(core.config, core), desk)
        fingerprint = (await desk.terms()).fingerprint
        await arriving.begin(
            AdoptBody("h1", 1, "s", "", fingerprint, 100, False, False, "r", form=FORM), asyncio.Event()
        )
        yield arriving
        await arriving.ask(DROP)


async def test_a_reader_that_has_asked_is_waited_for_until_it_waits_itself(
    tiny_model: Callable[..., SyntheticModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handoff_entry, "ASKED_S", 60.0)
    monkeypatch.setattr(handoff_entry, "READY_S", 60.0)
    model = tiny_model("llama")
    async with arriving(model) as there:
        asking = asyncio.create_task(there.ask(ASK))
        await asyncio.sleep(0.05)
        entry = there.expected("h1", "r")
        await asyncio.sleep(0.05)
        assert not asking.done()

        async def read() -> None:
            async with entry.reading([generation(prompt_of(model, 10))]):
                pytest.fail("it never came")

        reading = asyncio.create_task(read())
        async with asyncio.timeout(60):
            assert (await asking).state == "open"
            # Once more it need not wait.
            assert (await there.ask(ASK)).state == "open"
            assert (await there.ask(DROP)).state == "over"
            with pytest.raises(HandoffUnknown):
                await reading


@pytest.mark.parametrize("asks", [False, True])
async def test_a_reader_that_does_not_come_is_not_waited_for_long(
    tiny_model: Callable[..., SyntheticModel], monkeypatch: pytest.MonkeyPatch, *, asks: bool
) -> None:
    monkeypatch.setattr(handoff_entry, "READY_S" if asks else "ASKED_S", 0.01)
    async with arriving(tiny_model("llama")) as there:
        if asks:
            there.expected("h1", "r")
        async with asyncio.timeout(60):
            assert (await there.ask(ASK)).state == "open"


async def test_a_move_that_is_dropped_while_its_reader_is_awaited_is_over(
    tiny_model: Callable[..., SyntheticModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handoff_entry, "ASKED_S", 60.0)
    async with arriving(tiny_model("llama")) as there:
        asking = asyncio.create_task(there.ask(ASK))
        await asyncio.sleep(0.05)
        assert (await there.ask(DROP)).state == "over"
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert (await there.ask(AskBody("h1", 1))).state == "over"
