"""States of delta nets that are computed where they lie: none is gathered without a reason, and the numbers stay the same."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.native.test_cell_window import logits
from tests.synthetic_gguf import write_qwen35, write_qwen35moe

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed"),
]
# Steps as tests/native/gathered_of.py lists them: with a shared state, one that two hold is gathered once.
TAKES_NOTHING_BACK = [False, False, False, False, True, False, False, False, False]
TAKES_BACK = [True, False, False, False, True, False, True, True, False]


@pytest.mark.parametrize("write", [write_qwen35, write_qwen35moe])
def test_states_are_gathered_only_where_they_come_from_elsewhere(
    tmp_path: Path, library: Path, write: Callable[..., Any]
) -> None:
    write(tmp_path / "m.gguf", nextn=True)
    ours = logits(tmp_path / "m.gguf", tmp_path / "ours.npy", "gathered_of", LLAMA_CPP_LIB_PATH=str(library))
    theirs = logits(tmp_path / "m.gguf", tmp_path / "theirs.npy", "gathered_of")
    assert (ours > 0).tolist() == [TAKES_NOTHING_BACK, TAKES_BACK]
    assert (theirs == ours.max()).all(), "llama.cpp gathers the states of every step"


@pytest.mark.parametrize("program", ["logits_of", "taken_back_of"])
def test_states_in_place_and_gathered_ones_make_the_same_numbers(tmp_path: Path, library: Path, program: str) -> None:
    """Without fusion a processor copies new states into their places as before, and graphs that serve once are never of the wrong
    kind."""
    write_qwen35(tmp_path / "m.gguf", nextn=True)
    names = {"LLAMA_CPP_LIB_PATH": str(library)}
    fused = logits(tmp_path / "m.gguf", tmp_path / "fused.npy", program, **names)
    names |= {"GGML_CPU_DISABLE_FUSION": "1", "LLAMA_GRAPH_REUSE_DISABLE": "1"}
    copied = logits(tmp_path / "m.gguf", tmp_path / "copied.npy", program, **names)
    assert np.array_equal(fused, copied)
