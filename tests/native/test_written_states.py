"""Our build of llama.cpp against the one inside the wheel, where tokens are taken back: the same numbers from fewer states."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.synthetic_gguf import write_qwen35, write_qwen35moe

ROOT = Path(__file__).resolve().parent.parent.parent
pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed"),
]


def logits(model: Path, out: Path, **environment: str) -> np.ndarray:
    command = [sys.executable, "-m", "tests.native.taken_back_of", str(model), str(out)]
    others = {name: value for name, value in os.environ.items() if name != "LLAMA_CPP_LIB_PATH"}
    subprocess.run(command, cwd=ROOT, check=True, timeout=300, capture_output=True, env={**others, **environment})
    rows: np.ndarray = np.load(out)
    return rows


@pytest.mark.parametrize("write", [write_qwen35, write_qwen35moe])
def test_what_is_taken_back_leaves_the_state_before_it(
    tmp_path: Path, library: Path, write: Callable[..., Any]
) -> None:
    write(tmp_path / "m.gguf", nextn=True)
    ours = logits(tmp_path / "m.gguf", tmp_path / "ours.npy", LLAMA_CPP_LIB_PATH=str(library))
    theirs = logits(tmp_path / "m.gguf", tmp_path / "theirs.npy")
    assert ours.shape == theirs.shape and theirs.std() > 0.1
    # Compilers may round otherwise; a wrong state is another number altogether.
    assert np.abs(ours - theirs).max() < 1e-3 * theirs.std()
