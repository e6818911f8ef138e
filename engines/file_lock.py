"""A file's lock among processes, for a bounded time. Standard library only."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path

PAUSE_S = 0.02


@contextlib.contextmanager
def locked(path: Path, wait_s: float, *, shared: bool = False) -> Iterator[None]:
    """Holds the file's lock, alone or with others who share it. Raises TimeoutError where others keep it for longer than
    `wait_s`, OSError."""
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    deadline = time.monotonic() + wait_s
    with path.open("w") as stream:
        while True:
            try:
                fcntl.flock(stream, kind | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{path} has been locked by others for {wait_s:.0f} s") from None
                time.sleep(PAUSE_S)
        yield
