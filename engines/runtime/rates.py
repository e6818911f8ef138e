"""How fast this engine is, learned from its own steps: for whoever chooses among engines.

Two lines are fitted with a memory that fades: seconds of a prompt's chunk by its tokens, by the pairs of tokens that see each
other and by what else lies in the cache, and seconds of a decode step by what lies in the cache, beside an average for each
number of streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engines.runtime.generation import Generation
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
# Of chunks that are more alike than this the terms cannot be told apart.
LEAST_UNLIKE = 1e-3
# Of a step's seconds so much is not for the tokens in the cache.
LEAST_EMPTY_SHARE = 0.1
# The terms that are sought, all of them first: tokens, pairs, others' pairs.
_FORMS = ((0, 1, 2), (0, 1), (0, 2), (0,))


@dataclass(frozen=True)
class StepWork:
    """What a step is to compute: chunks of prompts, and streams that decode with drafts behind them. `prompts` says whose chunks
    they are, and of how many tokens; `own_pairs` are those of a chunk's tokens and all that its own sequence then holds,
    `own_tokens` what the streams' sequences hold."""

    tokens: int
    pairs: float
    streams: int
    drafted: int
    prompts: tuple[tuple[Generation, int], ...] = ()
    own_pairs: float = 0.0
    own_tokens: int = 0

    @classmethod
    def of(cls, rows: Sequence[Row]) -> StepWork | None:
        """To be asked before the step, which changes what the slots hold. None for a step of an image."""
        tokens, pairs, streams, drafted, own_pairs, own_tokens = 0, 0.0, 0, 0, 0.0, 0
        prompts: list[tuple[Generation, int]] = []
        for row in rows:
            if row.span is not None:
                return None
            count = row.count - len(row.draft)
            if count > 1:
                tokens += count
                pairs += pairs_of(len(row.slot.sequence), count)
                own_pairs += float(count) * (len(row.slot.sequence) + count)
                # What had to give way computes its text again; its first token is written.
                if row.slot.generation is not None and row.slot.generation.first_token_at is None:
                    prompts.append((row.slot.generation, count))
            else:
                streams += 1
                drafted += len(row.draft)
                own_tokens += len(row.slot.sequence)
        return cls(tokens, pairs, streams, drafted, tuple(prompts), own_pairs, own_tokens)

    def beside(self, resident_tokens: int) -> float:
        """Pairs of the chunks' tokens and others' in a cache that then holds `resident_tokens`."""
        return max(0.0, float(self.tokens) * resident_tokens - self.own_pairs)


class PrefillRate:
    """Seconds of a prompt's tokens: `token_s` each, `pair_s` for each pair, and `beside_s` for each pair of one of them and one
    of others' tokens in the cache, which are looked at too. Least squares through zero, of which nothing may be negative."""

    def __init__(self, token_s: float) -> None:
        # Sums of products of tokens, pairs and others' pairs, and of each with the seconds.
        weight = PRIOR_SAMPLES * 256.0**2
        self._products = np.zeros((3, 3))
        self._seconds = np.zeros(3)
        self._products[0, 0], self._seconds[0] = weight, weight * token_s
        self.token_s, self.pair_s, self.beside_s = token_s, 0.0, 0.0

    def note(self, tokens: float, pairs: float, seconds: float, beside: float = 0.0) -> None:
        """A chunk of `tokens` that made so many `pairs` (see `pairs_of`), and `beside` with others' tokens, took `seconds`."""
        chunk = np.array((tokens, pairs, beside))
        self._products = KEEP * self._products + np.outer(chunk, chunk)
        self._seconds = KEEP * self._seconds + chunk * seconds
        for known in _FORMS:
            found = self._solved(known)
            if found is not None:
                self.token_s, self.pair_s, self.beside_s = found
                return

    def _solved(self, known: tuple[int, ...]) -> tuple[float, float, float] | None:
        """The rates where only `known` count; None where chunks that are too alike, or a negative rate, say otherwise."""
        products, sums = self._products[np.ix_(known, known)], self._seconds[list(known)]
        scale = np.sqrt(np.diag(products))
        if not scale.all():
            return None
        if len(known) > 1 and np.linalg.det(products / np.outer(scale, scale)) < LEAST_UNLIKE ** (len(known) - 1):
            return None
        found = np.linalg.solve(products, sums)
        if min(found) <= 0:
            return None
        rates = dict(zip(known, found.tolist(), strict=True))
        return rates.get(0, 0.0), rates.get(1, 0.0), rates.get(2, 0.0)

    def seconds(self, tokens: float, pairs: float, beside: float = 0.0) -> float:
        return tokens * self.token_s + pairs * self.pair_s + beside * self.beside_s


def pairs_of(start: int, count: int) -> float:
    """What `count` tokens behind `start` add to the square of the context, the measure of pairs that see each other."""
    return float(count) * (2 * start + count)


