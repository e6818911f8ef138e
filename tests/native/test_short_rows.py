"""Rows that a card puts together: the source that a build compiles, run on emulated threads."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

EMULATED = Path(__file__).resolve().parent / "emulated"
pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler"),
]


def test_rows_of_any_length_are_put_together(tree: Path, tmp_path: Path) -> None:
    text = (tree / "ggml/src/ggml-cuda/concat.cu").read_text()
    assert "dim3 block_dim(threads, rows, 1);" in text
    text = text[: text.index("void ggml_cuda_op_concat(")]
    launch = r"(concat_\w+<T, \w+>)<<<(\w+), (\w+), 0, stream>>>\s*\("
    text, count = re.subn(
        launch, r"ggml_cuda_kernel_launch(\1, ggml_cuda_kernel_launch_params(\2, \3, 0, stream), ", text
    )
    assert count == 3 and "<<<" not in text
    (tmp_path / "concat.cu").write_text(text)
    # The division itself is tested with scattered copies.
    (tmp_path / "concat.cuh").write_text(
        "#define CUDA_CONCAT_BLOCK_SIZE 256\n"
        "struct uint2 { unsigned x, y; };\n"
        "static uint3 init_fastdiv_values(uint64_t by) { return {0, 0, unsigned(by)}; }\n"
        "static uint2 fast_div_modulo(unsigned n, uint3 by) { return {n/by.z, n % by.z}; }\n"
    )
    program = tmp_path / "concat"
    command = ["g++", "-std=c++17", "-O1", "-w", "-fpermissive", f"-I{tmp_path}", f"-I{EMULATED}"]
    subprocess.run([*command, "-o", str(program), str(EMULATED / "concat.cpp")], check=True, timeout=600)
    ended = subprocess.run([str(program)], timeout=600, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len(ended.stdout.splitlines()) == 12
