"""What requests are routed by stays known while somebody uses a model, and no longer."""

from __future__ import annotations

import asyncio

import pytest

from engines.errors import NoEngineReady
from sessions import pool_watch
from sessions.pool_watch import MOST_MODELS, PoolWatch


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PoolWatch, "kept", True)
    monkeypatch.setattr(pool_watch, "EVERY_S", 0.01)


async def test_a_model_is_looked_at_while_it_is_used(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str | None] = []
    again = asyncio.Event()

    async def look(model: str | None) -> None:
        looked.append(model)
        if model == "gone":
            raise NoEngineReady("No engine serves it.")
        if looked.count(None) >= 3:
            again.set()

    watch = PoolWatch(look)
    for model in (None, "gone"):
        watch.used(model)
    await asyncio.wait_for(again.wait(), 10)
    assert looked.count("gone") == 1, "what does not serve is left to the next request"
    monkeypatch.setattr(pool_watch, "USED_S", 0.0)
    watching = watch._watching
    assert watching is not None
    await asyncio.wait_for(asyncio.wait((watching,)), 10)
    watch.used("other")
    await watch.close()
    assert watch._watching is None


async def test_it_watches_a_bounded_number_of_models_and_only_in_a_site(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def look(_model: str | None) -> None:
        raise AssertionError("not yet")

    watch = PoolWatch(look)
    for number in range(3 * MOST_MODELS):
        watch.used(f"m{number}")
    assert list(watch._used) == [f"m{number}" for number in range(2 * MOST_MODELS, 3 * MOST_MODELS)]
    await watch.close()
    monkeypatch.setattr(PoolWatch, "kept", False)
    watch = PoolWatch(look)
    watch.used("m")
    assert watch._watching is None
