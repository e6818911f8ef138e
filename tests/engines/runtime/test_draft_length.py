"""The choice of a draft's length, on simulated devices: tokens over simulated seconds, no clock."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from engines.runtime.draft_costs import StepCosts
from engines.runtime.draft_length import Acceptance, DraftLength

LONGEST = 4
STEPS = 2000
# What a card loses in the first steps of a new shape, while it builds graphs for it.
CHANGE_S = (0.012, 0.008, 0.005, 0.003, 0.001)


def card(rows: int) -> float:
    """A mixture of experts on a large card: cheap up to eight rows, then another kernel."""
    return 0.0034 + 0.0007 * rows if rows <= 8 else 0.015 + 0.00045 * rows


def large_card(rows: int) -> float:
    """An H200 whose sequences wake experts of their own: each row costs, the more so beyond eight."""
    few = {1: 0.0038, 2: 0.0044, 3: 0.0053, 4: 0.0065, 5: 0.0068, 8: 0.0096}
    return few.get(rows, 0.0115 + 0.0006 * rows)


def memory_bound(rows: int) -> float:
    """A dense model whose weights are read once for all rows."""
    return 0.03 + 0.0005 * rows


def compute_bound(rows: int) -> float:
    """A CPU: every row costs as much as the first."""
    return 0.002 + 0.012 * rows


def drafting(count: int, length: int) -> float:
    return (0.0006 + 0.0001 * count) * length + 0.0005 * min(length - 1, 1) if length else 0.0


DEVICES = {"card": card, "large": large_card, "memory": memory_bound, "compute": compute_bound}


class Simulation:
    """Sequences that decode for ever; the first steps of a new shape are slow."""

    def __init__(self, cost: Callable[[int], float], streams: int, rate: float) -> None:
        self.cost, self.streams, self.rate = cost, streams, rate
        self.rng = random.Random(1)
        self.seconds = self.tokens = 0.0
        self._shape = self._in_shape = 0

    def interrupted(self) -> None:
        self._shape = 0

    def step(self, length: int) -> tuple[float, float, list[int]]:
        """Seconds of the step and of making its drafts, and how many tokens of each sequence's draft were right."""
        rows = self.streams * (length + 1)
        if rows != self._shape:
            self._shape = rows
            self._in_shape = 0
        step_s = self.cost(rows) * self.rng.uniform(0.97, 1.06)
        step_s += CHANGE_S[self._in_shape] if self._in_shape < len(CHANGE_S) else 0.0
        self._in_shape += 1
        drafting_s = drafting(self.streams, length)
        right = []
        for _ in range(self.streams):
            accepted = 0
            while accepted < length and self.rng.random() < self.rate:
                accepted += 1
            right.append(accepted)
        self.seconds += step_s + drafting_s
        self.tokens += sum(right) + self.streams
        return step_s, drafting_s, right


def speed(cost: Callable[[int], float], streams: int, rate: float, length: int | None) -> float:
    """Tokens per second with a fixed length, or with the chosen one (None)."""
    simulation = Simulation(cost, streams, rate)
    chooser = DraftLength(LONGEST)
    for rows in (1, 2, 3, 4, 5, 8, 9, 16, 24, 32):
        chooser.steps.expect(rows, 0.8 * cost(rows))
    for count, length in ((1, 1), (1, LONGEST), (8, 1), (8, LONGEST)):
        chooser.drafting.expect(count, length, 0.9 * drafting(count, length))
    acceptances = [Acceptance() for _ in range(streams)]
    for step in range(STEPS):
        if step % 500 == 499:  # answers end and others begin
            acceptances = [Acceptance() for _ in range(streams)]
        if step % 500 == 0:  # prompts were computed
            chooser.interrupted()
            simulation.interrupted()
        made_tokens = (step % 500) * simulation.tokens / (streams * max(step, 1))
        count = chooser.choose(acceptances, made_tokens) if length is None else length
        peeks = length is None and chooser.peeks
        step_s, drafting_s, right = simulation.step(count)
        chooser.stepped(streams, streams * (count + 1), step_s, drafting_s if count else None)
        if peeks:
            chooser.looked(drafting(streams, 1))
        for acceptance, accepted in zip(acceptances, right, strict=True):
            if count:
                chooser.saw(acceptance, count, accepted)
            elif peeks:
                chooser.saw(acceptance, 1, int(simulation.rng.random() < rate))
        if peeks:
            simulation.seconds += drafting(streams, 1)
    return simulation.tokens / simulation.seconds


@pytest.mark.parametrize("rate", [1.0, 0.9, 0.7, 0.5, 0.2])
@pytest.mark.parametrize("streams", [1, 8])
@pytest.mark.parametrize("device", DEVICES)
def test_the_chosen_length_is_near_to_the_best_and_never_a_loss(device: str, streams: int, rate: float) -> None:
    cost = DEVICES[device]
    fixed = [speed(cost, streams, rate, length) for length in range(LONGEST + 1)]
    chosen = speed(cost, streams, rate, None)
    assert chosen >= 0.95 * max(fixed)
    assert chosen >= 0.97 * fixed[0]


def test_costs_lie_on_lines_between_what_was_measured() -> None:
    costs = StepCosts()
    assert costs.seconds(4) == 0
    costs.saw(2, 0.010)
    costs.saw(6, 0.018)
    assert costs.seconds(4) == pytest.approx(0.014)
    assert costs.seconds(10) == pytest.approx(0.026)
    for _ in range(100):
        costs.saw(6, 0.012)
    assert costs.seconds(6) == pytest.approx(0.012, rel=0.01)
    costs.saw(6, 5.0)  # a graph that was rebuilt
    assert costs.seconds(6) < 0.015


