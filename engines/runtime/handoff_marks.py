"""When what happened in a move's pause, in milliseconds since the pause began at the engine that tells it."""

from __future__ import annotations

import time


class Marks:
    """`ms` by what happened, each the first time only. Any thread may note."""

    def __init__(self) -> None:
        self._began_at = time.monotonic()
        self.ms: dict[str, float] = {}

    def note(self, name: str, at: float | None = None) -> None:
        """`at`: when, by time.monotonic; now where it is not said."""
        if name not in self.ms:
            self.ms[name] = round(1000 * ((time.monotonic() if at is None else at) - self._began_at), 3)
