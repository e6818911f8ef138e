"""Requests that need whole rows of logits, on an engine that samples on its device: how many run at once, and beside whom."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from engines.config import EngineConfig
from engines.rates_view import EngineRates
from engines.runtime.core import EngineCore
from engines.runtime.generation import Generation
from engines.runtime.http_rates import rates_of
from engines.runtime.http_views import Views
from engines.runtime.operations import routes
from engines.runtime.prefix import PrefixCache
from engines.runtime.preparation import Preparation
from tests.engines.runtime.test_core import GREEDY, finished, generation, prompt_of, running
from tests.paced_engine import slow_steps
from tests.synthetic_gguf import SyntheticModel

LOOKING = replace(GREEDY, top_logprobs=1)
TOKENS = 20


def config(**values: Any) -> EngineConfig:
    return EngineConfig("m", "m", **{"gpu_layers": -1, **values})


@pytest.mark.parametrize(
    ("slots", "wanted", "count"), [(1, -1, 1), (4, -1, 1), (8, -1, 2), (8, 3, 3), (8, 64, 8), (8, 0, 0)]
)
def test_a_quarter_of_the_slots_or_as_many_as_are_wanted(slots: int, wanted: int, count: int) -> None:
    one = config(slots=slots, whole_vocabulary_slots=wanted)
    assert (one.whole_row_sequences, one.decoding_sequences) == (count, slots + count)
    assert replace(one, sampling="host").decoding_sequences == slots


def test_there_are_never_more_sequences_than_llama_cpp_has() -> None:
    assert config(slots=64, whole_vocabulary_slots=64, checkpoints=128).sequences == 256


def test_where_every_request_needs_whole_rows_nothing_is_sampled_on_the_device() -> None:
    assert config().samples_on_device
    assert not config(default_top_k=0).samples_on_device
    assert not config(default_top_k=200).samples_on_device
    assert config(default_top_k=200, device_candidates=256).samples_on_device
    assert config(default_top_k=0, default_temperature=0.0).samples_on_device
    assert config(default_top_k=0, sampling="backend").samples_on_device


async def steps_of(core: EngineCore, works: list[Generation]) -> float:
    """How many steps it took to answer all of them, each with the right text."""
    calls = core.metrics.decode_calls
    before = calls._value.get()
    core.submit(*works)
    for work in works:
        assert (await finished(work)).error is None
        assert len(work.tokens) - len(work.prompt) == TOKENS
    return float(calls._value.get() - before)


async def test_as_many_as_slots_run_at_once_and_no_more(tiny_model: Callable[..., SyntheticModel]) -> None:
    model = tiny_model("llama", tie_free=True)
    looking = [generation(prompt_of(model, 20 + i), TOKENS, params=LOOKING) for i in range(4)]
    async with running(model, sampling="backend", slots=4, whole_vocabulary_slots=4) as core:
        # One alone takes a step for each of its tokens.
        assert await steps_of(core, looking) < 2 * TOKENS
        mixed = [generation(prompt_of(model, 40 + i), TOKENS, params=LOOKING if i % 2 else GREEDY) for i in range(8)]
        assert 2 * TOKENS <= await steps_of(core, mixed) < 4 * TOKENS
        for work in (*looking, *mixed):
            assert work.tokens[len(work.prompt) :] == model.follow(10, TOKENS)
        rates = rates_of(core)
        assert (rates.slots, rates.free_slots) == (4, 4)
        assert (rates.whole_row_slots, rates.free_whole_row_slots) == (4, 4)


async def test_a_router_is_told_how_many_more_may_begin(tiny_model: Callable[..., SyntheticModel]) -> None:
    model = tiny_model("llama", tie_free=True)
    async with running(model, sampling="backend", slots=3, whole_vocabulary_slots=1, context_tokens=2048) as core:
        looking, plain = (generation(prompt_of(model, 30), 1900, params=params) for params in (LOOKING, GREEDY))

        def told_once_both_run(cache: PrefixCache) -> Generator[None, None, EngineRates]:
            # Between two steps of theirs.
            while len(cache.busy) < 2:
                yield
            return rates_of(core)

        telling = asyncio.ensure_future(core.perform(told_once_both_run))
        await asyncio.sleep(0)
        core.submit(looking, plain)
        rates = await telling
        assert (rates.slots, rates.free_slots) == (3, 1)
        assert (rates.whole_row_slots, rates.free_whole_row_slots) == (1, 0)
        core.cancel(looking)
        core.cancel(plain)


async def test_an_engine_is_full_when_as_many_run_as_it_has_slots(
    tiny_model: Callable[..., SyntheticModel],
) -> None:
    """The sequence for whole rows is idle then, and nobody may have it."""
    async with running(tiny_model("llama", tie_free=True), sampling="backend", slots=1, queue_limit=1) as core:
        preparation = Preparation(core.config, core)
        app = web.Application()
        app.add_routes(routes(Views(preparation).operations()))
        async with TestClient(TestServer(app)) as client:

            async def status() -> int:
                return (await client.get("/slots?fail_on_no_slot=1")).status

            assert (await (await client.get("/props")).json())["total_slots"] == 1
            assert "hydra_engine_slots 1.0" in await (await client.get("/metrics")).text()
            assert await status() == 200
            for params in (GREEDY, LOOKING):
                with slow_steps():
                    work = generation([1, 10], 200, params=params)
                    core.submit(work)
                    assert await work.mailbox.take(60)
                    assert await status() == 503
                    core.cancel(work)
                async with asyncio.timeout(60):
                    while await status() == 503:
                        pass
        preparation.close()
