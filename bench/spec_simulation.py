"""`python -m bench spec --simulate`: the choice of a draft's length on simulated devices, against every fixed length.

Costs of steps and drafts are tables of what was measured, times are simulated and seeds fixed: the same ratios on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from bench.report import print_table
from engines.runtime.draft_length import Acceptance, DraftLength

LONGEST = 4
NOISE = 0.04
# What a warm-up measures lies a little below the steps of requests, by as much for all of them and by some more for each.
WARM_UP_SHARE = (0.85, 1.0)
# More rows of each sequence than these make a draft dearer: the call, and each of its rows.
ALONG_ROWS = 16
FEED_S, FEED_ROW_S = 0.002, 0.000006


@dataclass(frozen=True)
class Device:
    """Seconds of a step and of making its drafts, by draft length from 0 on, for one stream and for eight; and what the first
    steps of a new shape cost beside."""

    name: str
    steps_s: dict[int, tuple[float, ...]]
    drafting_s: dict[int, tuple[float, ...]]
    change_s: dict[int, tuple[float, ...]]


def _milliseconds(*values: float) -> tuple[float, ...]:
    return tuple(value / 1000 for value in values)


DEVICES = (
    # A mixture of experts (35B-A3B) on an H200, measured.
    Device(
        "mixture",
        {1: _milliseconds(4.1, 4.9, 5.55, 7.0, 7.6), 8: _milliseconds(9.8, 18.8, 27.0, 31.0, 36.0)},
        {1: _milliseconds(0, 0.65, 1.6, 2.4, 3.0), 8: _milliseconds(0, 1.9, 4.0, 6.0, 7.5)},
        {1: _milliseconds(6, 2, 0.5), 8: _milliseconds(15, 4, 1)},
    ),
    # A dense model whose weights are read once for all rows.
    Device(
        "dense",
        {1: _milliseconds(30, 30.5, 31, 31.5, 32), 8: _milliseconds(34, 38, 42, 46, 50)},
        {1: _milliseconds(0, 1.2, 2.5, 3.7, 5), 8: _milliseconds(0, 1.6, 3.3, 5, 6.6)},
        {1: _milliseconds(8, 2, 0.5), 8: _milliseconds(15, 4, 1)},
    ),
    # A processor: every row costs nearly as much as the first.
    Device(
        "processor",
        {1: _milliseconds(14, 25, 36, 47, 58), 8: _milliseconds(95, 188, 280, 372, 465)},
        {1: _milliseconds(0, 2, 4, 6, 8), 8: _milliseconds(0, 12, 24, 36, 48)},
        {1: _milliseconds(1, 0, 0), 8: _milliseconds(2, 0, 0)},
    ),
)
STREAMS = (1, 8)
ACCEPTANCES = (1.0, 0.9, 0.7, 0.5, 0.2)
# What drafts are worth changes in the middle of an answer, which is twice as long then.
CHANGES = ((1.0, 0.2), (0.2, 1.0), (0.9, 0.5), (0.5, 0.9))


class Run:
    """An engine's steps on a device. Drafts are right at a rate, or first at one and then at another; their length is `length`,
    or chosen by `chooser`."""

    def __init__(
        self, device: Device, streams: int, rates: tuple[float, ...], seed: int, length: int | None = None
    ) -> None:
        self.device, self.streams, self.rates, self.length = device, streams, rates, length
        self.rate = rates[0]
        self.random = random.Random(seed)
        self.chooser = DraftLength(LONGEST)
        self.switches = self.looks = 0
        self._shape = self._in_shape = 0
        self._behind = 0.0
        if length is None:
            self._warm_up()

    def _warm_up(self) -> None:
        share = self.random.uniform(*WARM_UP_SHARE)
        for streams in sorted({1, self.streams}):
            for length in range(LONGEST + 1):
                self.chooser.steps.expect(
                    streams * (length + 1), share * self._noisy(self.device.steps_s[streams][length])
                )
                if length:
                    self.chooser.drafting.expect(streams, length, self._noisy(self.device.drafting_s[streams][length]))

    def _noisy(self, seconds: float) -> float:
        return seconds * self.random.uniform(1 - NOISE, 1 + NOISE)

    def answer(self, tokens: int) -> float:
        """Seconds until each stream has written so many tokens, on average."""
        self._shape, made, seconds = 0, 0.0, 0.0
        self._behind = ALONG_ROWS + 1.0  # the prompt
        self.chooser.interrupted()
        acceptances = [Acceptance() for _ in range(self.streams)]
        while made < tokens:
            self.rate = self.rates[int(made / tokens * len(self.rates))]
            length = self.length
            if length is None:
                length = self.chooser.choose(acceptances, made)
            accepted = self._accepted(length)
            step_s, drafting_s = self._step_s(length), self._drafting_s(length)
            seconds += step_s + drafting_s
            if self.length is None:
                self._tell(length, step_s, drafting_s, acceptances, accepted)
                if length == 0 and self.chooser.peeks:
                    seconds += self._look(acceptances)
            new = 1 + fmean(accepted)
            self._behind = self._behind + new if length == 0 else 1.0
            made += new
        return seconds

    def _accepted(self, length: int) -> list[int]:
        """How many tokens of each stream's draft are right."""
        found = []
        for _ in range(self.streams):
            right = 0
            while right < length and self.random.random() < self.rate:
                right += 1
            found.append(right)
        return found

    def _step_s(self, length: int) -> float:
        rows = self.streams * (length + 1)
        if rows != self._shape:
            self.switches += self._shape != 0
            self._shape, self._in_shape = rows, 0
        slow = self.device.change_s[self.streams]
        extra_s = slow[self._in_shape] if self._in_shape < len(slow) else 0.0
        self._in_shape += 1
        return self._noisy(self.device.steps_s[self.streams][length]) + extra_s

    def _drafting_s(self, length: int) -> float:
        if not length:
            return 0.0
        fed_s = FEED_S + FEED_ROW_S * self._behind * self.streams if self._behind > ALONG_ROWS else 0.0
        return fed_s + self._noisy(self.device.drafting_s[self.streams][length])

    def _tell(
        self,
        length: int,
        step_s: float,
        drafting_s: float,
        acceptances: Sequence[Acceptance],
        accepted: Sequence[int],
    ) -> None:
        told_s = drafting_s if length and self._behind <= ALONG_ROWS else None
        self.chooser.stepped(self.streams, self.streams * (length + 1), step_s, told_s)
        for acceptance, right in zip(acceptances, accepted, strict=True):
            if length:
                self.chooser.saw(acceptance, length, right)

    def _look(self, acceptances: Sequence[Acceptance]) -> float:
        """Seconds of a draft of one token each that is compared only."""
        self.looks += 1
        seconds = self._drafting_s(1)
        self._behind = 0.0
        self.chooser.looked(seconds)
        for acceptance, right in zip(acceptances, self._accepted(1), strict=True):
            self.chooser.saw(acceptance, 1, right)
        return seconds


