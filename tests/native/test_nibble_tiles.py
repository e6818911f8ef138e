"""Our build's products of packed 4-bit weights, and of Q6_K weights, with several tokens against the wheel's: the same bits."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.native.test_cell_window import logits

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed"),
]


def test_tiles_of_columns_and_tokens_compute_the_same(tmp_path: Path, library: Path) -> None:
    ours = logits(tmp_path, tmp_path / "ours.npy", "products_of", LLAMA_CPP_LIB_PATH=str(library))
    theirs = logits(tmp_path, tmp_path / "theirs.npy", "products_of")
    assert theirs.std() > 1
    # Where this processor has the instruction both libraries are built for it, and otherwise it is the same code.
    assert np.array_equal(ours, theirs)
