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
ACCEPTANCE_MEMORY = 0.95
# As many imagined trials stand for what is known of the engine's other generations.
PRIOR_TRIALS = 4.0
PRIOR_ACCEPTANCE = 0.8
PRIOR_GAIN = 0.02
# A measurement that lies this far beyond the estimate is a graph that was rebuilt, not the price of a step.
OUTLIER_RATIO = 2.0
# A length is kept for so many steps, as a device prepares for a shape of step before it is fast; the first ones of a new
# shape are not measured.
RUN_STEPS = 12
SETTLING_STEPS = 3
# Steps without drafts after which a run of drafts shows whether they pay by now; twice as many each time they do not.
PATIENCE_STEPS = 256
MAX_PATIENCE_STEPS = 4096
PROBE_STEPS = 6
# Another length must promise this much more, or the choice would flicker between equals.
ADVANTAGE = 1.03


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
        self._count = 0
        self._left = 0
        self._settling = 0
        self._idle = 0
        self._patience = PATIENCE_STEPS

    def choose(self, acceptances: Sequence[Acceptance], longest: int) -> int:
        """The length with most tokens per second, 0 where drafting loses, and now and then a draft to see whether it still
        does. `longest` bounds this step's, not the choice."""
        count = len(acceptances)
        if count != self._count or self._left == 0:
            self._decide(acceptances, count)
        self._left -= 1
        self._idle += self.chosen == 0
        return min(self.chosen, longest)

    def _decide(self, acceptances: Sequence[Acceptance], count: int) -> None:
        rates = [acceptance.rate(self.prior) for acceptance in acceptances]
        speeds = [self._speed(rates, length) for length in range(self.longest + 1)]
        best = max(range(len(speeds)), key=speeds.__getitem__)
        if speeds[best] < speeds[self.chosen] * ADVANTAGE:
            best = self.chosen
        self._left = RUN_STEPS
        if best:
            self._idle, self._patience = 0, PATIENCE_STEPS
        elif self._idle >= self._patience:
            self._idle, self._patience = 0, min(2 * self._patience, MAX_PATIENCE_STEPS)
            best = max(range(1, len(speeds)), key=speeds.__getitem__)
            self._left = PROBE_STEPS
        if (best, count) != (self.chosen, self._count):
            self._settling = SETTLING_STEPS
        self.chosen, self._count = best, count

    def _speed(self, rates: Sequence[float], length: int) -> float:
        """Tokens per second, by what is known."""
        count = len(rates)
        tokens = sum(_expected_tokens(rate, length) for rate in rates)
        seconds = self.steps.seconds(count * (length + 1))
        if length:
            seconds += length * self.drafting.seconds(count)
        return tokens / max(seconds, 1e-9)

    def stepped(self, rows: int, step_s: float, drafting_s: float | None) -> None:
        """A step of so many rows took `step_s`, and drafting one token for each of its sequences `drafting_s` before it."""
        if self._settling:
            self._settling -= 1
            return
        self.steps.saw(rows, step_s)
        if drafting_s is not None:
            self.drafting.saw(self._count, drafting_s)

    def saw(self, acceptance: Acceptance, offered: int, accepted: int) -> None:
        tried = min(accepted + 1, offered)
        acceptance.saw(tried, accepted)
        for trial in range(tried):
            self.prior += PRIOR_GAIN * ((trial < accepted) - self.prior)


def _expected_tokens(rate: float, length: int) -> float:
    return length + 1.0 if rate >= 1 else (1 - rate ** (length + 1)) / (1 - rate)
