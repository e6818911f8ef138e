"""What an engine's first tokens really take, beside what its own rates say: learned from each answer, shown as terms of a cost.

An engine measures its steps. It cannot see what a request costs beside them (site, template, network, a busy machine), nor that
its card takes a moment to come out of idleness, nor that all of it is slower today than its steps were, nor who else computes on
its device. Each of these is learned from what an answer told of just that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

# How much an answer counts against all before it: what else a machine has to do changes within seconds.
GAIN = 0.2
# What a request costs beside the engine's steps, until it was seen; and how many answers that guess weighs.
USUAL_FIXED_S = 0.01
PRIOR_ANSWERS = 2
# Of a prompt that is computed in less, the clock's own noise says as much as the engine's speed.
SMALL_S = 0.01
# Nothing that is learned may turn a choice around by more than this.
MOST_DRIFT, LEAST_DRIFT = 8.0, 0.25
MOST_FIXED_S = 5.0
# One answer counts as so many times what was expected at most: something else may have held it up.
MOST_SURPRISE = 3.0
# An engine that did nothing for so long is met asleep: clocks are down and caches cold.
ASLEEP_S = 10.0
# What waking takes until it was seen, and never less, so that a cost shows that the engine was asleep.
LEAST_WAKE_S = 0.001
# How much slower an engine is for each other one at work on its device, until it was seen; two that share it fairly would be 1.
USUAL_CROWD, MOST_CROWD = 0.5, 4.0


@dataclass(frozen=True, slots=True)
class Calibration:
    """A prompt takes `drift` times what the engine's rates promise and `crowd` times more for each engine at work on the same
    device, a first token `fixed_s` beside that, and `wake_s` after idleness."""

    fixed_s: float = USUAL_FIXED_S
    drift: float = 1.0
    wake_s: float = LEAST_WAKE_S
    crowd: float = USUAL_CROWD


class FirstTokens:
    """Of one engine, as one process sees it. `usual_fixed_s` is what other engines' requests cost beside their steps."""

    def __init__(self, usual_fixed_s: float = USUAL_FIXED_S) -> None:
        self.now = Calibration(usual_fixed_s)
        self.answers = 0

    def note(
        self, promised_s: float, prompt_s: float, fixed_s: float, *, asleep: bool = False, neighbours: int = 0
    ) -> None:
        """A prompt took `prompt_s` for which the engine's rates promised `promised_s`, and a first token `fixed_s` beside, while
        `neighbours` computed on the same device."""
        if promised_s <= 0 or prompt_s <= 0 or fixed_s < 0:
            return
        self.answers += 1
        if asleep:
            self._note_wake(promised_s, prompt_s, fixed_s)
        elif neighbours:
            self._note_crowd(prompt_s / promised_s, neighbours)
        else:
            self._note_usual(promised_s, prompt_s, fixed_s)

    def _note_usual(self, promised_s: float, prompt_s: float, fixed_s: float) -> None:
        now, gain = self.now, self._gain
        seen_s = min(fixed_s, MOST_SURPRISE * max(now.fixed_s, USUAL_FIXED_S))
        ratio = min(max(prompt_s / promised_s, now.drift / MOST_SURPRISE), now.drift * MOST_SURPRISE)
        # Twice as slow and twice as fast must cancel out.
        drift = now.drift * (ratio / now.drift) ** (gain * promised_s / (promised_s + SMALL_S))
        self.now = replace(
            now,
            fixed_s=min(MOST_FIXED_S, now.fixed_s + gain * (seen_s - now.fixed_s)),
            drift=min(MOST_DRIFT, max(LEAST_DRIFT, drift)),
        )

    def _note_crowd(self, ratio: float, neighbours: int) -> None:
        now = self.now
        seen = min(max(0.0, (ratio / now.drift - 1.0) / neighbours), MOST_SURPRISE * max(now.crowd, USUAL_CROWD))
        self.now = replace(now, crowd=min(MOST_CROWD, now.crowd + GAIN * (seen - now.crowd)))

    def _note_wake(self, promised_s: float, prompt_s: float, fixed_s: float) -> None:
        now = self.now
        late_s = prompt_s - now.drift * promised_s + max(0.0, fixed_s - now.fixed_s)
        most_s = MOST_SURPRISE * (now.drift * promised_s + now.fixed_s + now.wake_s)
        seen_s = min(max(LEAST_WAKE_S, late_s), most_s)
        self.now = replace(now, wake_s=max(LEAST_WAKE_S, now.wake_s + self._gain * (seen_s - now.wake_s)))

    @property
    def _gain(self) -> float:
        return max(GAIN, 1 / (self.answers + PRIOR_ANSWERS))
