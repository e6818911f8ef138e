"""Our build's products of Q4_1 and Q6_K weights, and of experts, against the wheel's: steps of a few tokens, and long prompts."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from tests.native.test_cell_window import SAME_CELLS, logits
from tests.synthetic_gguf import write_llama, write_qwen35moe

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed"),
]


def quantized(source: Path, target: Path, kind: int) -> Path:
    """The model with weights of that LLAMA_FTYPE, as far as its sizes allow."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = kind, 1
    status = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params))
    assert status == 0
    return target


@pytest.mark.parametrize(
    ("write", "kind"),
    [
        (write_llama, llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_1),
        (write_llama, llama_cpp.LLAMA_FTYPE_MOSTLY_Q6_K),
        # Packed, and tokens that chose the same expert side by side.
        (write_qwen35moe, llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0),
    ],
)
def test_tiles_of_rows_and_tokens_compute_the_same(
    tmp_path: Path, library: Path, write: Callable[[Path], None], kind: int
) -> None:
    write(tmp_path / "m.gguf")
    model = quantized(tmp_path / "m.gguf", tmp_path / "quantized.gguf", kind)
    ours = logits(model, tmp_path / "ours.npy", LLAMA_CPP_LIB_PATH=str(library), **SAME_CELLS)
    theirs = logits(model, tmp_path / "theirs.npy")
    assert ours.shape == theirs.shape and theirs.std() > 0.1
    # Compilers may round otherwise.
    assert np.abs(ours - theirs).max() < 1e-3 * theirs.std()
