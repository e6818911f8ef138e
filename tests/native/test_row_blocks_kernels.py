"""The attention kernels that a build compiles for row blocks, run on emulated threads: every line of them but the assembler."""

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

# What of the sources speaks to a card in assembler, and what stands for it.
_LDMATRIX = r'asm volatile\("ldmatrix\.sync\.aligned\.m8n8\.x{count}\.{kind}b16 [^;]*;"[^;]*: "l"\((?P<row>.*)\)\);'
REPLACED = (
    (r'asm\("movmatrix[^;]*;"[^;]*;', "ret = emulated_movmatrix(x);"),
    (_LDMATRIX.format(count=4, kind=r"trans\."), r"emulated_ldmatrix(xi, 4, true, \g<row>);"),
    (_LDMATRIX.format(count=4, kind=""), r"emulated_ldmatrix(xi, 4, false, \g<row>);"),
    (_LDMATRIX.format(count=2, kind=""), r"emulated_ldmatrix(xi, 2, false, \g<row>);"),
)
MMA = """template <typename D, typename A, typename B> void mma(D & d, const A & a, const B & b) { emulated_mma(d, a, b); }
}
"""


def prepare(tree: Path, folder: Path) -> None:
    """Writes the kernels' sources as they can be compiled for a processor."""
    source = tree / "ggml" / "src" / "ggml-cuda"
    tiles = (source / "mma.cuh").read_text()
    for pattern, instead in REPLACED:
        tiles, count = re.subn(pattern, instead, tiles)
        assert count, pattern
    tiles = tiles[: tiles.index("static __device__ __forceinline__ void mma(")] + MMA
    (folder / "mma.cuh").write_text("#pragma once\n" + tiles)
    (folder / "cp-async.cuh").write_text("#pragma once\n")
    kernels = (source / "fattn-mma-f16.cuh").read_text()
    assert kernels.count("extern __shared__ half2 tile_Q[];") == 1
    (folder / "fattn-mma-f16.cuh").write_text(
        kernels.replace("extern __shared__ half2 tile_Q[];", "half2 * tile_Q = (half2 *) dynamic_shared;")
    )
    shutil.copy(source / "fattn-tile.cuh", folder)
    for name in ("fattn-share.h", "fattn-visible.cuh", "fattn-mma-visible.cuh"):
        shutil.copy(source / name, folder)
    common = (source / "fattn-common.cuh").read_text()
    kernel_type = re.search(r"typedef void \(\* fattn_kernel_t\)\([^;]*;", common)
    assert kernel_type is not None
    (folder / "fattn-common.cuh").write_text(
        f'#pragma once\n#include "device.cuh"\n{kernel_type[0]}\n#include "fattn-visible.cuh"\n'
        "template <int DV, int ncols1, int ncols2> void launch_fattn(ggml_backend_cuda_context &, ggml_tensor *,"
        " fattn_kernel_t, int, size_t, int, bool, bool, bool, bool, int = 32, bool = false) {}\n"
    )


def test_the_kernels_attend_to_what_the_lists_name(tree: Path, tmp_path: Path) -> None:
    prepare(tree, tmp_path)
    program = tmp_path / "kernels"
    command = ["g++", "-std=c++17", "-O1", "-w", "-fpermissive", f"-I{tmp_path}", f"-I{EMULATED}"]
    subprocess.run([*command, "-o", str(program), str(EMULATED / "kernels.cpp")], check=True, timeout=600)
    ended = subprocess.run([str(program)], timeout=600, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len(ended.stdout.splitlines()) == 14


def test_the_pinned_source_takes_the_changes(tree: Path) -> None:
    graph = (tree / "src/llama-graph.cpp").read_text()
    assert "cur->op_params[8]" in graph and "op_params[0] = (int32_t) mctx->get_first_kv()" in graph
    kernels = (tree / "ggml/src/ggml-cuda/fattn-mma-f16.cuh").read_text()
    assert '#include "fattn-mma-visible.cuh"' in kernels
