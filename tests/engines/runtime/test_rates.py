"""What an engine learns of its own speed, and what it tells a router."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from engines.rates_view import EngineRates
from engines.runtime.generation import Generation, Mailbox
from engines.runtime.rates import PrefillRate, Rates, StepRate, StepWork, pairs_of
from engines.runtime.sampler import SamplingParams
from tests.engine_process import EngineProcess, free_port
from tests.synthetic_gguf import SyntheticModel


def test_both_terms_of_prefill_are_found_from_chunks_at_unlike_depths() -> None:
    rate = PrefillRate(0.005)
    for turn in range(400):
        start, count = (turn * 700) % 30_000, 128 + 64 * (turn % 5)
        rate.note(count, pairs_of(start, count), 1e-3 * count + 1e-8 * pairs_of(start, count))
    assert rate.token_s == pytest.approx(1e-3, rel=0.05)
    assert rate.pair_s == pytest.approx(1e-8, rel=0.05)
    assert pairs_of(0, 100) + pairs_of(100, 50) == 150.0**2


def test_chunks_that_all_begin_alike_give_one_term() -> None:
    rate = PrefillRate(0.005)
    for _ in range(400):
        rate.note(256, pairs_of(0, 256), 0.256)
    assert rate.seconds(256, pairs_of(0, 256)) == pytest.approx(0.256, rel=0.05)


def test_others_tokens_in_the_cache_are_a_term_of_their_own() -> None:
    rate = PrefillRate(0.005)
    for turn in range(600):
        start, count, others = (turn * 700) % 8_000, 128 + 64 * (turn % 5), (turn * 1_301) % 9_000
        pairs, beside = pairs_of(start, count), float(count) * others
        rate.note(count, pairs, 1e-3 * count + 1e-8 * pairs + 5e-8 * beside, beside)
    assert rate.seconds(256, pairs_of(1000, 256), 256.0 * 6000) == pytest.approx(
        0.256 + 1e-8 * pairs_of(1000, 256) + 5e-8 * 256 * 6000, rel=0.02
    )
    assert rate.beside_s == pytest.approx(5e-8, rel=0.1)


def test_a_step_tells_own_tokens_from_others() -> None:
    rate = StepRate()
    for turn in range(600):
        own, others = (turn * 331) % 2_000, (turn * 977) % 9_000
        rate.note(1, own + others, 0.001 + 1e-6 * own + 4e-8 * (own + others), own)
    assert rate.own_token_s == pytest.approx(1e-6, rel=0.1)
    told_s = rate.steps()[0][1] + rate.resident_token_s * 5_000 + rate.own_token_s * 500
    assert told_s == pytest.approx(0.001 + 0.0005 + 0.0002, rel=0.15)


def test_a_step_is_each_prompts_own_by_its_tokens_and_the_rest_it_has_waited_for() -> None:
    rates = Rates(0.001, 0.01)
    one, other = a_generation("one"), a_generation("other")
    rates.stepped(StepWork(100, 0.0, 0, 0, ((other, 100),)), 100, 0.0, 1.0)
    one.prompts_before_s = rates.prompts_s
    rates.stepped(StepWork(400, 0.0, 0, 0, ((one, 100), (other, 300))), 500, 0.0, 4.0)
    rates.stepped(StepWork(100, 0.0, 0, 0, ((other, 100),)), 600, 0.0, 1.0)
    rates.stepped(StepWork(100, 0.0, 0, 0, ((one, 100),)), 700, 0.0, 1.0)
    assert (one.computed_s, one.prompt_wait_s) == (2.0, 4.0)
    assert (other.computed_s, other.prompt_wait_s) == (5.0, 1.0)


def a_generation(request_id: str) -> Generation:
    return Generation(request_id, [1, 2], SamplingParams(), (), 1, Mailbox(), deadline_at=float("inf"))


def test_steps_are_told_by_streams_without_what_lies_in_the_cache() -> None:
    rate = StepRate()
    for turn in range(300):
        resident_tokens = (turn * 977) % 40_000
        for streams in (1, 4):
            rate.note(streams, resident_tokens, 0.01 + 0.002 * streams + 1e-7 * resident_tokens)
    assert rate.resident_token_s == pytest.approx(1e-7, rel=0.3)
    (one, one_s), (four, four_s) = rate.steps()
    assert (one, four) == (1, 4)
    assert four_s - one_s == pytest.approx(0.006, rel=0.3)


def test_a_step_that_was_held_up_tells_nothing_unless_it_goes_on_like_that() -> None:
    rates = Rates(0.001, 0.01)
    work = StepWork(0, 0.0, 1, 0)
    rates.stepped(work, 100, 0.0, 5.0)
    assert rates.decode.steps() == [(1, 0.01)]
    for _ in range(20):
        rates.stepped(work, 100, 0.0, 5.0)
    expected_s = rates.decode.expected_s(1, 100)
    assert expected_s is not None
    assert expected_s > 1.0


def test_an_engine_tells_its_rates_and_forgets_a_session(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path
) -> None:
    def post(path: str, body: object, **headers: str) -> dict[str, object]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(engine.base_url + path, json.dumps(body).encode(), named)
        with urllib.request.urlopen(request, timeout=30) as answer:
            values: dict[str, object] = json.load(answer)
            return values

    with EngineProcess(tmp_path, tiny_model("llama").path, slots=2) as engine:
        fresh = EngineRates.from_dict(engine.get("/rates"))
        assert fresh.prefill_token_s > 0
        assert fresh.steps[0][0] == 1
        assert (fresh.free_slots, fresh.sessions, fresh.idle_tokens) == (2, {}, 0)
        chat = {"messages": [{"role": "user", "content": "Tell me of rivers. " * 10}], "max_tokens": 8}
        post("/v1/chat/completions", chat, X_Hydra_Session="s")
        told = EngineRates.from_dict(engine.get("/rates"))
        assert told.sessions["s"] > 50
        assert told.request_s > 0
        assert post("/sessions/forget", {"session": "s"})["n_erased"] == told.sessions["s"]
        assert EngineRates.from_dict(engine.get("/rates")).sessions == {}
        # Of a request's time the site may have spent nearly all.
        with pytest.raises(urllib.error.HTTPError, match="504"):
            post("/v1/chat/completions", {**chat, "max_tokens": 500}, X_Hydra_Budget_S="0.001")
        with pytest.raises(urllib.error.HTTPError, match="400"):
            post("/sessions/forget", {"session": ""})


@pytest.mark.parametrize("has_peers", [True, False])
def test_an_engine_without_a_store_tells_its_peers_whose_states_fit(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path, *, has_peers: bool
) -> None:
    """Requests are split between engines whose groups are one; where nobody can take a state the file is not read for it."""
    ports = {"rpc_port": free_port()} if has_peers else {}
    with EngineProcess(tmp_path, tiny_model("llama").path, **ports) as engine:
        told = engine.get("/rates")
        deadline = time.monotonic() + 60
        while has_peers and not told["kv_group"]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
            told = engine.get("/rates")
    assert (told["streams_kv"], bool(told["kv_group"])) == (has_peers, has_peers)


@pytest.mark.parametrize(
    "broken",
    [
        {"steps": []},
        {"steps": [[2, 0.1], [1, 0.1]]},
        {"prefill_token_s": "nan"},
        {"slots": None},
        {"sessions": 3},
        {"links": 3},
    ],
)
def test_what_cannot_be_rates_is_refused(broken: dict[str, object]) -> None:
    values: dict[str, object] = dict.fromkeys(EngineRates.__dataclass_fields__, 1)
    values |= {"pending_tokens": [], "steps": [[1, 0.1]], "sessions": {}, "links": {}, "model": "m", "kv_group": ""}
    assert EngineRates.from_dict(values).slots == 1
    with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
        EngineRates.from_dict(values | broken)
