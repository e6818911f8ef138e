"""Activations that a card keeps: found for the tensor they were made of, and for no other."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.native.test_followed_masks import run

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler"),
]


def test_only_what_a_tensor_holds_now_is_found(tmp_path: Path, tree: Path, library: Path) -> None:
    includes = (f"-I{tree / 'ggml' / folder}" for folder in ("include", "src/ggml-cuda"))
    run(tmp_path / "kept_rows_of", "-O1", "-Wall", *includes, f"-L{library}", "-lggml-base", f"-Wl,-rpath,{library}")
