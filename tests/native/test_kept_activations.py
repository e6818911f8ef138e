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
    text = (tree / "ggml" / "src" / "ggml-cuda" / "common.cuh").read_text(encoding="utf-8")
    begin, end = text.index("struct ggml_cuda_kept_rows {"), text.index("struct ggml_backend_cuda_context {")
    (tmp_path / "kept_rows.h").write_text(text[begin:end], encoding="utf-8")
    includes = (f"-I{tmp_path}", f"-I{tree / 'ggml' / 'include'}")
    run(tmp_path / "kept_rows_of", "-O1", "-Wall", *includes, f"-L{library}", "-lggml-base", f"-Wl,-rpath,{library}")
