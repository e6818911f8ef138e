"""Weights are read once for the rows of all sequences of a step, not once for each."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.native.test_cell_window import logits
from tests.synthetic_gguf import write_qwen35, write_qwen35moe

DELTA_NETS = 6  # of 8 layers; each multiplies its result with a weight
pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed"),
]


@pytest.mark.parametrize("write", [write_qwen35, write_qwen35moe])
def test_no_product_is_computed_for_each_sequence_apart(
    tmp_path: Path, library: Path, write: Callable[..., Any]
) -> None:
    write(tmp_path / "m.gguf")
    ours = logits(tmp_path / "m.gguf", tmp_path / "ours.npy", "apart_of", LLAMA_CPP_LIB_PATH=str(library))
    theirs = logits(tmp_path / "m.gguf", tmp_path / "theirs.npy", "apart_of")
    assert ours.tolist() == [0, 0]
    assert theirs.tolist() == [DELTA_NETS, DELTA_NETS], "llama.cpp has mended it itself"
