"""Our build of llama.cpp against the one inside the wheel, where tokens are taken back: the same numbers from fewer states."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.native.test_cell_window import SAME_CELLS, logits
from tests.synthetic_gguf import write_qwen35, write_qwen35moe

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed"),
]


@pytest.mark.parametrize("write", [write_qwen35, write_qwen35moe])
def test_what_is_taken_back_leaves_the_state_before_it(
    tmp_path: Path, library: Path, write: Callable[..., Any]
) -> None:
    write(tmp_path / "m.gguf", nextn=True)
    names = {"LLAMA_CPP_LIB_PATH": str(library), **SAME_CELLS}
    ours = logits(tmp_path / "m.gguf", tmp_path / "ours.npy", "taken_back_of", **names)
    theirs = logits(tmp_path / "m.gguf", tmp_path / "theirs.npy", "taken_back_of")
    assert ours.shape == theirs.shape and theirs.std() > 0.1
    # Compilers may round otherwise; a wrong state is another number altogether.
    assert np.abs(ours - theirs).max() < 1e-3 * theirs.std()
