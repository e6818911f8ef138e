"""What `bench handoff` says of its moves: the tables, and the last line."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.measures import median
from bench.report import print_table

# A conversation of a real model has more.
REAL_STATE_BYTES = 64_000_000


@dataclass(frozen=True)
class Move:
    """One conversation: moved live, then idle. Times in seconds; `pause_steps` in median gaps of its own stream."""

    model: str
    tokens: int
    prefill_s: float
    live_s: float
    live_bytes: int
    pause_s: float
    pause_steps: float
    engine_pause_ms: float
    idle_s: float
    idle_bytes: int
    copy_s: float
    way: str
    idle_phases_ms: dict[str, float]
    live_phases_ms: dict[str, float]
    # When what happened in the pause: at the source since its stop, at the target since its manifest.
    source_marks_ms: dict[str, float] = field(default_factory=dict)
    target_marks_ms: dict[str, float] = field(default_factory=dict)

    @property
    def wall_vs_copy(self) -> float:
        return self.idle_s / self.copy_s

    @property
    def idle_vs_prefill(self) -> float:
        return self.prefill_s / self.idle_s


def summary(moves: list[Move]) -> dict[str, float]:
    """The bench's last line. Ratios at the longest context that was measured, the worst model counting; see handoff.py."""
    longest, shortest = max(move.tokens for move in moves) * 0.75, min(move.tokens for move in moves) * 1.25
    long_moves = _by_model(moves, lambda move: move.tokens >= longest)
    short_moves = _by_model(moves, lambda move: move.tokens <= shortest)
    real = [found for found in long_moves if found[0].idle_bytes >= REAL_STATE_BYTES]
    slopes = [slope_ms_per_10k(found) for found in _by_model(moves, lambda _: True)]
    return {
        "wall_vs_copy": round(max(median([m.wall_vs_copy for m in found]) or 0.0 for found in real or long_moves), 3),
        "idle_vs_prefill": round(min(median([m.idle_vs_prefill for m in found]) or 0.0 for found in long_moves), 2),
        "pause_steps_p50": round(median([m.pause_steps for m in moves]) or 0.0, 2),
        "pause_slope_ms_per_10k": round(max(slopes), 3),
        "pause_ms_p50": round(1000 * (median([m.pause_s for m in moves]) or 0.0), 3),
        "idle_beyond_copy_ms": round(
            1000 * max(median([m.idle_s - m.copy_s for m in found]) or 0.0 for found in short_moves), 3
        ),
    }


def _by_model(moves: list[Move], wanted: Callable[[Move], bool]) -> list[list[Move]]:
    """Those that are wanted; models without any are left out."""
    found = [[move for move in moves if move.model == model and wanted(move)] for model in {m.model for m in moves}]
    return [of_model for of_model in found if of_model]


def slope_ms_per_10k(moves: list[Move]) -> float:
    """How much longer a pause is with 10,000 tokens more, by least squares; 0 for one length."""
    if len({move.tokens for move in moves}) < 2:
        return 0.0
    slope, _ = statistics.linear_regression([m.tokens / 10_000 for m in moves], [m.pause_s * 1000 for m in moves])
    return slope


COLUMNS = (
    "model",
    "tokens",
    "prefill s",
    "live s",
    "live MB",
    "pause ms",
    "engines' ms",
    "steps",
    "idle s",
    "idle MB",
    "vs copy",
    "vs prefill",
)


def row(move: Move) -> str:
    return " ".join(_cells(move))


def _cells(move: Move) -> list[str]:
    return [
        move.model,
        str(move.tokens),
        f"{move.prefill_s:.3f}",
        f"{move.live_s:.3f}",
        f"{move.live_bytes / 1e6:.1f}",
        f"{move.pause_s * 1000:.2f}",
        f"{move.engine_pause_ms:.2f}",
        f"{move.pause_steps:.2f}",
        f"{move.idle_s:.4f}",
        f"{move.idle_bytes / 1e6:.1f}",
        f"{move.wall_vs_copy:.2f}",
        f"{move.idle_vs_prefill:.1f}",
    ]


def show(moves: list[Move]) -> None:
    print_table("handoffs", COLUMNS, [_cells(move) for move in moves])
    for title, found in (
        ("milliseconds of idle moves", [move.idle_phases_ms for move in moves]),
        ("milliseconds of live moves", [move.live_phases_ms for move in moves]),
        (
            "pauses: when what happened at the source, in milliseconds since the stop",
            [move.source_marks_ms for move in moves],
        ),
        ("the same at the target, since the manifest began to come", [move.target_marks_ms for move in moves]),
    ):
        names = list(dict.fromkeys(name for phases in found for name in phases))
        rows = [
            [move.model, str(move.tokens), move.way, *(f"{phases.get(name, 0.0):.2f}" for name in names)]
            for move, phases in zip(moves, found, strict=True)
        ]
        print_table(title, ("model", "tokens", "way", *names), rows)
