"""Requests are queued in the order in which they came, however many threads prepare them and whatever their beginnings take."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

import pytest

from engines import arrival_order
from engines.api_schema import ChatRequest
from engines.runtime.core import EngineCore
from engines.runtime.generation import Generation
from engines.runtime.preparation import Preparation
from tests.engines.runtime.test_core import running
from tests.synthetic_gguf import SyntheticModel

ASKED = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1})


class SlowLookups:
    """Stands where the store's desk stands: what one conversation has is told late."""

    def __init__(self, slow: str) -> None:
        self._slow, self.gate, self.asked = slow, asyncio.Event(), list[str]()

    async def look_up(self, generations: Sequence[Generation], _stores: object) -> None:
        self.asked.append(generations[0].request_id)
        if generations[0].request_id == self._slow:
            await self.gate.wait()


def prepared(preparation: Preparation, name: str, gate: threading.Event | None = None) -> list[Generation]:
    if gate is not None:
        gate.wait(20)
    return preparation.generations(ASKED, [[1, 2, 3]], name, param="prompt")


async def ask(preparation: Preparation, name: str, gate: threading.Event | None = None) -> None:
    generations = await preparation.run_in_turn(prepared, preparation, name, gate)
    async with preparation.running(generations):
        await asyncio.sleep(0)


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    submit = EngineCore.submit

    def noted(core: EngineCore, *generations: Generation) -> None:
        seen.append(generations[0].request_id)
        submit(core, *generations)

    monkeypatch.setattr(EngineCore, "submit", noted)
    return seen


async def test_neither_preparing_nor_looking_up_lets_a_later_request_overtake(
    tiny_model: Callable[..., SyntheticModel], queued: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrival_order, "PATIENCE_S", 60.0)
    async with running(tiny_model("llama"), slots=2) as core:
        preparation, lookups, gate = Preparation(core.config, core), SlowLookups("a"), threading.Event()
        preparation.parking = lookups  # type: ignore[assignment]
        requests = [asyncio.ensure_future(ask(preparation, "a", gate))]
        requests += [asyncio.ensure_future(ask(preparation, name)) for name in "bc"]
        await asyncio.sleep(0.05)
        assert (lookups.asked, queued) == ([], [])
        gate.set()
        async with asyncio.timeout(20):
            while lookups.asked != ["a", "b", "c"]:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            assert queued == []
            lookups.gate.set()
            await asyncio.gather(*requests)
        assert queued == ["a", "b", "c"]
        preparation.close()


async def test_a_slow_one_is_overtaken_and_a_broken_one_holds_nobody_up(
    tiny_model: Callable[..., SyntheticModel], queued: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrival_order, "PATIENCE_S", 0.02)
    async with running(tiny_model("llama"), slots=2) as core:
        preparation, gate = Preparation(core.config, core), threading.Event()
        slow = asyncio.ensure_future(ask(preparation, "slow", gate))
        await asyncio.sleep(0)
        with pytest.raises(ZeroDivisionError):
            await preparation.run_in_turn(lambda: 1 // 0)
        async with asyncio.timeout(20):
            await ask(preparation, "quick")
            assert queued == ["quick"]
            gate.set()
            await slow
        assert queued == ["quick", "slow"]
        preparation.close()
