"""Masks that are written over the ones before: the values of masks that are written anew, in the host's memory and a device's."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.native.test_cell_window import logits
from tests.synthetic_gguf import write_gemma3, write_llama, write_qwen35, write_qwen35moe

HERE = Path(__file__).resolve().parent
SANITIZED = ("-O1", "-Wall", "-Wextra", "-Werror", "-fsanitize=undefined,address")
pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler"),
]


def run(program: Path, *arguments: str) -> None:
    """Builds a program of this folder into `program` and runs it."""
    source = str(HERE / f"{program.name}.cpp")
    build = ["g++", "-std=c++17", source, *arguments, "-o", str(program)]
    built = subprocess.run(build, capture_output=True, text=True, timeout=300, check=False)
    assert built.returncode == 0, built.stderr[-3000:]
    ended = subprocess.run([str(program)], capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-3000:]


def write_qwen35_with_head(path: Path) -> None:
    write_qwen35(path, nextn=True)


def test_a_followed_mask_is_the_one_that_is_written_anew(tmp_path: Path, tree: Path) -> None:
    """Thousands of random changes of all kinds that a cache makes; also of a copy that gets only the pieces."""
    includes = (f"-I{tree / folder}" for folder in ("src", "include", "ggml/include"))
    run(tmp_path / "masks_of", *SANITIZED, *includes)


def test_a_copy_on_a_device_holds_what_its_input_holds(tmp_path: Path, tree: Path, library: Path) -> None:
    """While the graph's other tensors, in splits before and behind, want the memory of both."""
    includes = (f"-I{tree / folder}" for folder in ("ggml/include", "ggml/src"))
    linked = (f"-L{library}", "-lggml-base", "-lggml-cpu", f"-Wl,-rpath,{library}")
    run(tmp_path / "kept_inputs", "-O1", *includes, *linked)


@pytest.mark.parametrize(
    ("write", "program"),
    [
        (write_llama, "logits_of"),
        (write_gemma3, "logits_of"),
        (write_qwen35moe, "logits_of"),
        (write_llama, "taken_back_of"),
        (write_qwen35_with_head, "taken_back_of"),
    ],
)
def test_a_graph_that_serves_again_computes_the_same(
    tmp_path: Path, library: Path, write: Callable[[Path], None], program: str
) -> None:
    """To the bit: without it each step's graph is built anew, and each mask written as a whole."""
    write(tmp_path / "m.gguf")
    followed = logits(tmp_path / "m.gguf", tmp_path / "followed.npy", program, LLAMA_CPP_LIB_PATH=str(library))
    anew = logits(
        tmp_path / "m.gguf",
        tmp_path / "anew.npy",
        program,
        LLAMA_CPP_LIB_PATH=str(library),
        LLAMA_GRAPH_REUSE_DISABLE="1",
    )
    assert anew.std() > 0.1
    np.testing.assert_array_equal(followed, anew)
