"""How many tokens to draft: as many as pay, by measured acceptance and measured costs. Pure arithmetic.

A draft of k tokens that are each accepted with probability p (given that those before them were) makes 1 + p + … + p^k
tokens of a step. The step then computes k + 1 rows per sequence, and the drafting itself costs k calls of the draft head, of
which the first two are dearer than the others: there the shape of the call changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from engines.runtime.draft_costs import DraftingCosts, StepCosts

# How long trials count: those that a choice rests on, and those that may contradict them, for a small change and for a large one.
LONG_MEMORY, RECENT_MEMORY, LATEST_MEMORY = 0.995, 0.97, 0.85
# So many standard deviations apart, the recent trials, or the latest, are believed and the earlier ones forgotten.
CONTRADICTION, LATEST_CONTRADICTION = 3.0, 3.0
# As many imagined trials stand for what is known of the engine's other generations, once it has seen some; of a new engine for
# what heads mostly reach.
PRIOR_TRIALS = 16.0
PRIOR_ACCEPTANCE = 0.62
ENGINE_PRIOR_TRIALS = 2.0
# A choice is looked at again after so few steps, and after twice as many each time it stays, up to so many; in a rest from drafts
# up to more, since nothing but a look tells anything new then, and each is followed by a decision.
FIRST_RUN_STEPS, RUN_STEPS, REST_RUN_STEPS = 3, 24, 96
# A device prepares for a shape of step before it is fast; the first ones of a new shape tell what changing it costs. Until one
# was seen it is taken for a step.
SETTLING_STEPS = 5
CHANGE_GAIN = 0.2
# While nothing is drafted, a token is drafted now and then and only compared with what is drawn, so that the steps keep their
# shape: several as drafts stop or nothing is known, more of them as long as good luck would make drafts pay. Later one as soon as
# so many steps have gone by, and so long a rest that looks take no more than their share of it; and further ones at once while
# they are luckier than was to be expected, and would pay if that were no luck. The share is the larger the more there is to be
# won: so much for twice the speed, between bounds. What is taken of it falls with every look that leads to nothing, from the one
# part to the other, until drafts pay again. None where even right drafts lose.
LOOK_TRIALS, MOST_LOOK_TRIALS = 4, 24
LOOK_STEPS, MOST_LUCKY_STEPS = 16, 8
LOOK_SHARE, LOOK_SHARES = 0.005, (0.002, 0.005)
LOOK_FALL, LOOK_PARTS = 0.8, (0.6, 1.6)
LUCK_DEVIATIONS = 1.0
# Another length must promise this much more, or the choice would flicker between equals; and where the steps' shape changes
# only for it, win back what the change costs within the tokens that are still to be expected: as many as were made, between
# these bounds. Drafts at all must promise a little more again, as what they cost beside the steps is not measured.
ADVANTAGE = 1.01
DRAFTS_ADVANTAGE = 1.02
HORIZON_TOKENS = (128, 512)
# What neither a warm-up nor a step has measured is tried once if it might be better by this much than it looks.
HOPE = 1.03


class Acceptance:
    """How often drafted tokens were right: by many trials, unless recent ones contradict them."""

    def __init__(self) -> None:
        self._trials = self._hits = 0.0
        self._recent_trials = self._recent_hits = 0.0
        self._latest_trials = self._latest_hits = 0.0

    def saw(self, tried: int, accepted: int) -> bool:
        """Of a draft, `accepted` tokens were right and `tried` were looked at, the first wrong one included. True where that
        contradicts all that was before."""
        for trial in range(tried):
            hit = trial < accepted
            self._trials = self._trials * LONG_MEMORY + 1
            self._hits = self._hits * LONG_MEMORY + hit
            self._recent_trials = self._recent_trials * RECENT_MEMORY + 1
            self._recent_hits = self._recent_hits * RECENT_MEMORY + hit
            self._latest_trials = self._latest_trials * LATEST_MEMORY + 1
            self._latest_hits = self._latest_hits * LATEST_MEMORY + hit
        if not tried:
            return False
        rate = (self._hits + 1) / (self._trials + 2)
        if _differs(self._latest_hits, self._latest_trials, rate, LATEST_CONTRADICTION):
            self._recent_trials, self._recent_hits = self._latest_trials, self._latest_hits
        elif not _differs(self._recent_hits, self._recent_trials, rate, CONTRADICTION):
            return False
        self._trials, self._hits = self._recent_trials, self._recent_hits
        return True

    def rate(self, prior: float, trials: float = PRIOR_TRIALS) -> float:
        """`prior` counts as so many trials of its own."""
        return (self._hits + trials * prior) / (self._trials + trials)

    @property
    def trials(self) -> float:
        """Those that still count."""
        return self._trials


class DraftLength:
    """Chooses one draft length for all sequences of a step."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.steps = StepCosts()
        self.drafting = DraftingCosts()
        self.chosen = 0
        # The speed of the last choice over that of steps without drafts, as it was expected to be.
        self.gain = 1.0
        self._all = Acceptance()
        self._count = 0
        self._bounds: Sequence[int] = ()
        # Steps until the choice is looked at again, and how many that are from one time to the next.
        self._left = 0
        self._run = FIRST_RUN_STEPS
        # Rows of the last step, 0 after one of another kind; steps until one of this shape is as fast as it gets.
        self._rows = 0
        self._settling = 0
        self._changing_s = 0.0
        # What changes have cost beyond the steps themselves; None before the first.
        self._change_s: float | None = None
        # Looks that are to come now, and whether the last step had one; trials of those that followed a stop.
        self._looking = self._look_trials = 0
        self._has_looked = False
        # Trials of the other looks in a row, how many were right, and how many were to be expected, with its variance.
        self._seen = self._right = 0
        self._expected = self._variance = 0.0
        # Whether right drafts would pay, where steps without make so many tokens per second.
        self._looks_pay = False
        self._rest = 0.0
        # Steps without a draft since the last look; how many there are to be before the next, which may take its share of them;
        # what the last look took, and all looks in a row.
        self._idle = 0
        self._look_after = LOOK_STEPS
        self._look_share, self._look_part = LOOK_SHARES[-1], LOOK_PARTS[-1]
        self._look_s = self._looks_s = 0.0
        # Whether the last decision was for drafts.
        self._stopped = False

    @property
    def prior(self) -> float:
        """What is expected of a generation without a history."""
        return self._all.rate(PRIOR_ACCEPTANCE, ENGINE_PRIOR_TRIALS)

    def choose(self, acceptances: Sequence[Acceptance], made_tokens: float) -> int:
        """The length with most tokens per second, 0 where drafting loses.

        `made_tokens`: how much each generation has written, on average.
        """
        if self.is_due(len(acceptances)):
            self.decide(acceptances, made_tokens)
        return self.next()

    def is_due(self, count: int) -> bool:
        """Whether a step of `count` sequences needs a decision first."""
        return self._left == 0 or count != self._count or self._rows == 0

    def rests(self, count: int) -> bool:
        """Whether the next step, of `count` sequences, is one more without a draft, a look or a decision; it counts then as if
        `next` had told its length. Asked at every step where drafts do not pay, so without calls."""
        if (
            self.chosen
            or self._looking
            or self._has_looked
            or self._left <= 0
            or not self._rows
            or count != self._count
        ):
            return False
        if self._looks_pay and self._idle + 1 >= self._look_after:
            return False
        self._left -= 1
        self._idle += 1
        return True

    def next(self) -> int:
        """The length for the next step, as decided."""
        self._left -= 1
        if self.chosen == 0:
            self._idle += 1
            if not self._looking and (self._is_lucky() or self._is_time_to_look()):
                self._looking = 1
        self._has_looked = False
        return self.chosen

    @property
    def peeks(self) -> bool:
        """Whether this step, which is to have no draft, should show what one would have been worth."""
        return self.chosen == 0 and self._looking > 0

    def decide(
        self, acceptances: Sequence[Acceptance], made_tokens: float, bounds: Sequence[int] | None = None
    ) -> None:
        """`bounds`: the longest draft that each generation may use, as far as that is less than the longest."""
        self._bounds = bounds or [self.longest] * len(acceptances)
        count, prior = len(acceptances), self.prior
        weight = min(PRIOR_TRIALS, ENGINE_PRIOR_TRIALS + self._all.trials / 4)
        rates = [acceptance.rate(prior, weight) for acceptance in acceptances]
        speeds = [self._speed(rates, length) for length in range(self.longest + 1)]
        hopes = [speed if self._is_known(count, length) else HOPE * speed for length, speed in enumerate(speeds)]
        hopes[0] *= DRAFTS_ADVANTAGE
        best = max(range(len(hopes)), key=hopes.__getitem__)
        kept = hopes[self.chosen] if self.chosen == 0 else speeds[self.chosen]
        if hopes[best] < kept * self._advantage(speeds[self.chosen], count, made_tokens):
            best = self.chosen
        longest_run = RUN_STEPS if best else REST_RUN_STEPS
        self._run = FIRST_RUN_STEPS if self._rows == 0 or best != self.chosen else min(2 * self._run, longest_run)
        self._left = self._run
        self.chosen, self._count = best, count
        self.gain = speeds[best] / speeds[0]
        if best:
            self._idle, self._looking, self._look_trials, self._stopped = 0, 0, 0, True
            self._looks_s, self._look_part = 0.0, LOOK_PARTS[-1]
        elif not self._looking:
            self._plan_look(rates, hopes[0])
            self._plan_rest(count)

    def _plan_look(self, rates: Sequence[float], rest: float) -> None:
        """Whether to look now at what drafts would be worth, where steps without them make `rest` tokens per second or less."""
        stopped, self._stopped = self._stopped, False
        won = max(self._speed([1.0] * len(rates), length) for length in range(1, self.longest + 1)) / rest - 1
        self._rest, self._looks_pay = rest, won > 0
        self._look_share = min(max(LOOK_SHARE * won, LOOK_SHARES[0]), LOOK_SHARES[1])
        if not self._look_s:
            goes_on = self._looks_pay
        elif self._look_trials or stopped:
            lucky = self._pays([min(1.0, rate + self._luck(rate)) for rate in rates], rest)
            goes_on = lucky and self._look_trials < MOST_LOOK_TRIALS
        else:
            return
        if goes_on:
            steps = self._looking = math.ceil(LOOK_TRIALS / len(rates))
            self._look_trials += steps * len(rates)
            self._left = 1 + steps
        else:
            self._look_trials = 0

    def _plan_rest(self, count: int) -> None:
        """How many steps of `count` sequences go by before the next look, if no drafts come before."""
        looks_s = max(self._looks_s, self._look_s, self.drafting.seconds(count, 1))
        steps_s = self._look_part * self._look_share * max(self.steps.seconds(count), 1e-9)
        self._look_after = max(LOOK_STEPS, math.ceil(looks_s / steps_s))

    def _is_time_to_look(self) -> bool:
        if not self._looks_pay or self._idle < self._look_after:
            return False
        self._seen = self._right = 0
        self._expected = self._variance = self._looks_s = 0.0
        self._look_part = max(LOOK_PARTS[0], LOOK_FALL * self._look_part)
        return True

    def _is_lucky(self) -> bool:
        """Whether the last looks were right so often that drafts may have begun to pay."""
        if not self._has_looked or self._look_trials or not 0 < self._seen < MOST_LUCKY_STEPS * self._count:
            return False
        if self._right - self._expected <= LUCK_DEVIATIONS * math.sqrt(self._variance):
            return False
        return self._pays([self._right / self._seen] * self._count, self._rest)

    def _pays(self, rates: Sequence[float], rest: float) -> bool:
        return any(self._speed(rates, length) > rest for length in range(1, self.longest + 1))

    def _luck(self, rate: float) -> float:
        return LUCK_DEVIATIONS * math.sqrt(rate * (1 - rate) / (self._all.trials + 1))

    def looked(self, seconds: float) -> None:
        """A look's draft took so long."""
        self._looking -= 1
        self._idle, self._has_looked = 0, True
        self._look_s = seconds
        self._looks_s += seconds
        if not self._looking:
            self._left = 0  # with what it shows

    def _advantage(self, speed: float, count: int, made_tokens: float) -> float:
        """By how much another length must be better than the chosen one, which makes `speed` tokens per second."""
        if self._rows != count * (self.chosen + 1):
            return ADVANTAGE  # the shape changes anyhow
        low, high = HORIZON_TOKENS
        left_s = count * min(max(made_tokens, low), high) / speed
        change_s = self.steps.seconds(self._rows) if self._change_s is None else self._change_s
        return ADVANTAGE + change_s / left_s

    def _is_known(self, count: int, length: int) -> bool:
        return length == 0 or (self.steps.knows(count * (length + 1)) and self.drafting.knows(count, length))

    def _speed(self, rates: Sequence[float], length: int) -> float:
        """Tokens per second, by what is known."""
        count = len(rates)
        tokens = sum(
            _expected_tokens(rate, min(length, bound)) for rate, bound in zip(rates, self._bounds, strict=True)
        )
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
        if not usual_s:
            return  # nothing to hold it against
        self._changing_s += max(0.0, step_s - usual_s)
        if not self._settling:
            known_s = self._changing_s if self._change_s is None else self._change_s
            self._change_s = known_s + CHANGE_GAIN * (self._changing_s - known_s)

    def interrupted(self) -> None:
        """A step of another kind, with a prompt's tokens, came between: the next one's shape is a new one for the device."""
        self._rows = 0

    def saw(self, acceptance: Acceptance, offered: int, accepted: int) -> None:
        tried = min(accepted + 1, offered)
        if self._has_looked:
            rate = acceptance.rate(self.prior)
            self._seen, self._right = self._seen + tried, self._right + accepted
            self._expected, self._variance = self._expected + rate, self._variance + rate * (1 - rate)
        surprises = self._all.saw(tried, accepted)
        if acceptance.saw(tried, accepted) or surprises:
            self._left = 0


def _differs(hits: float, trials: float, rate: float, deviations: float) -> bool:
    return abs(hits / trials - rate) > deviations * math.sqrt(rate * (1 - rate) / trials)


def _expected_tokens(rate: float, length: int) -> float:
    return length + 1.0 if rate >= 1 else (1 - rate ** (length + 1)) / (1 - rate)
