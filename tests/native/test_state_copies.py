"""Our build of llama.cpp writes large states past a processor's caches: to the byte what it was given."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.synthetic_gguf import write_llama

ROOT = Path(__file__).resolve().parent.parent.parent
pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed"),
]


def test_large_states_enter_and_leave_to_the_byte(tmp_path: Path, library: Path) -> None:
    """From and to memory at any distance from a border of cache lines, on both sides of the sizes from which it is done; a
    sequence beside them keeps what it has, and so does the memory around them."""
    model = tmp_path / "m.gguf"
    write_llama(model, layers=32)
    command = [sys.executable, "-m", "tests.native.copies_of", str(model)]
    environment = {**os.environ, "LLAMA_CPP_LIB_PATH": str(library)}
    ended = subprocess.run(command, cwd=ROOT, timeout=600, capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr[-3000:]
