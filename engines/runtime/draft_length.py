"""How many tokens to draft: as many as pay, by measured acceptance and measured costs. Pure arithmetic.

A draft of k tokens that are each accepted with probability p (given that those before them were) makes 1 + p + … + p^k
tokens of a step. The step then computes k + 1 rows per sequence, and the drafting itself costs k calls of the draft head.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

# Weight of a new measurement, and of all earlier trials of a generation at each new one.
COST_GAIN = 0.15
ACCEPTANCE_MEMORY = 0.93
# As many imagined trials stand for what is known of the engine's other generations.
PRIOR_TRIALS = 3.0
PRIOR_ACCEPTANCE = 0.8
PRIOR_GAIN = 0.02
# A measurement that lies this far beyond the estimate is a graph that was rebuilt, not the price of a step.
OUTLIER_RATIO = 2.0
# Steps without drafts after which one token is drafted to see whether drafting pays by now.
PROBE_EVERY_STEPS = 96
# After a choice of no draft so many steps go by before the next choice.
LOOK_EVERY_STEPS = 16
# A longer draft must promise this much more, or the choice would flicker between equals.
ADVANTAGE = 1.01


class Acceptance:
    """How often one generation's drafted tokens were right, with recent ones counting more."""

    def __init__(self) -> None:
        self._trials = self._hits = 0.0

    def saw(self, tried: int, accepted: int) -> None:
        """Of a draft, `accepted` tokens were right and `tried` were looked at, the first wrong one included."""
        for trial in range(tried):
            self._trials = self._trials * ACCEPTANCE_MEMORY + 1
            self._hits = self._hits * ACCEPTANCE_MEMORY + (trial < accepted)

    def rate(self, prior: float) -> float:
        return (self._hits + PRIOR_TRIALS * prior) / (self._trials + PRIOR_TRIALS)


class StepCosts:
    """Seconds of a step by its number of rows; between and beyond what was measured, along straight lines."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._rows: list[int] = []

    def saw(self, rows: int, seconds: float) -> None:
        known = self._seconds.get(rows)
        if known is None:
            expected = self.seconds(rows)
            self._seconds[rows] = min(seconds, expected * OUTLIER_RATIO) if expected else seconds
            self._rows = sorted(self._seconds)
        else:
            self._seconds[rows] = known + COST_GAIN * (min(seconds, known * OUTLIER_RATIO) - known)

    def seconds(self, rows: int) -> float:
        """0 as long as nothing was measured."""
        known = self._rows
        if not known:
            return 0.0
        if rows in self._seconds:
            return self._seconds[rows]
        if len(known) == 1:
            return self._seconds[known[0]] * math.sqrt(max(1.0, rows / known[0]))
        place = min(max(bisect_left(known, rows), 1), len(known) - 1)
        low, high = known[place - 1], known[place]
        slope = max(0.0, (self._seconds[high] - self._seconds[low]) / (high - low))
        return max(0.0, self._seconds[low] + slope * (rows - low))


class DraftLength:
    """Chooses one draft length for all sequences of a step."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.steps = StepCosts()
        self.drafting = StepCosts()
        self.prior = PRIOR_ACCEPTANCE
        self.chosen = 0
        self._without = 0
        self._settled_count = 0

    def choose(self, acceptances: Sequence[Acceptance], longest: int) -> int:
        """The length with most tokens per second, 0 where drafting loses, and now and then 1 to see whether it still does."""
        count = len(acceptances)
        if self._is_settled(count):
            return 0
        rates = [acceptance.rate(self.prior) for acceptance in acceptances]
        best, best_speed = 0, count / max(self.steps.seconds(count), 1e-9)
        for length in range(1, min(longest, self.longest) + 1):
            tokens = sum(_expected_tokens(rate, length) for rate in rates)
            seconds = self.steps.seconds(count * (length + 1)) + length * self.drafting.seconds(count)
            speed = tokens / max(seconds, 1e-9)
            if speed > best_speed * ADVANTAGE:
                best, best_speed = length, speed
        self._without = 0 if best else self._without + 1
        if self._without > PROBE_EVERY_STEPS and longest > 0:
            self._without, best = 0, 1
        self.chosen = best
        return best

    def _is_settled(self, count: int) -> bool:
        """Whether the last choice was no draft and nothing has changed since: looking again costs what it seldom brings."""
        if self.chosen or count != self._settled_count or self._without % LOOK_EVERY_STEPS == 0:
            self._settled_count = count
            return False
        self._without += 1
        return True

    def saw(self, acceptance: Acceptance, offered: int, accepted: int) -> None:
        tried = min(accepted + 1, offered)
        acceptance.saw(tried, accepted)
        for trial in range(tried):
            self.prior += PRIOR_GAIN * ((trial < accepted) - self.prior)


def _expected_tokens(rate: float, length: int) -> float:
    return length + 1.0 if rate >= 1 else (1 - rate ** (length + 1)) / (1 - rate)