def test_recent_trials_that_contradict_the_earlier_ones_are_believed() -> None:
    acceptance = Acceptance()
    acceptance.saw(400, 400)
    for _ in range(20):
        acceptance.saw(1, 0)
    assert acceptance.rate(1.0) < 0.75
    steady = Acceptance()
    for trial in range(400):
        steady.saw(1, int(trial % 2))
    assert steady.rate(0.5) == pytest.approx(0.5, abs=0.02)


def test_a_shape_is_changed_only_for_what_its_change_costs() -> None:
    """Once changes are known to be dear, a slightly better length waits for steps whose shape changes anyhow."""
    chooser = DraftLength(1)
    accepted = [Acceptance()]
    for rows, step_s in ((1, 0.010), (2, 0.018)):
        for place in range(12):
            chooser.stepped(1, rows, step_s + (0.2 if place == 0 else 0), 0.0005 if rows == 2 else None)
    for _ in range(200):
        chooser.saw(accepted[0], 1, 1)
    chooser.interrupted()
    assert chooser.choose(accepted, 50) == 1  # 2 tokens in 18.5 ms instead of 1 in 10
    chooser.chosen = 0
    chooser.stepped(1, 1, 0.010, None)
    for _ in range(40):
        assert chooser.choose(accepted, 50) == 0
        chooser.stepped(1, 1, 0.010, None)
    chooser.interrupted()
    assert chooser.choose(accepted, 50) == 1


def test_a_generation_without_history_is_judged_by_the_others() -> None:
    chooser = DraftLength(LONGEST)
    for _ in range(300):
        chooser.saw(Acceptance(), 1, 0)
    assert chooser.prior < 0.05
    assert Acceptance().rate(chooser.prior) == pytest.approx(chooser.prior)


def test_a_rest_from_drafts_ends_soon_after_they_begin_to_be_right() -> None:
    """On the card a look costs as much as twenty steps may spend on looks; none of them hits, then all do."""
    chooser, accepted = DraftLength(LONGEST), [Acceptance()]
    for rows in (1, 2, 3, 4, 5):
        chooser.steps.expect(rows, large_card(rows))
    for length in range(1, LONGEST + 1):
        chooser.drafting.expect(1, length, drafting(1, length))

    def steps_until(done: Callable[[], bool], hit: bool, most: int) -> tuple[int, float]:
        looks_s = 0.0
        for step in range(most):
            if done():
                return step, looks_s
            count = chooser.choose(accepted, 100)
            peeks = chooser.peeks
            chooser.stepped(1, 1 + count, large_card(1 + count), drafting(1, count) if count else None)
            if peeks:
                looks_s += drafting(1, 1)
                chooser.looked(drafting(1, 1))
                chooser.saw(accepted[0], 1, int(hit))
            elif count:
                chooser.saw(accepted[0], count, count * hit)
        return most, looks_s

    steps_until(lambda: False, hit=False, most=200)
    assert chooser.chosen == 0
    steps, looks_s = steps_until(lambda: False, hit=False, most=2000)
    assert 0 < looks_s <= 0.01 * steps * large_card(1)
    steps, _ = steps_until(lambda: chooser.chosen > 0, hit=True, most=200)
    assert steps < 80
    steps, _ = steps_until(lambda: chooser.chosen == 0, hit=False, most=200)
    assert steps < 30


def test_a_rest_that_is_only_counted_goes_the_same_way() -> None:
    """Steps that ask nothing but `rests`, where that is enough, have their looks and decisions where the others have them."""

    def looks(*, counted: bool) -> list[int]:
        chooser, accepted, found = DraftLength(LONGEST), [Acceptance()], []
        for rows in (1, 2, 3, 4, 5):
            chooser.steps.expect(rows, large_card(rows))
        for length in range(1, LONGEST + 1):
            chooser.drafting.expect(1, length, drafting(1, length))
        for step in range(3000):
            if step % 700 == 0:
                chooser.interrupted()
            is_rest = counted and chooser.rests(1)
            count = 0 if is_rest else chooser.choose(accepted, 100)
            if not is_rest and chooser.peeks:
                found.append(step)
                chooser.looked(drafting(1, 1))
                chooser.saw(accepted[0], 1, 0)
            elif count:
                chooser.saw(accepted[0], count, 0)
            chooser.stepped(1, 1 + count, large_card(1 + count), drafting(1, count) if count else None)
        return found

    found = looks(counted=True)
    assert found == looks(counted=False)
    assert 10 < len(found) < 60


@pytest.mark.parametrize("device", ["large", "compute"])
def test_looks_take_little_of_a_long_rest_and_more_where_more_is_to_be_won(device: str) -> None:
    cost = DEVICES[device]
    chooser, accepted = DraftLength(LONGEST), [Acceptance()]
    for rows in (1, 2, 3, 4, 5):
        chooser.steps.expect(rows, cost(rows))
    for length in range(1, LONGEST + 1):
        chooser.drafting.expect(1, length, drafting(1, length))
    shares = []
    for _ in range(3):
        looks_s = steps_s = 0.0
        for _ in range(2000):
            count = chooser.choose(accepted, 100)
            if chooser.peeks:
                looks_s += drafting(1, 1)
                chooser.looked(drafting(1, 1))
                chooser.saw(accepted[0], 1, 0)
            elif count:
                chooser.saw(accepted[0], count, 0)
            chooser.stepped(1, 1 + count, cost(1 + count), drafting(1, count) if count else None)
            steps_s += cost(1)
        shares.append(looks_s / steps_s)
    assert 0.0005 < shares[-1] < (0.0035 if device == "large" else 0.002)
