"""A state that moved is the same to the last bit: so is every logit behind it, and what a seed and a form draw from them.

Plain random weights, prompts cut alike and alone in their engine. Cells of others between a prompt's own, or pieces of another
size, change the order of sums and with it low bits, also without a move: no fault, and nothing that these tests look at.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engines.api_constraint import constraint_spec
from engines.api_schema import parse_chat_request
from engines.runtime.constraint import ConstraintCompiler
from engines.runtime.core import EngineCore
from engines.runtime.generation import Generation
from engines.runtime.sampler import SamplingParams
from engines.runtime.state_adopt import adopting
from engines.runtime.state_follow import Leaving
from engines.runtime.state_snapshot import Manifest
from engines.runtime.state_together import commit_together
from tests.engines.runtime.test_core import finished, generation, prompt_of
from tests.engines.runtime.test_state_desk import desk_of
from tests.engines.runtime.test_state_follow import FENCE, followed, gone_on, rest_of, stopped
from tests.synthetic_gguf import SyntheticModel

PROMPT_TOKENS, COUNT = 400, 200
SETTINGS: dict[str, Any] = {
    "slots": 1,
    "context_tokens": 1024,
    "batch_tokens": 128,
    "micro_batch_tokens": 128,
    "checkpoints": 0,
}
SLOWER = SETTINGS | {"batch_tokens": 32, "micro_batch_tokens": 32}
SAMPLED = SamplingParams(temperature=1.1, top_k=40, top_p=0.9, seed=11, repeat_penalty=1.2, repeat_last_n=48)
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "minLength": 400}}, "required": ["a"]}


def logits_of(core: EngineCore) -> list[NDArray[np.float32]]:
    """A copy of each row that the engine reads from now on."""
    rows: list[NDArray[np.float32]] = []
    read = core.loaded.logits

    def copied(row: int) -> NDArray[np.float32]:
        values = read(row)
        rows.append(values.copy())
        return values

    core.loaded.logits = copied  # type: ignore[method-assign]
    return rows


def work_of(core: EngineCore, model: SyntheticModel, params: SamplingParams, form: dict[str, Any]) -> Generation:
    bias = tuple((token, float("-inf")) for token in core.loaded.vocabulary.end_tokens) if not form else ()
    fields = {"params": replace(params, logit_bias=bias), "reuse_prefix": False, "session": "s", "tenant": "ab"}
    work = generation(prompt_of(model, PROMPT_TOKENS), COUNT, **fields)
    if form:
        request = parse_chat_request(json.dumps({"messages": [{"role": "user", "content": "a"}], **form}).encode())
        spec = constraint_spec(request)
        assert spec is not None
        work.constraint = ConstraintCompiler(core.loaded.vocabulary).compile(spec)
    return work


@pytest.mark.parametrize(
    ("architecture", "params", "form"),
    [
        ("qwen35", SamplingParams(temperature=0), {}),
        (
            "qwen35",
            SAMPLED,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
        ),
        (
            "llama",
            SAMPLED,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
        ),
        ("qwen35moe", SAMPLED, {}),
    ],
)
async def test_a_prompt_computed_here_is_answered_there_to_the_bit(
    tiny_model: Callable[..., SyntheticModel], architecture: str, params: SamplingParams, form: dict[str, Any]
) -> None:
    """Its blocks leave while it is computed, it moves at its first tokens, and the other engine takes smaller pieces."""
    model = tiny_model(architecture)
    async with desk_of(model, **SETTINGS) as (home, desk), desk_of(model, **SLOWER) as (away, other):
        here, there = logits_of(home), logits_of(away)
        alone = work_of(home, model, params, form)
        home.submit(alone)
        assert (await finished(alone)).error is None
        expected = here[:]
        here.clear()
        work, terms, theirs = work_of(home, model, params, form), await desk.terms(), await other.terms()
        home.submit(work)
        async with Leaving(home, terms, work, FENCE) as leaving, await adopting(theirs, away, 0, 800) as arriving:
            while not work.new_tokens:
                await followed(leaving, arriving, work)
            manifest = await stopped(leaving)
            manifest = Manifest.from_json(manifest.to_json(), manifest.before)
            await rest_of(leaving, arriving, manifest)
            moved = await gone_on(arriving, manifest, away)
            await commit_together([leaving], FENCE)
        assert (await finished(moved)).error is None
        assert moved.tokens == alone.tokens
        assert len(here) < COUNT / 2
        assert len(here) + len(there) == len(expected) == alone.new_tokens
        assert all(np.array_equal(*rows) for rows in zip([*here, *there], expected, strict=True))
