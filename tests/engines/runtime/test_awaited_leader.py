"""Generations that wait for one that computes the beginning they share: looked at rarely, and never forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any

import pytest

from engines.errors import DecodeFailed
from engines.runtime.core import EngineCore
from engines.runtime.generation import Generation
from engines.runtime.prefix import PrefixCache
from tests.engines.runtime.test_core import finished, generation, prompt_of, running
from tests.synthetic_gguf import SyntheticModel

SYSTEM = 1000
SETTINGS: dict[str, Any] = {"slots": 8, "context_tokens": 1280, "cache_tokens": 8192, "queue_limit": 100}


def sharing(model: SyntheticModel, count: int) -> list[Generation]:
    system = prompt_of(model, SYSTEM)
    return [generation([*system, 20 + i, 30 + i, 10], 10, cuts=[SYSTEM]) for i in range(count)]


async def submit_and_meet(core: EngineCore, works: list[Generation], then: Callable[[PrefixCache, Any], None]) -> None:
    """Calls `then` with the slot of the first one to run, on the core's thread, while it computes and the others wait."""

    def work(cache: PrefixCache) -> Generator[None, None, None]:
        while not any(0 < len(slot.sequence) < SYSTEM for slot in cache.busy):
            yield
        (slot,) = cache.busy
        then(cache, slot)

    met = asyncio.ensure_future(core.perform(work))
    await asyncio.sleep(0)
    core.submit(*works)
    await met


async def all_right(model: SyntheticModel, works: list[Generation]) -> None:
    for work in works:
        assert (await finished(work)).error is None
        assert work.tokens[SYSTEM + 3 :] == model.follow(10, 10)


async def test_those_who_wait_are_looked_at_once_and_not_at_every_step(
    tiny_model: Callable[..., SyntheticModel],
) -> None:
    model = tiny_model("llama", tie_free=True)
    works = sharing(model, 40)
    async with running(model, **SETTINGS) as core:
        looks = 0
        best_source = core.cache.search.best_source

        def counted(*asked: Any) -> Any:
            nonlocal looks
            looks += 1
            return best_source(*asked)

        core.cache.search.best_source = counted  # type: ignore[method-assign]
        seen: list[int] = []
        await submit_and_meet(core, works, lambda _cache, _slot: seen.append(looks))
        # However far the leader had got.
        assert seen[0] <= 2 * len(works)
        await all_right(model, works)
        assert core.metrics.wait_steps.labels("prefix")._value.get() > 10 * len(works)
        assert sorted(work.cached_tokens for work in works)[1] >= SYSTEM


@pytest.mark.parametrize(
    ("architecture", "end"),
    [("llama", "cancelled"), ("llama", "failed"), ("llama", "preempted"), ("qwen35", "cancelled")],
)
async def test_when_their_leader_ends_another_one_computes_it_once(
    tiny_model: Callable[..., SyntheticModel], architecture: str, end: str
) -> None:
    model = tiny_model(architecture, tie_free=True)
    works = sharing(model, 8)
    led: list[Generation] = []

    async with running(model, **SETTINGS) as core:

        def ended(_cache: PrefixCache, slot: Any) -> None:
            led.append(slot.generation)
            if end == "cancelled":
                slot.generation.cancelled = True
            elif end == "failed":
                core._fail(slot, DecodeFailed("for a test"))
            else:
                core._admission._preempt(slot)

        await submit_and_meet(core, works, ended)
        (first,) = led
        others = [work for work in works if work is not first]
        await all_right(model, works if end == "preempted" else others)
        if end == "failed":
            assert isinstance((await finished(first)).error, DecodeFailed)
        # At most the part that was lost with the leader was computed twice.
        computed = core.metrics.prompt_tokens._value.get()
        assert computed <= 2 * SYSTEM + 3 * len(works)
        # One of them computed it, a hybrid's leader left a state at the fork; the rest took it from there.
        assert sum(work.cached_tokens >= SYSTEM for work in others) >= len(others) - 1
