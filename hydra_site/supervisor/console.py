"""What the supervisor says: one plain line per stage with the seconds since the start, the same on a terminal and in a
file.
"""

import sys
import time
from typing import TextIO


class Console:
    """Writes lines to `stream`. A reader that went away (a closed pipe or terminal) silences it and harms nothing else."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._started = time.monotonic()
        self._silent = False

    def stage(self, text: str) -> None:
        """Say that a stage is reached: `[  1.2 s] text`."""
        self.line(f"[{time.monotonic() - self._started:5.1f} s] {text}")

    def line(self, text: str) -> None:
        """Say `text` as a line of its own, at once."""
        if self._silent:
            return
        try:
            print(text, file=self._stream, flush=True)
        except OSError:
            # Nobody reads any more: the run goes on, and its end must not fail on a farewell.
            self._silent = True
