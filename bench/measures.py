"""What recorded streams say: pure arithmetic, times in seconds on one monotonic clock."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StreamRecord:
    """One answered request. `arrivals` holds the time of every chunk that carried text."""

    sent_at: float
    arrivals: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    @property
    def first_token_s(self) -> float:
        return self.arrivals[0] - self.sent_at

    @property
    def tokens_per_chunk(self) -> float:
        """A token without text of its own (half a character, a control token) sends no chunk; the others stand for it."""
        return self.completion_tokens / len(self.arrivals)


@dataclass(frozen=True)
class Measures:
    """One round of one cell. Rates in tokens per second, `prompt_tokens` of a stream on average.

    `steady` is None where the streams never decoded all at once.
    """

    whole: float
    steady: float | None
    first_token_p50_s: float
    gap_p50_s: float
    gap_p99_s: float
    prompt_tokens: float
    cached_share: float

    @classmethod
    def of(cls, records: Sequence[StreamRecord]) -> Measures:
        gaps = [later - earlier for r in records for earlier, later in zip(r.arrivals, r.arrivals[1:], strict=False)]
        return cls(
            whole=whole_rate(records),
            steady=steady_rate(records),
            first_token_p50_s=percentile([r.first_token_s for r in records], 0.5),
            gap_p50_s=percentile(gaps, 0.5),
            gap_p99_s=percentile(gaps, 0.99),
            prompt_tokens=statistics.fmean(r.prompt_tokens for r in records),
            cached_share=sum(r.cached_tokens for r in records) / sum(r.prompt_tokens for r in records),
        )


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between neighbours, as numpy's default; 0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def whole_rate(records: Sequence[StreamRecord]) -> float:
    """All tokens over the time from the first request sent to the last token."""
    seconds = max(r.arrivals[-1] for r in records) - min(r.sent_at for r in records)
    return sum(r.completion_tokens for r in records) / seconds


def steady_rate(records: Sequence[StreamRecord]) -> float | None:
    """Tokens over time in the window in which every stream decodes: after the last first token, up to the first last one.

    None when there is no such window, or when a stream shows fewer than two tokens in it.
    """
    start = max(r.arrivals[0] for r in records)
    end = min(r.arrivals[-1] for r in records)
    inside = [sum(start < at <= end for at in r.arrivals) for r in records]
    if end <= start or min(inside) < 2:
        return None
    return sum(count * r.tokens_per_chunk for count, r in zip(inside, records, strict=True)) / (end - start)


def median(values: Sequence[float | None]) -> float | None:
    """The median of what is there; None when nothing is."""
    present = [value for value in values if value is not None]
    return statistics.median(present) if present else None


def paired_ratio(ours: Sequence[float | None], theirs: Sequence[float | None]) -> float | None:
    """The median over rounds of ours / theirs, each pair measured one after the other."""
    return median([a / b for a, b in zip(ours, theirs, strict=False) if a is not None and b is not None])
