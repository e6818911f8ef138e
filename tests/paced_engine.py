"""Steps that take longer while a test wants that, so that no answer ends before the test has done with it what it is about.

In this process `slow_steps`; in an engine's own `PacedEngine.slowed` (`python -m tests.paced_engine FILE STEP_S TOKEN_S --config
...`: as long as FILE is there). With `token_s` each token of a prompt takes so much longer all the time: a tiny model computes a
prompt about as fast as a store gives it back, and a fast machine computes it faster, where an engine is right to do that.
Everything else is the real engine, at its own speed before and afterwards.
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
from tests.slow_card import slowed

STEP_S, STEP_HERE_S = 0.01, 0.005
# A hundred tokens take ten times as long as the fixed part of a restore.
PROMPT_TOKEN_S = 0.0004


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

    def __init__(
        self, folder: Path, model_path: Path, *, step_s: float = STEP_S, token_s: float = 0.0, **settings: Any
    ) -> None:
        super().__init__(folder, model_path, **settings)
        self._pace_path = folder / f"pace-{self.config.port}"
        self._module = ("tests.paced_engine", str(self._pace_path), str(step_s), str(token_s))

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

    path, step_s, token_s = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    prompts_slowed = slowed(llama_cpp.llama_decode, 0.0, token_s)
    llama_cpp.llama_decode = _slowed(prompts_slowed, lambda: step_s if path.exists() else 0.0)
    sys.exit(main(sys.argv[4:]))
