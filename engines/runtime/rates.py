"""How fast this engine is, learned from its own steps: for whoever chooses among engines.

Two lines are fitted with a memory that fades: seconds of a prompt's chunk by its tokens and by the pairs of tokens that see
each other, and seconds of a decode step by what lies in the cache, beside an average for each number of streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engines.runtime.planner import Row

# How much of what was learned is kept from one sample to the next.
KEEP = 0.98
GAIN = 0.1
# Chunks that are shorter tell more of a call's fixed cost than of a token's.
MIN_CHUNK_TOKENS = 16
# A step that took so many times what was expected was held up by something else: a page fault, another process.
OUTLIER = 8.0
OUTLIERS_IN_A_ROW = 4
# Until anything was measured.
UNKNOWN_TOKEN_S = 0.005
# A memory of few samples must not be believed against the first timing.
PRIOR_SAMPLES = 4.0


@dataclass(frozen=True)
class StepWork:
    """What a step is to compute: chunks of prompts, and streams that decode with drafts behind them."""

    tokens: int
    pairs: float
    streams: int
    drafted: int

    @classmethod
    def of(cls, rows: Sequence[Row]) -> StepWork | None:
        """To be asked before the step, which changes what the slots hold. None for a step of an image."""
        tokens, pairs, streams, drafted = 0, 0.0, 0, 0
        for row in rows:
            if row.span is not None:
                return None
            count = row.count - len(row.draft)
            if count > 1:
                tokens += count
                pairs += pairs_of(len(row.slot.sequence), count)
            else:
                streams += 1
                drafted += len(row.draft)
        return cls(tokens, pairs, streams, drafted)


class PrefillRate:
    """Seconds of a prompt's tokens: `token_s` each and `pair_s` for each pair, by least squares through zero."""

    def __init__(self, token_s: float) -> None:
        # Sums of products: tokens², tokens·pairs, pairs², tokens·seconds, pairs·seconds.
        weight = PRIOR_SAMPLES * 256.0**2
        self._tt, self._tp, self._pp, self._ts, self._ps = weight, 0.0, 0.0, weight * token_s, 0.0
        self.token_s, self.pair_s = token_s, 0.0

    def note(self, tokens: float, pairs: float, seconds: float) -> None:
        """A chunk of `tokens` that made so many `pairs` (see `pairs_of`) took `seconds`."""
        self._tt = KEEP * self._tt + tokens * tokens
        self._tp = KEEP * self._tp + tokens * pairs
        self._pp = KEEP * self._pp + pairs * pairs
        self._ts = KEEP * self._ts + tokens * seconds
        self._ps = KEEP * self._ps + pairs * seconds
        determinant = self._tt * self._pp - self._tp * self._tp
        token_s, pair_s = self._ts / self._tt, 0.0
        # Of chunks that all begin alike the two cannot be told apart.
        if determinant > 1e-3 * self._tt * self._pp:
            both = (
                (self._ts * self._pp - self._ps * self._tp) / determinant,
                (self._ps * self._tt - self._ts * self._tp) / determinant,
            )
            if min(both) > 0:
                token_s, pair_s = both
        self.token_s, self.pair_s = token_s, pair_s

    def seconds(self, tokens: float, pairs: float) -> float:
        return tokens * self.token_s + pairs * self.pair_s


def pairs_of(start: int, count: int) -> float:
    """What `count` tokens behind `start` add to the square of the context, the measure of pairs that see each other."""
    return float(count) * (2 * start + count)


class StepRate:
    """Seconds of a step in which a number of streams decode."""

    def __init__(self) -> None:
        self._means: dict[int, tuple[float, float]] = {}
        self._covariance = 0.0
        self._variance = 0.0

    @property
    def resident_token_s(self) -> float:
        return max(0.0, self._covariance / self._variance) if self._variance > 0 else 0.0

    def note(self, streams: int, resident_tokens: int, seconds: float) -> None:
        known = self._means.get(streams)
        if known is None:
            self._means[streams] = (seconds, float(resident_tokens))
            return
        mean_s, mean_tokens = known
        off_s, off_tokens = seconds - mean_s, resident_tokens - mean_tokens
        self._covariance = KEEP * self._covariance + off_s * off_tokens
        self._variance = KEEP * self._variance + off_tokens * off_tokens
        self._means[streams] = (mean_s + GAIN * off_s, mean_tokens + GAIN * off_tokens)

    def expected_s(self, streams: int, resident_tokens: int) -> float | None:
        known = self._means.get(streams)
        return None if known is None else known[0] + self.resident_token_s * (resident_tokens - known[1])

    def steps(self) -> list[tuple[int, float]]:
        """Seconds by number of streams as they would be with nothing in the cache, ascending; never falling."""
        found: list[tuple[int, float]] = []
        for streams, (mean_s, mean_tokens) in sorted(self._means.copy().items()):
            empty_s = max(mean_s / 2, mean_s - self.resident_token_s * mean_tokens)
            found.append((streams, max(empty_s, found[-1][1] if found else 0.0)))
        return found


class Rates:
    """Written by the core's thread after each step, read from the event loop: a value may be one step old."""

    def __init__(self, prompt_token_s: float | None, step_s: float | None) -> None:
        """What a warm-up measured: of a prompt's token, and of a step with one stream."""
        token_s = prompt_token_s or UNKNOWN_TOKEN_S
        self.prefill = PrefillRate(token_s)
        self.decode = StepRate()
        self.decode.note(1, 0, step_s or 2 * token_s)
        self.request_s = 0.0
        self._outliers = 0

    def stepped(self, work: StepWork, resident_tokens: int, acceptance: float, seconds: float) -> None:
        """A step took `seconds`; of drafted tokens the share `acceptance` is right."""
        if not work.tokens:
            per_token_s = seconds / (1 + acceptance * work.drafted / max(1, work.streams))
            if self._is_likely(per_token_s, self.decode.expected_s(work.streams, resident_tokens)):
                self.decode.note(work.streams, resident_tokens, per_token_s)
            return
        if work.tokens < MIN_CHUNK_TOKENS:
            return
        own_s = seconds - (self.decode.expected_s(work.streams, resident_tokens) or 0.0 if work.streams else 0.0)
        if own_s > 0 and self._is_likely(own_s, self.prefill.seconds(work.tokens, work.pairs)):
            self.prefill.note(work.tokens, work.pairs, own_s)

    def ended(self, slot_s: float) -> None:
        """A generation held its slot for so long."""
        self.request_s = slot_s if not self.request_s else self.request_s + GAIN * (slot_s - self.request_s)

    def _is_likely(self, seconds: float, expected_s: float | None) -> bool:
        """False for what something else held up; if it goes on like that, it is how things are now."""
        if not expected_s or seconds < OUTLIER * expected_s or self._outliers >= OUTLIERS_IN_A_ROW:
            self._outliers = 0
            return True
        self._outliers += 1
        return False
