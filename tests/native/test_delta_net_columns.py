"""A delta net's step with several columns of a state in each warp: the source that a build compiles, run on emulated threads."""

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


def test_columns_together_have_the_bits_of_columns_alone(tree: Path, tmp_path: Path) -> None:
    cuda = tree / "ggml/src/ggml-cuda"
    text = (cuda / "gated_delta_net.cu").read_text()
    (tmp_path / "gated_delta_net.cu").write_text(text[: text.index("static void ggml_cuda_op_gated_delta_net_impl(")])
    (tmp_path / "gated_delta_net.cuh").touch()
    (tmp_path / "ggml-cuda").mkdir()
    (tmp_path / "ggml-cuda/common.cuh").touch()
    shutil.copy(cuda / "gated-delta-net-columns.cuh", tmp_path / "ggml-cuda")
    program = tmp_path / "delta_net"
    command = ["g++", "-std=c++17", "-O1", "-ffp-contract=off", "-w", "-fpermissive", f"-I{tmp_path}", f"-I{EMULATED}"]
    subprocess.run([*command, "-o", str(program), str(EMULATED / "delta_net.cpp")], check=True, timeout=600)
    for switch in ("1", "0"):
        environment = {**os.environ, "GGML_CUDA_GDN_COLUMNS": switch}
        ended = subprocess.run([str(program)], env=environment, timeout=600, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert ended.stdout.count("ok ") == 10
