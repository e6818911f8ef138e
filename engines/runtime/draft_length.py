"""How many tokens to draft: as many as pay, by measured acceptance and measured costs. Pure arithmetic.

A draft of k tokens that are each accepted with probability p (given that those before them were) makes 1 + p + … + p^k
tokens of a step. The step then computes k + 1 rows per sequence, and the drafting itself costs k calls of the draft head, of
which the first two are dearer than the others: there the shape of the call changes.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence

# A cost is the mean of its measurements until so many; later ones weigh as much as then.
COST_MEMORY = 40
# How long trials count: those that a choice rests on, and those that may contradict them.
LONG_MEMORY, RECENT_MEMORY = 0.995, 0.97
# So many standard deviations apart, the recent trials are believed and the earlier ones forgotten.
CONTRADICTION = 3.0
# As many imagined trials stand for what is known of the engine's other generations.
PRIOR_TRIALS = 16.0
PRIOR_ACCEPTANCE = 0.8
ENGINE_PRIOR_TRIALS = 4.0
# A measurement that lies this far beyond the estimate is a graph that was rebuilt, not the price of a step.
OUTLIER_RATIO = 1.5
# A choice is looked at again after so many steps. A device prepares for a shape of step before it is fast; the first ones of
# a new shape tell what changing it costs.
RUN_STEPS = 24
SETTLING_STEPS = 5
CHANGE_GAIN = 0.2
# Steps without drafts after which a few tokens are drafted and only compared with what is drawn, so that the steps keep their
# shape; twice as many each time they still would not pay.
PATIENCE_STEPS = 128
MAX_PATIENCE_STEPS = 1024
PEEK_TRIALS = 8
# Another length must promise this much more, or the choice would flicker between equals; and where the steps' shape changes
# only for it, win back what the change costs within the tokens that are still to be expected: as many as were made, between
# these bounds. Drafts at all must promise a little more again, as what they cost beside the steps is not measured.
ADVANTAGE = 1.01
DRAFTS_ADVANTAGE = 1.02
HORIZON_TOKENS = (64, 512)
# What was never measured is tried once if it might be better by this much than it looks.
HOPE = 1.12


class Acceptance:
    """How often drafted tokens were right: by many trials, unless recent ones contradict them."""

    def __init__(self) -> None:
        self._trials = self._hits = 0.0
        self._recent_trials = self._recent_hits = 0.0

    def saw(self, tried: int, accepted: int) -> None:
        """Of a draft, `accepted` tokens were right and `tried` were looked at, the first wrong one included."""
        for trial in range(tried):
            hit = trial < accepted
            self._trials = self._trials * LONG_MEMORY + 1
            self._hits = self._hits * LONG_MEMORY + hit
            self._recent_trials = self._recent_trials * RECENT_MEMORY + 1
            self._recent_hits = self._recent_hits * RECENT_MEMORY + hit
        if tried and self._is_contradicted():
            self._trials, self._hits = self._recent_trials, self._recent_hits

    def _is_contradicted(self) -> bool:
        rate = (self._hits + 1) / (self._trials + 2)
        deviation = math.sqrt(rate * (1 - rate) / self._recent_trials)
        return abs(self._recent_hits / self._recent_trials - rate) > CONTRADICTION * deviation

    def rate(self, prior: float, trials: float = PRIOR_TRIALS) -> float:
        """`prior` counts as so many trials of its own."""
        return (self._hits + trials * prior) / (self._trials + trials)


class Line:
    """Values at some places; between and beyond those, along straight lines that never fall."""

    def __init__(self) -> None:
        self.values: dict[int, float] = {}
        self.places: list[int] = []

    def put(self, place: int, value: float) -> None:
        if place not in self.values:
            insort(self.places, place)
        self.values[place] = value

    def at(self, place: int) -> float:
        """0 as long as no value is known."""
        known = self.places
        if place in self.values or not known:
            return self.values.get(place, 0.0)
        if len(known) == 1:
            return self.values[known[0]] * math.sqrt(max(1.0, place / known[0]))
        index = min(max(bisect_left(known, place), 1), len(known) - 1)
        low, high = known[index - 1], known[index]
        slope = max(0.0, (self.values[high] - self.values[low]) / (high - low))
        return max(0.0, self.values[low] + slope * (place - low))


class StepCosts:
    """Seconds of a step by its number of rows: as measured, or else as a warm-up's steps let expect. Those tell how costs grow
    but not how high they are, so that the nearest measurements say how far off they were."""

    def __init__(self) -> None:
        self._expected = Line()
        self._seen = Line()
        self._times: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._seen.places)

    def knows(self, rows: int) -> bool:
        """Whether such steps were measured."""
        return rows in self._seen.values

    def expect(self, rows: int, seconds: float) -> None:
        self._expected.put(rows, seconds)

    def saw(self, rows: int, seconds: float) -> None:
        known = self._seen.values.get(rows)
        times = self._times[rows] = min(self._times.get(rows, 0) + 1, COST_MEMORY)
        if known is None:
            expected = self.seconds(rows)
            self._seen.put(rows, min(seconds, expected * OUTLIER_RATIO) if expected else seconds)
        else:
            self._seen.put(rows, known + (min(seconds, known * OUTLIER_RATIO) - known) / times)

    def seconds(self, rows: int) -> float:
        """0 as long as nothing is known."""
        expected, seen = self._expected.at(rows), self._seen
        if rows in seen.values or not expected:
            return seen.at(rows)
        if not seen.places:
            return expected
        index = bisect_left(seen.places, rows)
        low, high = seen.places[max(index - 1, 0)], seen.places[min(index, len(seen.places) - 1)]
        share = (rows - low) / (high - low) if low < rows < high else float(rows >= high)
        return expected * ((1 - share) * self._error(low) + share * self._error(high))

    def _error(self, rows: int) -> float:
        return self._seen.values[rows] / self._expected.at(rows)


class DraftingCosts:
    """Seconds of drafting so many tokens for so many sequences at once."""

    def __init__(self) -> None:
        self._by_count: dict[int, StepCosts] = {}
        self._per_token = StepCosts()

    def saw(self, count: int, length: int, seconds: float) -> None:
        self._by_count.setdefault(count, StepCosts()).saw(length, seconds)
        self._per_token.saw(count, seconds / length)

    def knows(self, count: int, length: int) -> bool:
        return count in self._by_count and self._by_count[count].knows(length)

    def seconds(self, count: int, length: int) -> float:
        """By what was measured with as many sequences if possible; 0 for no token, or as long as nothing was measured."""
        costs = self._by_count.get(count)
        if costs is None or len(costs) < 2:
            return length * self._per_token.seconds(count)
        return costs.seconds(length)


class DraftLength:
    """Chooses one draft length for all sequences of a step."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.steps = StepCosts()
        self.drafting = DraftingCosts()
        self.chosen = 0
        self._all = Acceptance()
        self._count = 0
        self._left = 0
        # Rows of the last step, 0 after one of another kind; steps until one of this shape is as fast as it gets.
        self._rows = 0
        self._settling = 0
        self._change_s = 0.0
        self._changing_s = 0.0
        self._idle = 0
        self._peeks = 0
        self._patience = PATIENCE_STEPS

    @property
    def prior(self) -> float:
        """What is expected of a generation without a history."""
        return self._all.rate(PRIOR_ACCEPTANCE, ENGINE_PRIOR_TRIALS)

    def choose(self, acceptances: Sequence[Acceptance], longest: int, made_tokens: float) -> int:
        """The length with most tokens per second, 0 where drafting loses. `longest` bounds this step's, not the choice.

        `made_tokens`: how much each generation has written, on average.
        """
        count = len(acceptances)
        if count != self._count or self._left == 0 or self._rows == 0:
            self._decide(acceptances, count, made_tokens)
        self._left -= 1
        if self.chosen == 0:
            self._idle += 1
            self._peeks = max(0, self._peeks - 1)
        return min(self.chosen, longest)

    @property
    def peeks(self) -> bool:
        """Whether this step, which is to have no draft, should show what one would have been worth."""
        return self.chosen == 0 and self._peeks > 0

    def _decide(self, acceptances: Sequence[Acceptance], count: int, made_tokens: float) -> None:
        prior = self.prior
        rates = [acceptance.rate(prior) for acceptance in acceptances]
        speeds = [self._speed(rates, length) for length in range(self.longest + 1)]
        hopes = [speed if self._is_known(count, length) else HOPE * speed for length, speed in enumerate(speeds)]
        hopes[0] *= DRAFTS_ADVANTAGE
        best = max(range(len(hopes)), key=hopes.__getitem__)
        kept = hopes[self.chosen] if self.chosen == 0 else speeds[self.chosen]
        if hopes[best] < kept * self._advantage(speeds[self.chosen], count, made_tokens):
            best = self.chosen
        self._left = RUN_STEPS
        if best:
            self._idle, self._patience, self._peeks = 0, PATIENCE_STEPS, 0
        elif self._idle >= self._patience:
            self._idle, self._patience = 0, min(2 * self._patience, MAX_PATIENCE_STEPS)
            self._peeks = self._left = 1 + math.ceil(PEEK_TRIALS / count)
        self.chosen, self._count = best, count

    def _advantage(self, speed: float, count: int, made_tokens: float) -> float:
        """By how much another length must be better than the chosen one, which makes `speed` tokens per second."""
        if self._rows != count * (self.chosen + 1):
            return ADVANTAGE  # the shape changes anyhow
        low, high = HORIZON_TOKENS
        left_s = count * min(max(made_tokens, low), high) / speed
        return ADVANTAGE + self._change_s / left_s

    def _is_known(self, count: int, length: int) -> bool:
        return length == 0 or (self.steps.knows(count * (length + 1)) and self.drafting.knows(count, length))

    def _speed(self, rates: Sequence[float], length: int) -> float:
        """Tokens per second, by what is known."""
        count = len(rates)
        tokens = sum(_expected_tokens(rate, length) for rate in rates)
        seconds = self.steps.seconds(count * (length + 1))
        if length:
            seconds += self.drafting.seconds(count, length)
        return tokens / max(seconds, 1e-9)

    def stepped(self, count: int, rows: int, step_s: float, drafting_s: float | None) -> None:
        """A step of `count` sequences and so many rows took `step_s`; its drafts, if any, `drafting_s` before it."""
        if rows != self._rows:
            self._rows, self._settling, self._changing_s = rows, SETTLING_STEPS, 0.0
        if self._settling:
            self._settle(rows, step_s)
            return
        self.steps.saw(rows, step_s)
        if drafting_s is not None:
            self.drafting.saw(count, max(1, round(rows / count) - 1), drafting_s)

    def _settle(self, rows: int, step_s: float) -> None:
        self._settling -= 1
        usual_s = self.steps.seconds(rows)
        self._changing_s += max(0.0, step_s - usual_s) if usual_s else 0.0
        if not self._settling:
            self._change_s += CHANGE_GAIN * (self._changing_s - self._change_s)

    def interrupted(self) -> None:
        """A step of another kind, with a prompt's tokens, came between: the next one's shape is a new one for the device."""
        self._rows = 0

    def saw(self, acceptance: Acceptance, offered: int, accepted: int) -> None:
        tried = min(accepted + 1, offered)
        acceptance.saw(tried, accepted)
        self._all.saw(tried, accepted)


def _expected_tokens(rate: float, length: int) -> float:
    return length + 1.0 if rate >= 1 else (1 - rate ** (length + 1)) / (1 - rate)