class StepRate:
    """Seconds of a step in which a number of streams decode, with so many tokens in the cache, of which so many are their own."""

    def __init__(self) -> None:
        # By streams: mean seconds, tokens and own tokens of a step; beside them products of how far steps are off these means.
        # Plain numbers: this is noted at every step, and arrays of three cost more than what is done with them.
        self._means: dict[int, tuple[float, float, float]] = {}
        self._all_all = self._all_own = self._own_own = 0.0
        self._all_s = self._own_s = 0.0
        self._slopes = (0.0, 0.0)

    @property
    def resident_token_s(self) -> float:
        """For each token in the cache."""
        return self._slopes[0]

    @property
    def own_token_s(self) -> float:
        """On top, for each token of those who decode: a step may look at theirs only, or longer."""
        return self._slopes[1]

    def note(self, streams: int, resident_tokens: int, seconds: float, own_tokens: int = 0) -> None:
        mean = self._means.get(streams)
        if mean is None:
            self._means[streams] = (seconds, float(resident_tokens), float(own_tokens))
            return
        off_s, off_all, off_own = seconds - mean[0], resident_tokens - mean[1], own_tokens - mean[2]
        self._all_all = KEEP * self._all_all + off_all * off_all
        self._all_own = KEEP * self._all_own + off_all * off_own
        self._own_own = KEEP * self._own_own + off_own * off_own
        self._all_s = KEEP * self._all_s + off_all * off_s
        self._own_s = KEEP * self._own_s + off_own * off_s
        self._means[streams] = (mean[0] + GAIN * off_s, mean[1] + GAIN * off_all, mean[2] + GAIN * off_own)
        self._slopes = self._bounded(self._fitted())

    def _fitted(self) -> tuple[float, float]:
        """Seconds by tokens and own tokens; of one of them alone where both cannot be told apart, or one would be negative."""
        all_all, all_own, own_own = self._all_all, self._all_own, self._own_own
        all_s, own_s = self._all_s, self._own_s
        determinant = all_all * own_own - all_own * all_own
        if determinant > LEAST_UNLIKE * all_all * own_own:
            by_all = (all_s * own_own - own_s * all_own) / determinant
            by_own = (own_s * all_all - all_s * all_own) / determinant
            if by_all >= 0 and by_own >= 0:
                return by_all, by_own
        gains = [(sums * sums / square, place) for place, (sums, square) in enumerate(((all_s, all_all), (own_s, own_own)))
                 if square > 0 and sums > 0]  # fmt: skip
        if not gains:
            return 0.0, 0.0
        return (all_s / all_all, 0.0) if max(gains)[1] == 0 else (0.0, own_s / own_own)

    def _bounded(self, slopes: tuple[float, float]) -> tuple[float, float]:
        """So that with nothing in the cache a step of any kind still takes LEAST_EMPTY_SHARE of what it takes."""
        most = 1.0
        for mean_s, tokens, own_tokens in self._means.values():
            by_tokens_s = slopes[0] * tokens + slopes[1] * own_tokens
            if by_tokens_s > 0:
                most = min(most, (1 - LEAST_EMPTY_SHARE) * mean_s / by_tokens_s)
        return slopes[0] * most, slopes[1] * most

    def expected_s(self, streams: int, resident_tokens: int, own_tokens: int = 0) -> float | None:
        mean = self._means.get(streams)
        if mean is None:
            return None
        by_all, by_own = self._slopes
        return mean[0] + by_all * (resident_tokens - mean[1]) + by_own * (own_tokens - mean[2])

    def steps(self) -> list[tuple[int, float]]:
        """Seconds by number of streams as they would be with nothing in the cache, ascending; never falling."""
        found: list[tuple[int, float]] = []
        by_all, by_own = self._slopes
        for streams, (mean_s, tokens, own_tokens) in sorted(self._means.copy().items()):
            empty_s = mean_s - by_all * tokens - by_own * own_tokens
            found.append((streams, max(0.0, empty_s, found[-1][1] if found else 0.0)))
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
        # Seconds of all steps with chunks of prompts.
        self.prompts_s = 0.0
        self._outliers = 0

    def stepped(self, work: StepWork, resident_tokens: int, acceptance: float, seconds: float) -> None:
        """A step took `seconds`; of drafted tokens the share `acceptance` is right."""
        if work.tokens:
            self._share(work, seconds)
        if not work.tokens:
            per_token_s = seconds / (1 + acceptance * work.drafted / max(1, work.streams))
            if self._is_likely(per_token_s, self.decode.expected_s(work.streams, resident_tokens, work.own_tokens)):
                self.decode.note(work.streams, resident_tokens, per_token_s, work.own_tokens)
            return
        if work.tokens < MIN_CHUNK_TOKENS:
            return
        own_s = seconds - (self._beside_s(work, resident_tokens) if work.streams else 0.0)
        beside = work.beside(resident_tokens)
        if own_s > 0 and self._is_likely(own_s, self.prefill.seconds(work.tokens, work.pairs, beside)):
            self.prefill.note(work.tokens, work.pairs, own_s, beside)

    def _beside_s(self, work: StepWork, resident_tokens: int) -> float:
        """What the streams in a step with chunks would take alone."""
        return self.decode.expected_s(work.streams, resident_tokens, work.own_tokens) or 0.0

    def _share(self, work: StepWork, seconds: float) -> None:
        """A step with chunks is each prompt's own by its tokens; what is not its own it has waited for."""
        self.prompts_s += seconds
        for generation, tokens in work.prompts:
            generation.computed_s += seconds * tokens / work.tokens
            generation.prompt_wait_s = self.prompts_s - (generation.prompts_before_s or 0.0) - generation.computed_s

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
