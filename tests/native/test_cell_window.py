"""Our build of llama.cpp against the one inside the wheel: the same numbers, though it reads fewer cells."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.synthetic_gguf import write_gemma3, write_llama, write_qwen3, write_qwen35, write_qwen35moe

# Cells in llama.cpp's order: sums of them are rounded the same way.
SAME_CELLS = {"LLAMA_KV_CELLS_TOGETHER": "0"}
ROOT = Path(__file__).resolve().parent.parent.parent
pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed"),
]


def logits(model: Path, out: Path, program: str = "logits_of", **environment: str) -> np.ndarray:
    """What a program of this folder computes with the wheel's library, or with the one that `environment` names."""
    command = [sys.executable, "-m", f"tests.native.{program}", str(model), str(out)]
    others = {name: value for name, value in os.environ.items() if name != "LLAMA_CPP_LIB_PATH"}
    subprocess.run(command, cwd=ROOT, check=True, timeout=300, capture_output=True, env={**others, **environment})
    rows: np.ndarray = np.load(out)
    return rows


@pytest.mark.parametrize("write", [write_llama, write_qwen3, write_gemma3, write_qwen35, write_qwen35moe])
def test_sequences_that_share_a_cache_compute_the_same(
    tmp_path: Path, library: Path, write: Callable[[Path], None]
) -> None:
    write(tmp_path / "m.gguf")
    ours = logits(tmp_path / "m.gguf", tmp_path / "ours.npy", LLAMA_CPP_LIB_PATH=str(library), **SAME_CELLS)
    together = logits(tmp_path / "m.gguf", tmp_path / "together.npy", LLAMA_CPP_LIB_PATH=str(library))
    theirs = logits(tmp_path / "m.gguf", tmp_path / "theirs.npy")
    assert ours.shape == theirs.shape and theirs.std() > 0.1
    # Compilers may round otherwise; a cell too many or too few is another number altogether.
    assert np.abs(ours - theirs).max() < 1e-3 * theirs.std()
    # Where cells lie in another order, sums in half precision are cut elsewhere.
    assert np.abs(together - theirs).max() < 5e-3 * theirs.std()
    assert not np.array_equal(together, ours)
