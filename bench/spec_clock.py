"""Speeds of answers by the wall's clock, or by the processor time that a server took for them.

Where the processor is the device, other work on the machine makes a server wait but hardly makes it compute more: by its own
processor time forms can be compared on a machine that is not quiet.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from bisect import bisect_left
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from bench.errors import BenchError
from bench.measures import StreamRecord, steady_rate, whole_rate

CLOCKS = ("wall", "processor")
SAMPLE_S = 0.02
NANOSECONDS = 1e9


def processor_s(pid: int) -> float:
    """Seconds that all threads of a process have run for. Raises BenchError where the system does not tell."""
    total_ns = 0
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
                total_ns += int((task / "schedstat").read_text().split()[0])
    except OSError as error:
        raise BenchError(f"the processor time of process {pid} cannot be read: {error}; say --clock wall") from error
    return total_ns / NANOSECONDS


class ProcessorClock:
    """Samples one process while it answers; in between, lines."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._at: list[float] = []
        self._used_s: list[float] = []

    def sample(self) -> None:
        self._at.append(time.monotonic())
        self._used_s.append(processor_s(self.pid))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async def sample_on() -> None:
            while True:
                self.sample()
                await asyncio.sleep(SAMPLE_S)

        task = asyncio.create_task(sample_on())
        try:
            yield
        finally:
            task.cancel()
        self.sample()

    def used_s(self, start: float, end: float) -> float:
        """Between two times of the monotonic clock."""
        return self._until(end) - self._until(start)

    def _until(self, at: float) -> float:
        index = min(max(bisect_left(self._at, at), 1), len(self._at) - 1)
        before, after = self._at[index - 1], self._at[index]
        share = (at - before) / (after - before) if after > before else 0.0
        return self._used_s[index - 1] + share * (self._used_s[index] - self._used_s[index - 1])


def speed(records: Sequence[StreamRecord], clock: ProcessorClock | None) -> float:
    """Tokens per second while all streams decode, or of the whole where they never do."""
    steady = steady_rate(records)
    if steady is not None:
        start, end = max(r.arrivals[0] for r in records), min(r.arrivals[-1] for r in records)
    else:
        start, end = min(r.sent_at for r in records), max(r.arrivals[-1] for r in records)
    rate = whole_rate(records) if steady is None else steady
    if clock is None:
        return rate
    return rate * (end - start) / max(clock.used_s(start, end), 1e-9)
