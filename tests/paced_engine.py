"""Steps that take longer while a test wants that, so that no answer ends before the test has done with it what it is about.

In this process `slow_steps`; in an engine's own `PacedEngine.slowed` (`python -m tests.paced_engine FILE STEP_S --config ...`: as
long as FILE is there). Everything else is the real engine, at its own speed before and afterwards.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llama_cpp

from tests.engine_process import EngineProcess

STEP_S, STEP_HERE_S = 0.01, 0.005


def _slowed(decode: Callable[[Any, Any], int], pause_s: Callable[[], float]) -> Callable[[Any, Any], int]:
    def slow(context: Any, batch: Any) -> int:
        status = decode(context, batch)
        if (pause := pause_s()) > 0:
            time.sleep(pause)
        return status

    return slow


@contextmanager
def slow_steps(step_s: float = STEP_HERE_S) -> Iterator[None]:
    """Each call of llama.cpp in this process takes so much longer meanwhile."""
    decode = llama_cpp.llama_decode
    llama_cpp.llama_decode = _slowed(decode, lambda: step_s)
    try:
        yield
    finally:
        llama_cpp.llama_decode = decode


class PacedEngine(EngineProcess):
    """An engine that a test may slow down."""

    def __init__(self, folder: Path, model_path: Path, *, step_s: float = STEP_S, **settings: Any) -> None:
        super().__init__(folder, model_path, **settings)
        self._pace_path = folder / f"pace-{self.config.port}"
        self._module = ("tests.paced_engine", str(self._pace_path), str(step_s))

    @contextmanager
    def slowed(self) -> Iterator[None]:
        """Each of its steps takes `step_s` longer meanwhile."""
        self._pace_path.touch()
        try:
            yield
        finally:
            self._pace_path.unlink()


if __name__ == "__main__":
    from engines.runtime.__main__ import main

    path, step_s = Path(sys.argv[1]), float(sys.argv[2])
    llama_cpp.llama_decode = _slowed(llama_cpp.llama_decode, lambda: step_s if path.exists() else 0.0)
    sys.exit(main(sys.argv[3:]))
