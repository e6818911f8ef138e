"""Who was routed first is sent first, unless its lease is too late."""

from __future__ import annotations

import asyncio

import pytest

from engines import arrival_order
from engines.arrival_order import ArrivalOrder


async def test_an_early_lease_waits_for_those_that_were_routed_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrival_order, "PATIENCE_S", 60.0)
    order, sent, leased = ArrivalOrder(), list[str](), {name: asyncio.Event() for name in "abc"}

    async def request(name: str, engine_id: int) -> None:
        with order.place(engine_id) as place:
            await leased[name].wait()
            await place.turn()
        sent.append(name)

    requests = [asyncio.create_task(request(name, engine_id)) for name, engine_id in (("a", 1), ("b", 1), ("c", 2))]
    await asyncio.sleep(0)
    leased["b"].set()
    leased["c"].set()
    await asyncio.sleep(0.01)
    assert sent == ["c"]
    leased["a"].set()
    await asyncio.gather(*requests)
    assert sent == ["c", "a", "b"]
    assert not order._coming


async def test_a_late_lease_and_one_that_fails_hold_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrival_order, "PATIENCE_S", 0.02)
    order, never = ArrivalOrder(), asyncio.Event()

    async def late() -> None:
        with order.place(1):
            await never.wait()

    waiting = asyncio.create_task(late())
    await asyncio.sleep(0)
    with pytest.raises(ConnectionError), order.place(1):
        raise ConnectionError
    with order.place(1) as place:
        async with asyncio.timeout(5):
            await place.turn()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert not order._coming