@dataclass(frozen=True)
class Cell:
    """What came of one device, streams and acceptance: ratios of simulated speeds, of the average run and of the worst seed;
    `first` of an engine's first answer, `later` of its second."""

    device: str
    streams: int
    acceptance: str
    best_length: int
    first_vs_best: float
    first_vs_none: float
    later_vs_best: float
    later_vs_none: float
    worst_vs_best: float
    worst_vs_none: float
    switches: float
    looks: float


def simulate(device: Device, streams: int, rates: tuple[float, ...], seeds: int, tokens: int) -> Cell:
    """Answers of so many tokens for each of the acceptance `rates`."""
    tokens *= len(rates)
    fixed_s = [
        fmean(Run(device, streams, rates, seed, length).answer(tokens) for seed in range(seeds))
        for length in range(LONGEST + 1)
    ]
    runs = [Run(device, streams, rates, seed) for seed in range(seeds)]
    first_s = [run.answer(tokens) for run in runs]
    switches, looks = fmean(run.switches for run in runs), fmean(run.looks for run in runs)
    later_s = [run.answer(tokens) for run in runs]
    best_s, none_s = min(fixed_s), fixed_s[0]
    return Cell(
        device.name,
        streams,
        " then ".join(map(str, rates)),
        fixed_s.index(best_s),
        best_s / fmean(first_s),
        none_s / fmean(first_s),
        best_s / fmean(later_s),
        none_s / fmean(later_s),
        best_s / max(first_s),
        none_s / max(first_s),
        switches,
        looks,
    )


def simulate_all(seeds: int, tokens: int) -> list[Cell]:
    return [
        simulate(device, streams, rates, seeds, tokens)
        for device in DEVICES
        for streams in STREAMS
        for rates in (*((rate,) for rate in ACCEPTANCES), *CHANGES)
    ]


def run(seeds: int, tokens: int) -> dict[str, Any]:
    """Prints the table, and returns the object of the last line."""
    cells = simulate_all(seeds, tokens)
    rows = [
        [
            cell.device,
            str(cell.streams),
            cell.acceptance,
            str(cell.best_length),
            *(
                f"{ratio:.3f}"
                for ratio in (
                    cell.first_vs_best,
                    cell.first_vs_none,
                    cell.later_vs_best,
                    cell.later_vs_none,
                    cell.worst_vs_best,
                    cell.worst_vs_none,
                )
            ),
            f"{cell.switches:.1f}",
            f"{cell.looks:.1f}",
        ]
        for cell in cells
    ]
    columns = ["device", "streams", "acceptance", "best", "first/best", "first/none", "later/best", "later/none"]
    columns += ["worst/best", "worst/none", "switches", "looks"]
    print_table(f"{seeds} seeds, answers of {tokens} tokens: simulated speed of auto", columns, rows)
    steady, changing = cells_by_change(cells)
    return {
        "auto_vs_best_fixed_min": round(min(min(c.first_vs_best, c.later_vs_best) for c in steady), 4),
        "auto_vs_none_min": round(min(min(c.first_vs_none, c.later_vs_none) for c in steady), 4),
        "worst_seed_vs_best_fixed": round(min(c.worst_vs_best for c in steady), 4),
        "worst_seed_vs_none": round(min(c.worst_vs_none for c in steady), 4),
        "changing_vs_best_fixed_min": round(min(min(c.first_vs_best, c.later_vs_best) for c in changing), 4),
        "changing_vs_none_min": round(min(min(c.first_vs_none, c.later_vs_none) for c in changing), 4),
    }


def cells_by_change(cells: Sequence[Cell]) -> tuple[list[Cell], list[Cell]]:
    """Those whose acceptance stays, and those whose changes."""
    steady = [cell for cell in cells if cell.acceptance in map(str, ACCEPTANCES)]
    return steady, [cell for cell in cells if cell not in steady]
