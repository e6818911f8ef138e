"""What an engine's first tokens really take, beside what its own rates say: learned from each answer, shown as terms of a cost.

An engine measures its steps. It cannot see what a request costs beside them (site, template, network, a busy machine), nor that
its card takes a moment to come out of idleness, nor that all of it is slower today than its steps were. A line is fitted with a
memory that fades: seconds of a first token by the seconds that the engine's rates promise.
"""

from __future__ import annotations

from dataclasses import dataclass

# How much of what was learned is kept from one answer to the next.
KEEP = 0.95
# What a request costs beside the engine's steps, until it was seen; and how many answers that guess weighs.
USUAL_FIXED_S = 0.01
PRIOR_ANSWERS = 3.0
# Answers count by the share that is off: a long prompt must not drown the short ones, nor one below this count without end.
SMALL_S = 0.02
# Nothing that is learned may turn a choice around by more than this.
MOST_DRIFT, LEAST_DRIFT = 8.0, 0.25
MOST_FIXED_S = 5.0
# One answer moves the line by so many times at most: something else may have held it up.
MOST_SURPRISE = 2.0
# An engine that did nothing for so long is met asleep: clocks are down and caches cold.
ASLEEP_S = 10.0
# What waking takes until it was seen, and never less, so that a cost shows that the engine was asleep.
LEAST_WAKE_S = 0.001
WAKE_GAIN = 0.3


@dataclass(frozen=True, slots=True)
class Calibration:
    """A first token takes `drift` times what the engine's rates promise, `fixed_s` beside that, and `wake_s` after idleness."""

    fixed_s: float = USUAL_FIXED_S
    drift: float = 1.0
    wake_s: float = LEAST_WAKE_S


class FirstTokens:
    """Of one engine, as one process sees it. `usual_fixed_s` is what other engines' requests cost beside their steps."""

    def __init__(self, usual_fixed_s: float = USUAL_FIXED_S) -> None:
        self.now = Calibration(usual_fixed_s)
        self.answers = 0
        self._usual_fixed_s = usual_fixed_s
        # Weighted sums: of answers, of promised and actual seconds, and of their products.
        self._w = self._wx = self._wy = self._wxx = self._wxy = 0.0

    def note(self, promised_s: float, actual_s: float, *, asleep: bool) -> None:
        """A first token came after `actual_s` in which nothing was waited for; the engine's rates promised `promised_s`."""
        if promised_s < 0 or actual_s <= 0:
            return
        now = self.now
        expected_s = now.fixed_s + now.drift * promised_s
        self.answers += 1
        if asleep:
            seen_s = min(max(LEAST_WAKE_S, actual_s - expected_s), MOST_SURPRISE * (expected_s + now.wake_s))
            wake_s = max(LEAST_WAKE_S, now.wake_s + WAKE_GAIN * (seen_s - now.wake_s))
            self.now = Calibration(now.fixed_s, now.drift, wake_s)
            return
        actual_s = min(max(actual_s, expected_s / MOST_SURPRISE), expected_s * MOST_SURPRISE)
        weight = 1 / max(expected_s, SMALL_S) ** 2
        self._w = KEEP * self._w + weight
        self._wx = KEEP * self._wx + weight * promised_s
        self._wy = KEEP * self._wy + weight * actual_s
        self._wxx = KEEP * self._wxx + weight * promised_s * promised_s
        self._wxy = KEEP * self._wxy + weight * promised_s * actual_s
        self.now = Calibration(*self._line(), now.wake_s)

    def _line(self) -> tuple[float, float]:
        """Seconds at nothing promised, and for each promised second; what is usual weighs as much as PRIOR_ANSWERS of now."""
        few, drifts = PRIOR_ANSWERS / max(self.now.fixed_s, SMALL_S) ** 2, PRIOR_ANSWERS / self.now.drift**2
        w, wy = self._w + few, self._wy + few * self._usual_fixed_s
        xx, xy = self._wxx + drifts, self._wxy + drifts
        fixed_s = (wy * xx - xy * self._wx) / (w * xx - self._wx * self._wx)
        fixed_s = min(MOST_FIXED_S, max(0.0, fixed_s))
        drift = (xy - fixed_s * self._wx) / xx
        return fixed_s, min(MOST_DRIFT, max(LEAST_DRIFT, drift))
