# ruff: noqa: E501 (the lines are those of llama.cpp)
"""Two CUDA blocks of a product of quantized matrices share a multiprocessor of Hopper.

llama.cpp's kernel for many tokens loads a tile of weights, unpacks it into shared memory and multiplies it, one after the
other, and gives each CUDA block a whole multiprocessor: while it waits for memory nothing is multiplied. Of a micro-batch of
512 tokens of 35B-A3B an H200 read the experts' weights at 1 TB/s that way, of 4.8. With half of the registers for each, two
blocks fit: 32 tokens took 256 experts 0.21 ms instead of 0.26 for gate and up, 0.10 instead of 0.14 for down. What it is of a
prompt alone was not measured: with delta nets' and masks' changes beside it 8,192 tokens went from 9,300 a second to 13,000.

Tiles as wide as an expert's share of the tokens, which llama.cpp chooses on two of AMD's architectures, were tried there too,
with 100, 150 and 200 percent of it and micro-batches of 512 to 2,048: none was faster than tiles of 128. What a tile costs is
loading its weights.
"""

from __future__ import annotations

from native.source_change import Change

_HEADER = "ggml/src/ggml-cuda/mmq.cuh"

TILE_OCCUPANCY = (
    Change(
        _HEADER,
        """    return ggml_cuda_mmq_get_config(type, J, fallback, prec_src1).occupancy;
""",
        """    const int occupancy = ggml_cuda_mmq_get_config(type, J, fallback, prec_src1).occupancy;
#if !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA) && __CUDA_ARCH__ >= GGML_CUDA_CC_HOPPER && __CUDA_ARCH__ < GGML_CUDA_CC_BLACKWELL
    // with 128 registers a thread these keep their sums in them
    const bool fits_twice = type == GGML_TYPE_Q4_0 || type == GGML_TYPE_Q8_0 || type == GGML_TYPE_Q4_K ||
        ((type == GGML_TYPE_Q5_K || type == GGML_TYPE_Q6_K) && J <= 64);
    return fits_twice && occupancy < 2 ? 2 : occupancy;
#else
    return occupancy;
#endif
""",
    ),
)
