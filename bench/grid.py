"""The cells of a comparison, what each form measured in them round by round, and which form counts."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.measures import Measures, median, paired_ratio
from bench.servers import HYDRA

MICRO_BATCH_TOKENS = 512  # llama-server's default: a stream decodes at most one token per so many of others' prompts


@dataclass(frozen=True)
class Cell:
    """`streams` requests at once, prompts of about `context_tokens`, each answered with `new_tokens` tokens."""

    streams: int
    context_tokens: int
    sampling: str
    new_tokens: int

    @classmethod
    def of(cls, streams: int, context_tokens: int, sampling: str, base_tokens: int) -> Cell:
        """Answers get longer where many long prompts come first, so that all streams still decode at once at the end."""
        return cls(
            streams,
            context_tokens,
            sampling,
            base_tokens + math.ceil((streams - 1) * context_tokens / MICRO_BATCH_TOKENS),
        )


Picker = Callable[[Measures], float | None]


def _whole(measures: Measures) -> float | None:
    return measures.whole


def _steady(measures: Measures) -> float | None:
    return measures.steady


@dataclass
class CellResults:
    """Measures by form, one entry per round; None where a form did not run."""

    cell: Cell
    rounds: dict[str, list[Measures | None]] = field(default_factory=dict)

    def add(self, form: str, round_index: int, measures: Measures) -> None:
        entries = self.rounds.setdefault(form, [])
        entries += [None] * (round_index + 1 - len(entries))
        entries[round_index] = measures

    def typical(self, form: str, pick: Picker) -> float | None:
        """The median over the rounds that this form ran."""
        return median(self._values(form, pick))

    def best_form(self, pick: Picker, at_least_rounds: int = 1) -> str | None:
        """llama-server's form with the highest median among those measured in so many rounds; None if none has one."""
        rated = {}
        for form in self.rounds:
            values = [value for value in self._values(form, pick) if value is not None]
            if form != HYDRA and len(values) >= max(1, at_least_rounds):
                rated[form] = statistics.median(values)
        return max(rated, key=lambda form: rated[form]) if rated else None

    def kept_forms(self) -> set[str]:
        """Forms worth another round: the best ones so far by whole run and by steady rate."""
        return {form for pick in (_whole, _steady) if (form := self.best_form(pick)) is not None}

    def counted_form(self, pick: Picker) -> str | None:
        """The best form that was measured more than once, so that one lucky round does not choose it."""
        return self.best_form(pick, 2) or self.best_form(pick)

    def ratio(self, pick: Picker) -> float | None:
        """Ours over the counted form's, pair by pair; None where either is missing."""
        form = self.counted_form(pick)
        return paired_ratio(self._values(HYDRA, pick), self._values(form, pick)) if form else None

    def _values(self, form: str, pick: Picker) -> list[float | None]:
        return [pick(entry) if entry else None for entry in self.rounds.get(form, [])]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> CellResults:
        """Reads what `as_dict` gave."""
        cell = Cell(**{f.name: values[f.name] for f in dataclasses.fields(Cell)})
        rounds = {form: [m and Measures(**m) for m in entries] for form, entries in values["rounds"].items()}
        return cls(cell, rounds)

    def as_dict(self) -> dict[str, Any]:
        rounds = {form: [m and dataclasses.asdict(m) for m in entries] for form, entries in self.rounds.items()}
        return {
            **dataclasses.asdict(self.cell),
            "ratio": self.ratio(_whole),
            "steady_ratio": self.ratio(_steady),
            "peer": self.counted_form(_whole),
            "steady_peer": self.counted_form(_steady),
            "rounds": rounds,
        }


def make_cells(streams: Sequence[int], contexts: Sequence[int], samplings: Sequence[str], base: int) -> list[Cell]:
    """In the order in which a life runs them: short contexts first, so that no old cells burden them."""
    return [Cell.of(s, c, sampling, base) for c in contexts for sampling in samplings for s in streams]


def last_line(results: Sequence[CellResults]) -> dict[str, Any]:
    """Ratios by number of streams at the first context; the worse sampling counts, and the forms that set them are named."""
    first = results[0].cell.context_tokens
    at_first = [r for r in results if r.cell.context_tokens == first]
    streams = sorted({r.cell.streams for r in at_first})
    return {
        "ratio": {str(s): _worst(r.ratio(_whole) for r in at_first if r.cell.streams == s) for s in streams},
        "steady": {str(s): _worst(r.ratio(_steady) for r in at_first if r.cell.streams == s) for s in streams},
        "peer": ", ".join(sorted({form for r in at_first if (form := r.counted_form(_whole))})),
    }


def _worst(values: Iterable[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return round(min(present), 4) if present else None


COLUMNS = (
    *("context", "streams", "sampling", "whole tok/s", "peer", "ratio", "steady tok/s", "peer", "ratio"),
    *("first token ms", "peer", "gap p50/p99 ms", "peer", "best form (whole; steady)"),
)


def table_row(results: CellResults) -> list[str]:
    """One row under COLUMNS; latencies of the peer are those of its best form by whole run."""
    cell, form, steady_form = results.cell, results.counted_form(_whole), results.counted_form(_steady)
    row = [str(cell.context_tokens), str(cell.streams), cell.sampling]
    for pick, best in ((_whole, form), (_steady, steady_form)):
        theirs = results.typical(best, pick) if best else None
        row += [_number(results.typical(HYDRA, pick), 1), _number(theirs, 1), _number(results.ratio(pick), 3)]
    row += [_milliseconds(results, name, lambda m: m.first_token_p50_s) for name in (HYDRA, form)]
    for name in (HYDRA, form):
        p50, p99 = (_milliseconds(results, name, pick) for pick in (lambda m: m.gap_p50_s, lambda m: m.gap_p99_s))
        row.append(f"{p50} / {p99}")
    return [*row, f"{form}; {steady_form}" if form != steady_form else str(form)]


def _milliseconds(results: CellResults, form: str | None, pick: Picker) -> str:
    seconds = results.typical(form, pick) if form else None
    return _number(None if seconds is None else seconds * 1000, 1)


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
