"""When each piece of a state was copied, proved and handed on (`python -m bench kv --trace`): whether these overlap, and what a
piece costs besides."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bench.report import print_table
from engines.runtime.state_codec import StateCodec
from engines.runtime.state_forms import Proof

_COPIES = ("take_block", "take_part", "enter_block", "enter_part")


@dataclass(frozen=True)
class Span:
    """What was done to the piece at an address, from when to when (seconds of `time.perf_counter`)."""

    what: str
    address: int
    size_bytes: int
    began_s: float
    ended_s: float


class Trace:
    """What happens while one `watches`. Any thread may note something."""

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self.spans: list[Span] = list(spans)

    def note(self, what: str, data: Any, began_s: float, ended_s: float = 0.0) -> None:
        """`ended_s` 0: it was a moment."""
        seen = np.frombuffer(data, dtype=np.uint8)
        self.spans.append(Span(what, seen.ctypes.data, seen.nbytes, began_s, ended_s or began_s))

    def proof(self, prove: Proof) -> Proof:
        """`prove`, noted."""

        def noted(data: memoryview) -> bytes:
            began_s = time.perf_counter()
            proof = prove(data)
            self.note("prove", data, began_s, time.perf_counter())
            return proof

        return noted

    @contextmanager
    def watching(self, codec: StateCodec | None) -> Iterator[Trace]:
        """Notes every piece that `codec` copies. A queued copy lasts until the codec's next call has returned."""
        assert codec is not None
        names = (*_COPIES, "settle")
        for name in names:
            setattr(codec, name, self._noted(name, getattr(codec, name)))
        try:
            yield self
        finally:
            for name in names:
                delattr(codec, name)

    def _noted(self, name: str, call: Any) -> Any:
        def noted(*args: Any, **options: Any) -> Any:
            began_s = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                data = next((one for one in args if isinstance(one, np.ndarray)), b"")
                what = f"{name} queued" if options.get("queued") else name
                self.note(what, data, began_s, time.perf_counter())

        return noted

    def figures(self, elapsed_s: float, pieces: int) -> dict[str, float]:
        """Shares of the time in which pieces were copied, proved, both or neither, and milliseconds that a piece took."""
        copied, proved = (
            _joined(self._copies()),
            _joined((s.began_s, s.ended_s) for s in self.spans if s.what == "prove"),
        )
        copying_s, proving_s, both_s = _length(copied), _length(proved), _length(_common(copied, proved))
        calls = [s.ended_s - s.began_s for s in self.spans if s.what.split()[0] in _COPIES]
        proofs = [s.ended_s - s.began_s for s in self.spans if s.what == "prove"]
        return {
            "copying": copying_s / elapsed_s,
            "proving": proving_s / elapsed_s,
            "both": both_s / elapsed_s,
            "neither": 1 - (copying_s + proving_s - both_s) / elapsed_s,
            "call_ms": 1e3 * statistics.median(calls or [0.0]),
            "proof_ms": 1e3 * statistics.median(proofs or [0.0]),
            "piece_ms": 1e3 * elapsed_s / max(1, pieces),
            "elapsed_ms": 1e3 * elapsed_s,
        }

    def _copies(self) -> Iterable[tuple[float, float]]:
        calls = sorted((s for s in self.spans if s.what.split()[0] in (*_COPIES, "settle")), key=lambda s: s.began_s)
        for call, after in zip(calls, [*calls[1:], *calls[-1:]], strict=True):
            yield call.began_s, (after if call.what.endswith("queued") else call).ended_s

    def told(self) -> list[dict[str, Any]]:
        return [asdict(span) for span in sorted(self.spans, key=lambda s: s.began_s)]


def print_figures(rounds: list[dict[str, Any]]) -> None:
    """Of the traced rounds of each case, one out and one in."""
    columns = list(rounds[0]["figures"])
    rows = [[f"{one['case']} {one['way']}", *(f"{one['figures'][key]:.2f}" for key in columns)] for one in rounds]
    print_table(
        "One traced round each, shares of its time and ms", ["case", *(key.replace("_", " ") for key in columns)], rows
    )


def _joined(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for began, ended in sorted(spans):
        if joined and began <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], ended))
        else:
            joined.append((began, ended))
    return joined


def _common(ours: list[tuple[float, float]], theirs: list[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(max(a, c), min(b, d)) for a, b in ours for c, d in theirs if max(a, c) < min(b, d)]


def _length(spans: list[tuple[float, float]]) -> float:
    return sum(ended - began for began, ended in spans)
