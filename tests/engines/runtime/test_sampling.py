"""Drawing tokens: exact candidates, the same distribution on both paths, and the parameters that change it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from engines.runtime.candidates import NoLogits, all_possible, every_id, log_probabilities, top_candidates
from engines.runtime.sampler import SamplingParams
from tests.engines.runtime.test_core import GREEDY, finished, generation, prompt_of, run, running
from tests.synthetic_gguf import SyntheticModel

PATHS = ("host", "backend")
OPEN = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


@given(
    hnp.arrays(np.float32, st.integers(1, 700), elements=st.floats(-8, 8, width=16)),
    st.integers(1, 200),
)
def test_candidates_are_the_largest_in_order(logits: np.ndarray, count: int) -> None:
    ids, values = top_candidates(logits, count)
    expected = np.lexsort((np.arange(len(logits)), -logits))[:count]
    assert ids.tolist() == expected.tolist()
    assert values.tolist() == logits[expected].tolist()


def test_a_row_of_nan_gives_no_token() -> None:
    logits = np.zeros(500, dtype=np.float32)
    logits[77] = np.nan
    for count in (1, 40, 500):
        with pytest.raises(NoLogits):
            top_candidates(logits, count)


def test_what_is_banned_is_no_candidate_of_a_whole_row() -> None:
    logits = np.random.default_rng(1).normal(0, 5, 500).astype(np.float32)
    ids, values = all_possible(every_id(500), logits)
    assert ids.tolist() == list(range(500))
    assert values is logits
    logits[[3, 499]] = -np.inf
    ids, values = all_possible(every_id(500), logits)
    assert ids.tolist() == [n for n in range(500) if n not in (3, 499)]
    assert values.tolist() == logits[ids].tolist()
    ids, values = all_possible(every_id(500), np.full(500, -np.inf, dtype=np.float32))
    assert not ids.size
    assert not values.size
    logits[77] = np.nan
    with pytest.raises(NoLogits):
        all_possible(every_id(500), logits)


def test_log_probabilities_sum_to_one() -> None:
    logits = np.random.default_rng(1).normal(0, 5, 5000).astype(np.float32)
    assert np.exp(log_probabilities(logits).astype(np.float64)).sum() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("path", PATHS)
async def test_greedy_is_the_same_on_both_paths(tiny_model: Callable[..., SyntheticModel], path: str) -> None:
    for architecture in ("llama", "qwen35"):
        model = tiny_model(architecture, tie_free=True)
        async with running(model, sampling=path, slots=3) as core:
            works = [generation(prompt_of(model, 20 + i), 40) for i in range(5)]
            core.submit(*works)
            for work in works:
                assert (await finished(work)).error is None
                assert work.tokens[len(work.prompt) :] == model.follow(10, 40)


async def first_tokens(model: SyntheticModel, path: str, params: SamplingParams, count: int) -> Counter[int]:
    """How often each token came first in `count` draws from one and the same row, with seeds 0 to count - 1."""
    drawn: Counter[int] = Counter()
    async with running(model, sampling=path, slots=8, whole_vocabulary_slots=8, queue_limit=count) as core:
        works = [generation(prompt_of(model, 20), 1, params=replace(params, seed=seed)) for seed in range(count)]
        core.submit(*works)
        for work in works:
            assert (await finished(work)).error is None
            drawn[work.tokens[-1]] += 1
    return drawn


async def probabilities(model: SyntheticModel) -> dict[int, float]:
    async with running(model) as core:
        work = generation(prompt_of(model, 20), 1, params=SamplingParams(temperature=0, top_logprobs=20))
        core.submit(work)
        (entry,) = (await finished(work)).logprobs
    return {token: float(np.exp(value)) for token, value in entry.top}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "params",
    [
        replace(OPEN, top_k=8),
        replace(OPEN, top_k=20, top_p=0.8),
        replace(OPEN, top_k=20, min_p=0.5),
        replace(OPEN, top_k=8, temperature=0.5),
        replace(OPEN, min_p=0.5),
    ],
    ids=["top_k", "top_p", "min_p", "temperature", "min_p of the whole vocabulary"],
)
async def test_the_distribution_is_the_models_cut_as_asked(
    tiny_model: Callable[..., SyntheticModel], path: str, params: SamplingParams
) -> None:
    model = tiny_model("llama")
    model_probabilities = await probabilities(model)
    expected = _cut(model_probabilities, params)
    count = 400
    drawn = await first_tokens(model, path, params, count)
    assert set(drawn) <= set(expected)
    # Chi squared over all kept tokens; the seeds are fixed, so this either always holds or never.
    statistic = sum((drawn[t] - count * p) ** 2 / (count * p) for t, p in expected.items())
    assert statistic < 3 * len(expected) + 10, (drawn, expected)


def _cut(probabilities: dict[int, float], params: SamplingParams) -> dict[int, float]:
    """What top_k, top_p, min_p and temperature leave of the likeliest tokens, by their definitions."""
    kept = sorted(probabilities.items(), key=lambda item: -item[1])[: params.top_k or None]
    total = sum(p for _, p in kept)
    if params.top_p < 1:
        reached, enough = 0.0, []
        for token, p in kept:
            enough.append((token, p))
            reached += p / total
            if reached >= params.top_p:
                break
        kept = enough
    kept = [(token, p) for token, p in kept if p >= params.min_p * kept[0][1]]
    weights = [(token, p ** (1 / params.temperature)) for token, p in kept]
    total = sum(weight for _, weight in weights)
    return {token: weight / total for token, weight in weights}


@pytest.mark.parametrize("path", PATHS)
async def test_a_seed_repeats_also_without_top_k(tiny_model: Callable[..., SyntheticModel], path: str) -> None:
    model = tiny_model("llama")
    async with running(model, slots=1, sampling=path) as core:

        async def drawn(params: SamplingParams) -> list[int]:
            return (await run(core, prompt_of(model, 20), params=params, reuse_prefix=False)).tokens

        for params in (replace(OPEN, seed=7), replace(OPEN, seed=7, top_k=40, xtc_probability=0.5, xtc_threshold=0.01)):
            assert await drawn(params) == await drawn(params)
            assert await drawn(params) != await drawn(replace(params, seed=8))


@pytest.mark.parametrize("path", PATHS)
async def test_bias_and_penalties_change_what_is_drawn(tiny_model: Callable[..., SyntheticModel], path: str) -> None:
    model = tiny_model("llama", tie_free=True)
    (natural,) = model.follow(10, 1)
    prompt = prompt_of(model, 20)
    async with running(model, slots=1, sampling=path) as core:

        async def drawn(count: int, tokens: list[int] = prompt, **params: Any) -> list[int]:
            work = await run(core, tokens, count, params=replace(GREEDY, **params))
            return work.tokens[len(tokens) :]

        assert await drawn(1, logit_bias=((natural, -100.0),)) != [natural]
        assert await drawn(5, logit_bias=((65, 100.0),)) == [65] * 5
        repeating = [*prompt, natural, 10]
        strong = {"repeat_penalty": 10.0, "presence_penalty": 2.0, "frequency_penalty": 2.0}
        assert await drawn(1, repeating, **strong) != [natural]
        assert await drawn(1, repeating, repeat_penalty=0.01) == [natural]


async def test_dry_breaks_a_loop(tiny_model: Callable[..., SyntheticModel]) -> None:
    model = tiny_model("llama", tie_free=True)
    loop = [*range(40, 60), 10] * 3 + list(range(40, 50))
    async with running(model, slots=1) as core:
        following = model.follow(loop[-1], 1)[0]
        dry = replace(GREEDY, dry_multiplier=50.0, dry_allowed_length=1, dry_sequence_breakers=("\x01",))
        # The loop's own next token is made the natural one, then DRY must refuse it.
        tokens = [*loop, following] * 3 + loop
        assert (await run(core, tokens, 1)).tokens[-1] == following
        assert (await run(core, tokens, 1, params=dry)).tokens[-1] != following


@pytest.mark.parametrize("path", PATHS)
async def test_log_probabilities_are_served_beside_a_device_chain(
    tiny_model: Callable[..., SyntheticModel], path: str
) -> None:
    model = tiny_model("llama", tie_free=True)
    async with running(model, sampling=path, slots=2, whole_vocabulary_slots=1) as core:
        plain = generation(prompt_of(model, 30), 30)
        looking = generation(prompt_of(model, 31), 30, params=replace(GREEDY, top_logprobs=3))
        core.submit(plain, looking)
        entries = (await finished(looking)).logprobs
        assert [entry.token for entry in entries] == model.follow(10, 30)
        assert all(entry.logprob == entry.top[0][1] <= 0 for entry in entries)
        assert (await finished(plain)).error is None
        assert plain.tokens[30:] == model.follow(10, 30)


async def test_a_prefix_crosses_to_a_sequence_without_a_device_chain(
    tiny_model: Callable[..., SyntheticModel],
) -> None:
    model = tiny_model("llama", tie_free=True)
    async with running(model, sampling="backend", slots=1) as core:
        first = await run(core, prompt_of(model, 150))
        looking = await run(core, [*first.tokens, 10], 5, params=replace(GREEDY, top_logprobs=1))
        assert looking.cached_tokens == 169
        assert looking.tokens[171:] == model.follow(10, 5)
