"""The bench of drafts: how it compares, and the choice of a draft's length on its simulated devices."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time

import numpy as np
import pytest

from bench.__main__ import main
from bench.spec import AUTO, NONE, Measuring, Rates, last_line
from bench.spec_clock import ProcessorClock
from bench.spec_simulation import ACCEPTANCES, DEVICES, STREAMS, cells_by_change, simulate, simulate_all


def test_forms_are_compared_round_by_round() -> None:
    options = argparse.Namespace(acceptance=[0.5], streams=[1], lengths=[0, 1], peer_lengths=[3])
    rates = Rates()
    # The card grows slower from round to round, and once something else holds auto up.
    for pace, auto in ((1.0, 100.0), (0.8, 80.0), (0.6, 30.0)):
        for form, rate in ((NONE, 100.0), ("0", 98.0), ("1", 104.0)):
            rates.add("0.5", 1, form, rate * pace)
        rates.add("0.5", 1, AUTO, auto)
    assert last_line(options, rates) == {
        "auto_vs_best_fixed_min": round(100 / 104, 4),
        "auto_vs_none_min": 1.0,
        "vs_llama_server": None,
    }


@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("acceptance", ACCEPTANCES)
def test_on_the_measured_card_no_answer_is_much_slower_than_with_the_best_length(
    streams: int, acceptance: float
) -> None:
    cell = simulate(DEVICES[0], streams, (acceptance,), seeds=20, tokens=192)
    # An engine's very first answer, of which it knows nothing, and one after that.
    assert cell.first_vs_best >= 0.95
    assert cell.first_vs_none >= 0.96
    assert cell.later_vs_best >= 0.97
    assert cell.later_vs_none >= 0.98


def test_the_simulation_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["spec", "--simulate", "--seeds", "1", "--answer-tokens", "32"]) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 0 < answer["worst_seed_vs_best_fixed"] <= answer["auto_vs_best_fixed_min"]


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_on_no_device_is_an_answer_much_slower_than_with_the_best_length() -> None:
    steady, changing = cells_by_change(simulate_all(seeds=200, tokens=192))
    assert min(cell.first_vs_best for cell in steady) >= 0.95
    assert min(cell.first_vs_none for cell in steady) >= 0.97
    assert min(cell.later_vs_best for cell in steady) >= 0.97
    assert min(cell.later_vs_none for cell in steady) >= 0.98
    assert min(min(cell.first_vs_none, cell.later_vs_none) for cell in changing) >= 0.97
    # Against the one length that was the best for both halves.
    assert min(min(cell.first_vs_best, cell.later_vs_best) for cell in changing) >= 0.92


def test_within_a_limit_cells_take_turns() -> None:
    arcs = {name: np.arange(9) for name in ("1.0", "0.5", "0.2")}
    options = argparse.Namespace(rounds=4, streams=[1, 8])
    measuring = Measuring([], arcs, options, Rates())
    turns = list(measuring._turns(in_turn=True))
    for index in range(4):
        assert {arc for arc, round_index in turns[3 * index : 3 * index + 3] if round_index == index} == set(arcs)
    assert list(measuring._turns(in_turn=False))[:4] == [("1.0", index) for index in range(4)]
    asyncio.run(measuring.until(time.monotonic() - 1))  # nothing is begun any more


def test_processor_time_lies_on_lines_between_samples() -> None:
    clock = ProcessorClock(os.getpid())
    places = []
    for _ in range(3):
        clock.sample()
        places.append(time.monotonic())
        sum(range(200_000))
    clock.sample()
    first, middle, last = places
    assert clock.used_s(first, last) > 0
    assert clock.used_s(first, middle) + clock.used_s(middle, last) == pytest.approx(clock.used_s(first, last))
