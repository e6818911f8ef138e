"""A delta net's steps with several columns of a state in each warp or lane: what a build compiles, run on emulated threads."""

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

# Copies into shared memory arrive when they are waited for.
COPIES = {
    "const unsigned place = ggml_cuda_cvta_generic_to_shared(to);": "",
    'asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" : : "r"(place), "l"(from) : "memory");': "emulated_load(to, from);",
    'asm volatile("cp.async.commit_group;" : : : "memory");': "emulated_end_chunk();",
    'asm volatile("cp.async.wait_group 1;" : : : "memory");': "emulated_wait(1);",
}


def test_columns_together_have_the_bits_of_columns_alone(tree: Path, tmp_path: Path) -> None:
    cuda = tree / "ggml/src/ggml-cuda"
    text = (cuda / "gated_delta_net.cu").read_text()
    (tmp_path / "gated_delta_net.cu").write_text(text[: text.index("static void ggml_cuda_op_gated_delta_net_impl(")])
    (tmp_path / "gated_delta_net.cuh").touch()
    (tmp_path / "ggml-cuda").mkdir()
    (tmp_path / "ggml-cuda/common.cuh").touch()
    (tmp_path / "ggml-cuda/cp-async.cuh").touch()
    shutil.copy(cuda / "gated-delta-net-columns.cuh", tmp_path / "ggml-cuda")
    tokens = (cuda / "gated-delta-net-tokens.cuh").read_text()
    for copied, emulated in COPIES.items():
        assert copied in tokens
        tokens = tokens.replace(copied, emulated)
    assert "asm" not in tokens
    (tmp_path / "ggml-cuda/gated-delta-net-tokens.cuh").write_text(tokens)
    program = tmp_path / "delta_net"
    command = ["g++", "-std=c++17", "-O1", "-ffp-contract=off", "-w", "-fpermissive", f"-I{tmp_path}", f"-I{EMULATED}"]
    subprocess.run([*command, "-o", str(program), str(EMULATED / "delta_net.cpp")], check=True, timeout=600)
    for columns, fewest in (("1", "2"), ("1", "0"), ("0", "0")):
        environment = {**os.environ, "GGML_CUDA_GDN_COLUMNS": columns, "GGML_CUDA_GDN_TOKENS": fewest}
        ended = subprocess.run([str(program)], env=environment, timeout=600, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert ended.stdout.count("ok ") == 25
