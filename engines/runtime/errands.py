"""Work of others on the core's thread, between its steps: exports and imports of state, erased slots.

An errand is a generator that gets the cache; what it does up to a `yield` is one slice. While generations run, errands get
a tenth of the time; a slice is never interrupted, so it must stay shorter than a step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any

from engines.runtime.prefix import PrefixCache

SHARE_WHILE_BUSY = 0.1
# Time that was saved up in quiet; it bounds what can come in one go.
MAX_CREDIT_S = 0.1
# How soon a next errand follows one that it depends on: a turn of the event loop.
NEXT_ERRAND_S = 0.003

log = logging.getLogger("hydra.engine.errands")

Work = Callable[[PrefixCache], Generator[None, None, Any]]


class Errand:
    """One piece of work and the future of its result. Cancelling the future closes the generator at its next yield."""

    def __init__(self, work: Work) -> None:
        self.result: Future[Any] = Future()
        self._work = work
        self._slices: Generator[None, None, Any] | None = None

    def advance(self, cache: PrefixCache) -> bool:
        """Runs one slice. False when the errand has ended; its future then holds the result, unless it was cancelled."""
        if self.result.cancelled():
            self.close()
            return False
        try:
            if self._slices is None:
                self._slices = self._work(cache)
            next(self._slices)
            return True
        except StopIteration as end:
            self._settle(end.value, None)
        except Exception as error:  # noqa: BLE001 -- whoever asked for it gets it
            self._settle(None, error)
        return False

    def fail(self, error: BaseException) -> None:
        self.close()
        self._settle(None, error)

    def close(self) -> None:
        """Lets the generator clean up behind itself."""
        if self._slices is not None:
            try:
                self._slices.close()
            except Exception:
                log.exception("an errand failed while it was being closed")

    def _settle(self, value: Any, error: BaseException | None) -> None:
        # A cancel may come between the question and the answer, so the future is claimed first.
        if self.result.set_running_or_notify_cancel():
            if error is None:
                self.result.set_result(value)
            else:
                self.result.set_exception(error)


class ErrandQueue:
    """Errands in turn, a slice each. `put` may be called from any thread, everything else from the core's."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._errands: deque[Errand] = deque()
        self._credit_s = 0.0
        self._looked_at = time.monotonic()

    def __len__(self) -> int:
        return len(self._errands)

    def put(self, work: Work) -> Future[Any]:
        errand = Errand(work)
        with self._changed:
            self._errands.append(errand)
            self._changed.notify()
        return errand.result

    def advance(self, cache: PrefixCache, *, busy: bool) -> bool:
        """Runs a slice of the next errand, if there is one and the time for it; behind a long step as many, one after the other,
        as its tenth allows. False when nothing was done."""
        now = time.monotonic()
        earned_s = (now - self._looked_at) * SHARE_WHILE_BUSY
        self._credit_s, self._looked_at = min(self._credit_s + earned_s, MAX_CREDIT_S), now
        if not self._errands or (busy and self._credit_s <= 0):
            return False
        self._slice(cache)
        if busy:
            # Whoever waited for this slice may have the next one ready in a moment; the next step could take seconds.
            until = now + min(earned_s, self._credit_s)
            while time.monotonic() < until and self._comes_by(until):
                self._slice(cache)
            self._credit_s -= time.monotonic() - now
        return True

    def _slice(self, cache: PrefixCache) -> None:
        errand = self._errands.popleft()
        if errand.advance(cache):
            with self._changed:
                self._errands.append(errand)

    def _comes_by(self, until: float) -> bool:
        """Whether there is an errand, or comes one before `until`, and soon."""
        with self._changed:
            if not self._errands:
                self._changed.wait(min(NEXT_ERRAND_S, max(0.0, until - time.monotonic())))
            return bool(self._errands)

    def fail_all(self, error: BaseException) -> None:
        """Nobody may wait for a result that will not come."""
        with self._changed:
            ending = list(self._errands)
            self._errands.clear()
        for errand in ending:
            errand.fail(error)
