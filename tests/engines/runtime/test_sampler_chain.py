"""A request's own samplers beside a reference that only numpy made, and what llama.cpp's would get wrong alone."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engines.api_schema import parse_chat_request
from engines.config import EngineConfig
from engines.runtime import sampler_chain
from engines.runtime.candidates import top_candidates
from engines.runtime.llama import Llama
from engines.runtime.sampler import Sampler, SamplingParams
from tests.synthetic_gguf import SyntheticModel

DEVICE_CANDIDATES, DRAWS, CASES = 128, 150, 60
ANY = 0xFFFF_FFFF
PLAIN = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
Row = NDArray[np.float32]


@pytest.fixture(scope="module")
def llama(tiny_model: Callable[..., SyntheticModel]) -> Iterator[Llama]:
    loaded = Llama(EngineConfig(str(tiny_model("llama").path), "tiny", slots=1, context_tokens=256), 1, lambda _: None)
    yield loaded
    loaded.close()


def expected(row: Row, params: SamplingParams, seen: Sequence[int]) -> NDArray[np.float64]:
    """The probability of each token by the samplers' definitions, in llama.cpp's default order."""
    logits = row.astype(np.float64)
    for token, value in params.logit_bias:
        logits[token] += value
    for token, count in Counter(seen[-params.repeat_last_n :]).items() if params.penalises else ():
        logits[token] *= params.repeat_penalty if logits[token] <= 0 else 1 / params.repeat_penalty
        logits[token] -= count * params.frequency_penalty + params.presence_penalty
    if params.has_dry:
        for token, length in repeated(seen[-params.dry_penalty_last_n :]).items():
            if length >= params.dry_allowed_length:
                logits[token] -= params.dry_multiplier * params.dry_base ** (length - params.dry_allowed_length)
    kept = np.argsort(-logits, kind="stable")[: params.top_k or None]
    if params.typical_p < 1:
        likely = softmax(logits[kept])
        surprise = -np.log(np.maximum(likely, 1e-300))
        order = np.argsort(np.abs(surprise - (likely * surprise).sum()), kind="stable")
        count = np.searchsorted(np.cumsum(likely[order]), params.typical_p, side="right") + 1
        kept = kept[np.sort(order[:count])]
    if params.top_p < 1:
        kept = kept[: np.searchsorted(np.cumsum(softmax(logits[kept])), params.top_p) + 1]
    if params.min_p > 0:
        kept = kept[logits[kept] >= logits[kept[0]] + math.log(params.min_p)]
    result = np.zeros(row.shape[0])
    above = int((softmax(logits[kept]) >= params.xtc_threshold).sum())
    cut = kept[above - 1 :] if above > 1 and params.xtc_threshold <= 0.5 else kept
    for weight, ids in ((1 - params.xtc_probability, kept), (params.xtc_probability, cut)):
        result[ids] += weight * softmax(logits[ids] / params.temperature)
    return result


def softmax(values: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(values - values.max())
    result: NDArray[np.float64] = weights / weights.sum()
    return result


def repeated(seen: Sequence[int]) -> dict[int, int]:
    """For each token, how long a run at the end it has followed before."""
    lengths: dict[int, int] = {}
    for end in range(len(seen) - 1):
        run = 0
        while run <= end and seen[end - run] == seen[len(seen) - 1 - run]:
            run += 1
        lengths[seen[end + 1]] = max(lengths.get(seen[end + 1], 0), run)
    return lengths


def some_params(rng: np.random.Generator) -> SamplingParams:
    def one_of(*values: float) -> Any:
        return values[int(rng.integers(len(values)))]

    chosen: dict[str, Any] = {
        "temperature": one_of(0.3, 0.8, 1.7),
        "top_k": one_of(0, 5, 20, 40),
        "top_p": one_of(1.0, 0.9, 0.5),
        "min_p": one_of(0.0, 0.05, 0.3),
        "typical_p": one_of(1.0, 1.0, 0.7, 0.95),
    }
    if rng.random() < 0.5:
        chosen |= {"repeat_penalty": one_of(1.0, 1.3, 0.8), "repeat_last_n": one_of(0, 8, 64, 4096)}
        chosen |= {"presence_penalty": one_of(0.0, 1.5, -1.0), "frequency_penalty": one_of(0.0, 0.7)}
    if rng.random() < 0.4:
        chosen |= {"dry_multiplier": one_of(0.8, 5.0, 1000.0), "dry_base": one_of(1.0, 1.75, 3.0)}
        chosen |= {"dry_allowed_length": one_of(1, 2, 4), "dry_penalty_last_n": one_of(16, 200)}
        chosen["dry_sequence_breakers"] = ()
    if rng.random() < 0.3:
        chosen |= {"xtc_probability": one_of(0.5, 1.0), "xtc_threshold": one_of(0.05, 0.1, 0.3)}
    if rng.random() < 0.4:
        tokens = sorted(rng.choice(512, 6, replace=False).tolist())
        chosen["logit_bias"] = tuple((token, float(rng.uniform(-100, 4))) for token in tokens)
    return SamplingParams(**chosen)


def drawn(llama: Llama, params: SamplingParams, row: Row, seen: list[int], *, on_device: bool) -> Counter[int]:
    found: Counter[int] = Counter()
    ids, values = top_candidates(row, DEVICE_CANDIDATES)
    order = np.random.default_rng(1).permutation(DEVICE_CANDIDATES)
    for number in range(DRAWS):
        sampler = Sampler(replace(params, seed=7 * number + 1), llama)
        sampler.see_prompt(seen)
        if on_device:
            found[sampler.draw_from_candidates(ids[order], values[order])] += 1
        else:
            found[sampler.draw_from_logits(row.copy())[0]] += 1
        sampler.close()
    return found


def test_every_parameter_does_what_its_definition_says(llama: Llama) -> None:
    """Seeds are fixed, so this either always holds or never."""
    rng = np.random.default_rng(3)
    on_devices = 0
    for _ in range(CASES):
        params = some_params(rng)
        row = rng.normal(0, rng.choice([1.0, 3.0, 8.0]), 512).astype(np.float32)
        seen = rng.integers(0, 12 if rng.random() < 0.5 else 400, int(rng.integers(5, 120))).tolist()
        chances = expected(row, params, seen)
        for on_device in (False, True):
            if on_device and params.needs_whole_vocabulary(DEVICE_CANDIDATES):
                continue
            on_devices += on_device
            found = drawn(llama, params, row, seen, on_device=on_device)
            assert not {token: count for token, count in found.items() if chances[token] < 1e-9}, params
            likely = np.flatnonzero(chances * DRAWS >= 5)
            counts, wanted = np.array([found[int(token)] for token in likely]), chances[likely] * DRAWS
            assert ((counts - wanted) ** 2 / wanted).sum() < len(likely) + 6 * math.sqrt(2 * len(likely)) + 6, params
    assert on_devices > CASES / 4


def test_an_impossible_token_does_not_blind_typical_sampling(llama: Llama) -> None:
    """Its share of the entropy is 0 · log 0."""
    row = np.full(512, -4.0, dtype=np.float32)
    row[:3] = (9.0, 8.5, 8.0)
    params = replace(PLAIN, typical_p=0.3, logit_bias=((300, -100.0),))
    likely = np.flatnonzero(expected(row, params, []))
    assert likely.tolist() == [1]
    assert set(drawn(llama, params, row, [], on_device=False)) == {1}


def test_the_coldest_draw_is_the_likeliest_token(llama: Llama) -> None:
    row = np.random.default_rng(5).normal(0, 6, 512).astype(np.float32)
    for temperature in (1e-6, 1e-38, 1e-40, 1e-300):
        sampler = Sampler(replace(PLAIN, temperature=temperature, seed=3), llama)
        assert sampler.draw_from_logits(row.copy())[0] == int(row.argmax())
        sampler.close()


def params_of(**fields: Any) -> SamplingParams:
    """What an engine with a context of 2,048 tokens makes of a request."""
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    config = EngineConfig("x", "x", context_tokens=2048)
    return SamplingParams.of(parse_chat_request(json.dumps(body).encode()), config, 512, frozenset())


def test_the_smallest_nucleus_is_the_likeliest_token(llama: Llama) -> None:
    row = np.random.default_rng(5).normal(0, 1, 512).astype(np.float32)
    params = params_of(top_p=0, top_k=0, min_p=0, temperature=1.5)
    assert set(drawn(llama, params, row, [], on_device=False)) == {int(row.argmax())}


def drawn_in_a_row(sampler: Sampler, count: int) -> list[int]:
    rng = np.random.default_rng(11)
    rows = [rng.normal(0, 2, 512).astype(np.float32) for _ in range(40)]
    return [sampler.draw_from_logits(rows[sampler.draws])[0] for _ in range(count)]


def test_every_seed_repeats(llama: Llama) -> None:
    """llama.cpp takes one of them for "any"; a client whose largest number is its favourite seed gets that one."""
    asked = {seed: params_of(seed=seed).seed for seed in (9007199254740991, -5, -1)}
    assert (asked[9007199254740991], asked[-5]) == (ANY, ANY - 4)
    assert asked[-1] != params_of(seed=-1).seed
    answers = []
    for seed in (ANY, ANY, ANY - 1):
        sampler = Sampler(replace(PLAIN, seed=seed, xtc_probability=0.5, xtc_threshold=0.01), llama)
        answers.append(drawn_in_a_row(sampler, 20))
        sampler.close()
    assert answers[0] == answers[1] != answers[2]


@pytest.mark.parametrize("params", [PLAIN, replace(PLAIN, top_k=30, xtc_probability=0.5, xtc_threshold=0.02)])
def test_a_sampler_that_skips_goes_on_as_the_one_that_drew(llama: Llama, params: SamplingParams) -> None:
    first, second = (Sampler(replace(params, seed=9), llama) for _ in range(2))
    begun = drawn_in_a_row(first, 17)
    second.see_prompt(begun)
    second.skip(17)
    assert drawn_in_a_row(second, 20) == drawn_in_a_row(first, 20)
    first.close()
    second.close()


def test_sequence_breakers_are_looked_for_once_and_before_the_core_needs_them(llama: Llama) -> None:
    params = replace(PLAIN, dry_multiplier=0.8, dry_sequence_breakers=("\n", "never seen before"))
    sampler_chain.prepare(params, llama.vocabulary)
    made = sampler_chain._kept_dry.cache_info().misses
    for seed in range(3):
        sampler = Sampler(replace(params, seed=seed), llama)
        # What one has seen is no other's.
        sampler.see_prompt([1, 2, 3, 1, 2, 3, 1, 2] if seed else [])
        row = np.zeros(512, dtype=np.float32)
        row[3] = 0.5
        cold = replace(params, temperature=0)
        greedy = Sampler(cold, llama)
        greedy.see_prompt([1, 2, 3, 1, 2, 3, 1, 2] if seed else [])
        assert (greedy.draw_from_logits(row)[0] == 3) == (seed == 0)
        greedy.close()
        sampler.close()
    assert sampler_chain._kept_dry.cache_info().misses == made


def test_windows_may_reach_back_as_far_as_the_context(llama: Llama) -> None:
    params = params_of(repeat_last_n=-1, dry_penalty_last_n=-1, repeat_penalty=1.5, temperature=0)
    assert params.repeat_last_n == params.dry_penalty_last_n == 2048
    row = np.zeros(512, dtype=np.float32)
    row[[7, 8]] = (1.2, 1.0)
    sampler = Sampler(params, llama)
    sampler.see_prompt([7, *[20] * 1500])
    assert sampler.draw_from_logits(row)[0] == 8
    sampler.close()
