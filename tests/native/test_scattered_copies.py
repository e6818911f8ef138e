"""Numbers that a card copies from place to place: the source that a build compiles, run on emulated threads."""

from __future__ import annotations

import os
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


def _between(text: str, first: str, last: str) -> str:
    assert text.count(first) == 1, first
    start = text.index(first)
    return text[start : text.index(last, start)]


def test_scattered_numbers_arrive_where_they_belong(tree: Path, tmp_path: Path) -> None:
    cuda = tree / "ggml/src/ggml-cuda"
    common, cpy = (cuda / "common.cuh").read_text(), (cuda / "cpy.cu").read_text()
    (tmp_path / "fastdiv.cuh").write_text(
        _between(common, "static const uint3 init_fastdiv_values(", "typedef void (*dequantize_kernel_t)")
    )
    scalar = "template<typename src_t, typename dst_t, bool transposed = false>\n"
    (tmp_path / "cpy.cuh").write_text(
        _between(cpy, "typedef void (*cpy_kernel_t)(", "static __device__ void cpy_blck_q8_0_f32(")
        + _between(cpy, scalar, "static void ggml_cpy_f32_q8_0_cuda(")
    )
    program = tmp_path / "copies"
    command = ["g++", "-std=c++17", "-O1", "-w", "-fpermissive", f"-I{tmp_path}", f"-I{EMULATED}"]
    subprocess.run([*command, "-o", str(program), str(EMULATED / "copies.cpp")], check=True, timeout=600)
    for switch in ("1", "0"):
        environment = {**os.environ, "GGML_CUDA_SCATTERED_COPIES": switch}
        ended = subprocess.run([str(program)], env=environment, timeout=600, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert len(ended.stdout.splitlines()) == 10
