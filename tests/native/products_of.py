"""`python -m tests.native.products_of UNUSED OUT.npy`: products of weights of 4 and 6 bits with 1 to 36 tokens, of random
numbers, by the kernels of the library that LLAMA_CPP_LIB_PATH names, or of the wheel's."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import llama_cpp
import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
# Rows of weights are as long as `values`; there are `tokens` and `columns`.
SIZES = ((512, 4, 64), (512, 8, 72), (1536, 12, 40), (512, 16, 136), (256, 20, 8), (2048, 36, 24))


def halves(random: np.random.Generator, *shape: int) -> Bytes:
    return np.abs(random.normal(0, 0.01, shape)).astype(np.float16).view(np.uint8)


def of_32(random: np.random.Generator, values: int, tokens: int, columns: int) -> tuple[Bytes, Bytes]:
    """Eight columns' blocks of 32 weights with a scale each, and four tokens' blocks of 32 values."""
    blocks = values // 32
    weights = random.integers(0, 256, (columns // 8, blocks, 16 + 128), dtype=np.uint8)
    weights[..., :16] = halves(random, columns // 8, blocks, 8)
    rows = random.integers(-127, 128, (tokens // 4, blocks, 8 + 128)).astype(np.int8).view(np.uint8)
    rows[..., :8] = halves(random, tokens // 4, blocks, 4)
    return weights, rows


def of_256(random: np.random.Generator, values: int, tokens: int, columns: int) -> tuple[Bytes, Bytes]:
    """The same of Q4_K: blocks of 256, in whose parts of 32 weights have a scale and a least value, and values' sums by 16."""
    blocks = values // 256
    weights = random.integers(0, 256, (columns // 8, blocks, 2 * 16 + 96 + 1024), dtype=np.uint8)
    weights[..., :32] = halves(random, columns // 8, blocks, 16)
    quants = random.integers(-127, 128, (tokens // 4, blocks, 4, 16, 16)).astype(np.int8)
    # Eight values of a token, then of the next; sums: of four parts of 16 of the first token, then of the next, by 64 values.
    rows = quants.reshape(*quants.shape[:3], 32, 8).swapaxes(2, 3).reshape(tokens // 4, blocks, 1024)
    sums = quants.sum(-1, dtype=np.int16).reshape(tokens // 4, blocks, 4, 4, 4).swapaxes(2, 3)
    scales = np.abs(random.normal(0, 0.01, (tokens // 4, blocks, 4))).astype(np.float32)
    parts = (scales, rows, np.ascontiguousarray(sums))
    return weights, np.concatenate([p.reshape(tokens // 4, blocks, -1).view(np.uint8) for p in parts], axis=-1)


KERNELS = {"q4_0_8x8_q8_0": of_32, "iq4_nl_8x8_q8_0": of_32, "q4_K_8x8_q8_K": of_256}


def six_bit_products(library: ctypes.CDLL, values: int, tokens: int, columns: int) -> NDArray[np.float32]:
    """Of Q6_K weights, which are packed for nothing: by tiles where the library has them, else one by one."""
    random, blocks = np.random.default_rng(0), values // 256
    weights = random.integers(0, 256, (columns, blocks, 208 + 2), dtype=np.uint8)
    weights[..., 208:] = halves(random, columns, blocks, 1)
    quants = random.integers(-127, 128, (tokens, blocks, 256)).astype(np.int8)
    scales = np.abs(random.normal(0, 0.01, (tokens, blocks, 1))).astype(np.float32)
    parts = (scales, quants, quants.reshape(tokens, blocks, 16, 16).sum(-1, dtype=np.int16))
    rows = np.concatenate([p.view(np.uint8).reshape(tokens, blocks, -1) for p in parts], axis=-1)
    answer = np.zeros((tokens, columns), dtype=np.float32)
    pointer, size, count = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    if hasattr(library, "ggml_mul_tile_q6_K_q8_K"):
        tile = library.ggml_mul_tile_q6_K_q8_K
        tile.restype, tile.argtypes = None, [count, pointer, pointer, size, count, pointer, count]
        for first in range(0, tokens, 4):
            some = range(first, min(first + 4, tokens))
            into = (pointer * 4)(*[answer[token % tokens].ctypes.data for token in range(first, first + 4)])
            those = (pointer * 4)(*[rows[token].ctypes.data for token in some])
            tile(values, into, weights.ctypes.data, weights.strides[0], columns, those, len(some))
        return answer
    one = library.ggml_vec_dot_q6_K_q8_K
    one.restype, one.argtypes = None, [count, pointer, size, pointer, size, pointer, size, count]
    for token in range(tokens):
        for column in range(columns):
            place = answer[token, column:].ctypes.data
            one(values, place, 0, weights[column].ctypes.data, 0, rows[token].ctypes.data, 0, 1)
    return answer


def products(library: ctypes.CDLL) -> NDArray[np.float32]:
    found = []
    for name, made in KERNELS.items():
        kernel = library[f"ggml_gemm_{name}"]
        kernel.restype = None
        kernel.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_void_p] * 2, *[ctypes.c_int] * 2]
        for values, tokens, columns in SIZES:
            weights, rows = made(np.random.default_rng(0), values, tokens, columns)
            answer = np.zeros((tokens, columns), dtype=np.float32)
            kernel(values, answer.ctypes.data, columns, weights.ctypes.data, rows.ctypes.data, tokens, columns)
            found.append(answer.ravel())
    found += [six_bit_products(library, *sizes).ravel() for sizes in ((256, 1, 5), (1024, 3, 14), (2048, 7, 32))]
    return np.concatenate(found)


if __name__ == "__main__":
    llama_cpp.llama_backend_init()
    folder = os.environ.get("LLAMA_CPP_LIB_PATH") or Path(llama_cpp.__file__).parent / "lib"
    cpu = ctypes.CDLL(str(Path(folder) / "libggml-cpu.so"))
    cpu.ggml_cpu_init()
    np.save(sys.argv[2], products(cpu))
