"""Whatever decides a token decides it with drafts as without: penalties, bias, masks, log probabilities, the whole vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from engines.runtime.sampler import SamplingParams, TokenLogprob
from tests.engines.runtime.test_constraint_engine import constrained
from tests.engines.runtime.test_core import GREEDY, finished, generation, prompt_of, running
from tests.synthetic_gguf import SyntheticModel

DRAFTS: dict[str, Any] = {"speculation": "mtp", "draft_tokens": 3}
DRAWN = SamplingParams(temperature=1.2, top_k=8, seed=5, min_p=0.0)
WAYS = {
    "penalties": replace(GREEDY, repeat_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.3),
    "dry": replace(DRAWN, dry_multiplier=2.0, dry_allowed_length=1),
    "xtc": replace(DRAWN, xtc_probability=0.5, xtc_threshold=0.02),
    "bias": replace(DRAWN, logit_bias=((65, 5.0), (66, 3.0), (70, -100.0))),
    "log probabilities": replace(DRAWN, top_logprobs=3),
    "whole vocabulary": replace(DRAWN, top_k=0, top_p=0.9),
}
Answer = tuple[list[int], str, tuple[TokenLogprob, ...]]


async def answers(model: SyntheticModel, sampling: str, settings: dict[str, Any]) -> tuple[dict[str, Answer], int]:
    """What is written each way, alone, and how many drafted tokens were right."""
    found, accepted = {}, 0
    async with running(model, **settings, sampling=sampling, slots=2, whole_vocabulary_slots=1) as core:
        for name, params in WAYS.items():
            work = generation(prompt_of(model, 40), 30, params=params, draft_min=3)
            core.submit(work)
            last = await finished(work)
            assert last.error is None, name
            found[name] = (work.tokens[40:], last.text, last.logprobs)
            accepted += work.accepted_tokens
        form = constrained(core, prompt_of(model, 40), 40, DRAWN, grammar='root ::= [a-e]+ "." [0-9]{4}')
        form.draft_min = 3
        core.submit(form)
        last = await finished(form)
        found["form"] = (form.tokens[40:], last.text, ())
    return found, accepted


@pytest.mark.parametrize("sampling", ["host", "backend"])
async def test_the_same_tokens_are_drawn(tiny_model: Callable[..., SyntheticModel], sampling: str) -> None:
    model = tiny_model("qwen35", tie_free=True, nextn=True, wrong_drafts=0.2)
    plain, _ = await answers(model, sampling, {})
    drafted, accepted = await answers(model, sampling, DRAFTS)
    assert accepted > 60
    for name, (tokens, text, logprobs) in plain.items():
        assert drafted[name][:2] == (tokens, text), name
        # Rows of another batch have other low bits.
        values = [(entry.token, pytest.approx(entry.logprob, abs=1e-2)) for entry in logprobs]
        assert [(entry.token, entry.logprob) for entry in drafted[name][2]] == values
