"""A stop of a long conversation tells no more, and copies no more, than that of a short one."""

from __future__ import annotations

import tracemalloc
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any, TypeVar

import pytest

from engines.runtime.sampler import SamplingParams
from engines.runtime.state_adopt import adopting
from engines.runtime.state_follow import Leaving
from tests.engines.runtime.test_core import generation, prompt_of
from tests.engines.runtime.test_state_desk import desk_of
from tests.engines.runtime.test_state_follow import COUNT, FENCE, begun, followed, idle, stopped
from tests.paced_engine import slow_steps
from tests.synthetic_gguf import SyntheticModel

SHORT, LONG = 300, 6_300
ID_BYTES = 8  # of a token in a list
SETTINGS: dict[str, Any] = {"slots": 1, "context_tokens": LONG + COUNT, "batch_tokens": 512, "micro_batch_tokens": 512}

T = TypeVar("T")


@pytest.mark.parametrize("architecture", ["llama", "qwen35"])
async def test_what_a_stop_tells_and_allocates_does_not_grow_with_the_conversation(
    tiny_model: Callable[..., SyntheticModel], slow: ExitStack, architecture: str
) -> None:
    model = tiny_model(architecture)
    told: dict[int, tuple[int, int]] = {}
    allocated: dict[int, tuple[int, int]] = {}
    async with desk_of(model, **SETTINGS) as (home, desk), desk_of(model, **SETTINGS) as (away, other):
        terms, theirs = await desk.terms(), await other.terms()
        # The first one of a process makes what is kept.
        for length in (SHORT, SHORT, LONG):
            bias = tuple((token, float("-inf")) for token in home.loaded.vocabulary.end_tokens)
            params = SamplingParams(temperature=0, logit_bias=bias)
            work = generation(prompt_of(model, length), COUNT, params=params, reuse_prefix=False)
            slow.enter_context(slow_steps())
            await begun(home, work, length + 5)
            async with (
                Leaving(home, terms, work, FENCE) as leaving,
                await adopting(theirs, away, 0, length + COUNT) as arriving,
            ):
                await followed(leaving, arriving, work)
                manifest, stop_bytes = await peak_of(stopped(leaving))
                _, read_bytes = await peak_of(arriving.complete(manifest))
                assert arriving.tokens == work.tokens[:-1]
            home.cancel(work)
            slow.close()
            await idle(home)
            told[length] = len(manifest.pieces), len(manifest.to_json())
            allocated[length] = stop_bytes, read_bytes
    assert told[LONG][0] == told[SHORT][0]
    # Figures have more digits or fewer.
    assert abs(told[LONG][1] - told[SHORT][1]) < 200
    # Far less than one list of the tokens that the target has.
    for long, short in zip(allocated[LONG], allocated[SHORT], strict=True):
        assert long - short < ID_BYTES * (LONG - SHORT) // 4


async def peak_of(work: Awaitable[T]) -> tuple[T, int]:
    """What it returns, and how many bytes the interpreter had allocated for it at most."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        result = await work
        return result, tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
