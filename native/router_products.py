"""Products with a few hundred rows of 32-bit weights take the fastest of llama.cpp's kernels on Hopper.

35B-A3B has three of them a layer: the router's 256 rows, and 32 rows each for a delta net's decay and gate. For 4 to 16 tokens
llama.cpp takes its kernel for tensor cores, 12.9 us a product on an H200 whatever the rows are: 1.3 ms of a step of 8 streams,
which takes 8.8. Its kernel for single rows of activations, which it takes for up to 3 tokens on such cards, has forms for up to
8; above that cuBLAS needs 6 to 7 us. A step of 4 streams takes 5.2 ms instead of 6.5 there, of 8 7.4 instead of 8.4, of 16 11.2
instead of 12.1. Other architectures were not measured and stay as they are. GGML_CUDA_ROUTER_PRODUCTS=0 in the engine's
environment turns it off.
"""

from __future__ import annotations

from native.source_change import Change

_VECTORS, _TILES, _HEADER = (f"ggml/src/ggml-cuda/{name}" for name in ("mmvf.cu", "mmf.cu", "mmvf.cuh"))

ROUTER_PRODUCTS = (
    Change(
        _HEADER,
        "bool ggml_cuda_should_use_mmvf(",
        """// Few rows of 32-bit weights on Hopper: not for tensor cores.
bool ggml_cuda_is_router_product(enum ggml_type type, int cc, const int64_t * src0_ne);

bool ggml_cuda_should_use_mmvf(""",
    ),
    Change(
        _VECTORS,
        "bool ggml_cuda_should_use_mmvf(",
        """bool ggml_cuda_is_router_product(enum ggml_type type, int cc, const int64_t * src0_ne) {
    static const bool is_on = [] {
        const char * env = getenv("GGML_CUDA_ROUTER_PRODUCTS");
        return env == nullptr || atoi(env) != 0;
    }();
    constexpr int64_t most_rows = 512;
    return is_on && GGML_CUDA_CC_IS_NVIDIA(cc) && cc >= GGML_CUDA_CC_HOPPER && cc < GGML_CUDA_CC_BLACKWELL &&
        type == GGML_TYPE_F32 && src0_ne[1] <= most_rows && src0_ne[2] == 1 && src0_ne[3] == 1;
}

bool ggml_cuda_should_use_mmvf(""",
    ),
    Change(
        _VECTORS,
        """            if (GGML_CUDA_CC_IS_NVIDIA(cc)) {
                if (ampere_mma_available(cc)) {
                    return ne11 <= 3;
                }
                if (cc >= GGML_CUDA_CC_TURING) {
                    return ne11 <= 4;
""",
        """            if (GGML_CUDA_CC_IS_NVIDIA(cc)) {
                if (ampere_mma_available(cc)) {
                    return ne11 <= (ggml_cuda_is_router_product(type, cc, src0_ne) ? MMVF_MAX_BATCH_SIZE : 3);
                }
                if (cc >= GGML_CUDA_CC_TURING) {
                    return ne11 <= 4;
""",
    ),
    Change(_TILES, '#include "mmf.cuh"\n', '#include "mmf.cuh"\n#include "mmvf.cuh"\n'),
    Change(
        _TILES,
        """        } else if (src1_ncols > 16) {
            return false;
        }
    }
""",
        """        } else if (src1_ncols > 16 || ggml_cuda_is_router_product(type, cc, src0_ne)) {
            return false;
        }
    }
""",
    ),
)
