"""Where a request's time went, under the names of the router's terms: each can be held against what was expected of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class TimesTold:
    """Seconds, by the engine's own clock but for `fixed_s`: what the request spent beside the engine's line and steps before its
    first token. `queue_s` is until its prompt began and while only others' prompts were computed, `restore_s` while its
    beginning came in from a store, `prefill_s` its own prompt with others' steps between, `decode_s` all behind the first token.
    """

    queue_s: float
    restore_s: float
    fixed_s: float
    prefill_s: float
    decode_s: float

    def to_dict(self) -> dict[str, float]:
        """As JSON for rows, pages and logs, in the order in which the time passes."""
        return {name: round(value, 6) for name, value in asdict(self).items()}


def times_told(timings: Mapping[str, Any], first_token_s: float | None, duration_s: float) -> TimesTold | None:
    """Of an answer's timings; None where the engine told none, or no token came."""
    line_s, prompt_s = seconds(timings, "queue_ms"), seconds(timings, "prompt_ms")
    if line_s is None or prompt_s is None or first_token_s is None:
        return None
    restore_s = min(line_s, seconds(timings, "restore_ms") or 0.0)
    wait_s = min(prompt_s, seconds(timings, "prompt_wait_ms") or 0.0)
    return TimesTold(
        line_s - restore_s + wait_s,
        restore_s,
        max(0.0, first_token_s - line_s - prompt_s),
        prompt_s - wait_s,
        max(0.0, duration_s - first_token_s),
    )


def whole_first_token_s(timings: Mapping[str, Any], duration_s: float) -> float | None:
    """When the engine had the first token of an answer in one piece that came after `duration_s`: all but its writing."""
    written_s = seconds(timings, "predicted_ms")
    if written_s is None or seconds(timings, "prompt_ms") is None:
        return None
    return max(0.0, duration_s - written_s)


def seconds(timings: Mapping[str, Any], name: str) -> float | None:
    """A duration that is told in milliseconds; None for what is none."""
    value = timings.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value / 1000 if is_number and 0 <= value < 1e9 else None
