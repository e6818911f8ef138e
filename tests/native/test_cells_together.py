"""A prompt's parts look at about as many cells as it has tokens, in a cache that other conversations have come to and left."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.native.spans_of import STEPS
from tests.native.test_cell_window import logits
from tests.synthetic_gguf import write_qwen3, write_qwen35

PADDED_TOKENS = 512  # llama.cpp rounds both ends of a span to 256 cells
pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed"),
]


@pytest.mark.parametrize("write", [write_qwen3, write_qwen35])
def test_parts_of_a_prompt_lie_together(tmp_path: Path, library: Path, write: Callable[..., Any]) -> None:
    write(tmp_path / "m.gguf")
    ours = logits(tmp_path / "m.gguf", tmp_path / "ours.npy", "spans_of", LLAMA_CPP_LIB_PATH=str(library))
    theirs = logits(tmp_path / "m.gguf", tmp_path / "theirs.npy", "spans_of")
    parts, steps = ours[:-STEPS], ours[-STEPS:]
    together = parts[:, 0] <= parts[:, 1] + PADDED_TOKENS
    # Where no stretch of empty cells is long enough a part goes elsewhere.
    assert np.count_nonzero(together) >= 0.85 * len(parts)
    assert parts[:, 0].sum() < 0.25 * theirs[:-STEPS, 0].sum()
    # A stream's span grows with its tokens, not with the cells that others left between them.
    assert np.ptp(steps[:, 0]) <= PADDED_TOKENS
