"""What steps and drafts are timed by, where one length of drafts is weighed against another."""

from __future__ import annotations

import resource
import time


class StepClock:
    """Seconds that grow while the calling thread, always the same one, is at work.

    Where a card computes (`apart`) that is the time that goes by. Where this thread computes itself its own time counts: other
    work on the machine holds all steps up, and would make one length look dearer than another; unless it had to wait for weights
    or memory from the disk, which is part of what a step costs.
    """

    def __init__(self, *, apart: bool) -> None:
        self._apart = apart
        self._seconds = 0.0
        self._last = self._read()

    def __call__(self) -> float:
        if self._apart:
            return time.monotonic()
        last, self._last = self._last, self._read()
        waited = self._last[2] > last[2]
        self._seconds += self._last[0] - last[0] if waited else self._last[1] - last[1]
        return self._seconds

    def _read(self) -> tuple[float, float, int]:
        """The time, this thread's own, and how often it waited for the disk."""
        return time.monotonic(), time.thread_time(), resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
