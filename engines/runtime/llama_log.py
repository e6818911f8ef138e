"""llama.cpp's log lines: forwarded to our log, and collected where a figure is told nowhere else.

There is one callback for the whole process. Lines come on whatever thread called llama.cpp.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import llama_cpp

log = logging.getLogger("hydra.engine.llama")

_LEVELS = {2: logging.DEBUG, 3: logging.WARNING, 4: logging.ERROR}
_DEBUG, _WARNING, _ERROR = 2, 3, 4
# A model with recurrent state says so of every stretch of an image on a grid, whose tokens share positions.
_SHARED_POSITIONS = "non-consecutive token position"
_COLLECTED_LINES = 4096


class LogLines:
    """What llama.cpp said while it was collected: all `lines` up to a bound, and the texts of its `errors`."""

    def __init__(self, forward: bool) -> None:
        self.forward = forward
        self.lines: list[str] = []
        self.errors: list[str] = []

    def add(self, level: int, line: str) -> None:
        if len(self.lines) < _COLLECTED_LINES:
            self.lines.append(line)
            if level == _ERROR:
                self.errors.append(line)

    @property
    def reason(self) -> str:
        """The first error without the function's name in front: the later ones only repeat that it failed; "" if none."""
        return self.errors[0].partition(": ")[2] or self.errors[0] if self.errors else ""


_collectors: list[LogLines] = []


def _receive(level: int, text: bytes, _user_data: object) -> None:
    """llama.cpp's INFO is our DEBUG, since it describes every tensor at load."""
    line = text.decode("utf-8", "replace").strip()
    if not line:
        return
    for collector in _collectors:
        collector.add(level, line)
    if all(collector.forward for collector in _collectors):
        if level == _WARNING and _SHARED_POSITIONS in line:
            level = _DEBUG
        log.log(_LEVELS.get(level, logging.DEBUG), line)


# Kept by the module: llama.cpp calls it as long as the process lives.
_callback = llama_cpp.llama_log_callback(_receive)


def callback() -> object:
    """For a library beside libllama that logs by itself."""
    return _callback


def install() -> None:
    """Makes llama.cpp's lines ours. Calling it again is harmless."""
    llama_cpp.llama_log_set(_callback, ctypes.c_void_p(0))


@contextmanager
def collected(*, forward: bool = True) -> Iterator[LogLines]:
    """Collects the lines of the block; with `forward=False` nothing of it reaches our own log."""
    install()
    collector = LogLines(forward)
    _collectors.append(collector)
    try:
        yield collector
    finally:
        _collectors.remove(collector)
