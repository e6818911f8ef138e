"""What is learned from first tokens that came: it moves to the truth, and no single answer carries it away."""

from __future__ import annotations

import random

import pytest

from sessions.first_tokens import LEAST_DRIFT, LEAST_WAKE_S, MOST_DRIFT, Calibration, FirstTokens


def expected_s(now: Calibration, promised_s: float, neighbours: int = 0) -> float:
    return now.fixed_s + now.drift * promised_s * (1 + now.crowd * neighbours)


@pytest.mark.parametrize(("fixed_s", "drift"), [(0.03, 1.0), (0.002, 2.5), (0.2, 0.6), (0.01, 1.0)])
def test_it_comes_to_what_is_true_and_follows_when_that_changes(fixed_s: float, drift: float) -> None:
    rng, learned = random.Random(3), FirstTokens()
    for number in range(400):
        if number == 200:
            fixed_s, drift = fixed_s / 2, 1.5 * drift
        promised_s = rng.choice((0.004, 0.03, 0.4, 3.0))
        learned.note(promised_s, drift * promised_s * rng.uniform(0.9, 1.1), fixed_s * rng.uniform(0.9, 1.1))
        if number in (199, 399):
            for promised_s in (0.004, 0.1, 3.0):
                assert expected_s(learned.now, promised_s) == pytest.approx(fixed_s + drift * promised_s, rel=0.25)


def test_few_answers_are_nearer_to_the_truth_than_none() -> None:
    learned, off = FirstTokens(), []
    for promised_s in (0.05, 0.4, 0.02, 0.3, 0.1):
        off.append(abs(expected_s(learned.now, 0.2) - (0.04 + 3 * 0.2)))
        learned.note(promised_s, 3 * promised_s, 0.04)
    assert max(off[3:]) < off[0] / 1.5


def test_a_single_stall_moves_it_little_and_nothing_moves_it_without_end() -> None:
    learned = FirstTokens()
    for _ in range(30):
        learned.note(0.1, 0.1, 0.01)
    before_s = expected_s(learned.now, 0.1)
    learned.note(0.1, 60.0, 5.0)
    assert expected_s(learned.now, 0.1) < 1.3 * before_s
    for _ in range(200):
        learned.note(1.0, 1e6, 1e6)
    assert learned.now.drift <= MOST_DRIFT
    for _ in range(200):
        learned.note(1.0, 1e-9, 0.0)
    assert learned.now.drift >= LEAST_DRIFT
    assert learned.now.fixed_s >= 0


def test_waking_is_learned_apart() -> None:
    learned = FirstTokens()
    for _ in range(20):
        learned.note(0.1, 0.1, 0.02)
    awake = learned.now
    for _ in range(30):
        learned.note(0.1, 0.25, 0.07, asleep=True)
    assert (learned.now.fixed_s, learned.now.drift) == (awake.fixed_s, awake.drift)
    assert learned.now.wake_s == pytest.approx(0.2, rel=0.1)
    for _ in range(40):
        learned.note(0.1, 0.01, 0.0, asleep=True)
    assert learned.now.wake_s == pytest.approx(LEAST_WAKE_S, abs=1e-3)


def test_others_on_the_same_device_are_learned_apart() -> None:
    learned = FirstTokens()
    for _ in range(20):
        learned.note(0.1, 0.15, 0.02)
    alone = learned.now
    for neighbours in (1, 2, 1, 3) * 10:
        learned.note(0.1, 0.15 * (1 + 0.8 * neighbours), 0.1, neighbours=neighbours)
    assert (learned.now.fixed_s, learned.now.drift) == (alone.fixed_s, alone.drift)
    assert expected_s(learned.now, 1.0, 2) == pytest.approx(0.02 + 1.5 * 2.6, rel=0.05)


def test_what_cannot_be_is_not_learned() -> None:
    learned = FirstTokens(0.05)
    learned.note(-1.0, 1.0, 0.0)
    learned.note(1.0, 0.0, 0.0)
    learned.note(1.0, 1.0, -1.0)
    assert (learned.now, learned.answers) == (Calibration(0.05), 0)
