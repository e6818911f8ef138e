"""The cells of sequences as rows, and those in use as bits: what ordered sets of them would say, whatever comes and goes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from native.state_cells import STATE_CELLS

HERE = Path(__file__).resolve().parent
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")


def test_rows_and_bits_are_ordered_sets(tmp_path: Path) -> None:
    """Random changes of all kinds that a cache makes; under sanitizers of addresses and of undefined behaviour."""
    (tmp_path / "llama.h").write_text("#include <cstdint>\ntypedef int32_t llama_pos;\n")
    for change in STATE_CELLS:
        if not change.old:
            (tmp_path / Path(change.path).name).write_text(change.new)
    program = tmp_path / "rows"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-fsanitize=undefined,address"]
    build = ["g++", *flags, f"-I{tmp_path}", str(HERE / "rows_of.cpp"), "-o", str(program)]
    built = subprocess.run(build, capture_output=True, text=True, timeout=300, check=False)
    assert built.returncode == 0, built.stderr[-3000:]
    ended = subprocess.run([str(program)], capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-3000:]
