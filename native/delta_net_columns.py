"""A card computes two columns of a delta net's state in each warp where a step has many states.

A state of 35B-A3B has 128 columns of 512 bytes for each of 32 heads. llama.cpp gives each column a warp of its own, which loads
it, adds up over it twice and stores it: half of its time nothing of its 512 bytes is under way, and an H200 wants some 25 KB
under way on each SM. Keys, queries and what belongs to the head are loaded for each column anew. Here a warp takes two columns,
so it has twice as much under way, and loads the rest once. It does so where the columns are more than the card has room for
warps (on an H200 from 2 sequences with 32 heads), for states of 128 with one gate a head, in steps of any number of tokens.
Each sum has the order of llama.cpp's kernel. GGML_CUDA_GDN_COLUMNS=0 in the engine's environment turns it off.

A layer of a step of 32 streams has 134 MB to move, which takes an H200 37 us instead of 43, of 8 streams 11.1 instead of 12.2.
"""

from __future__ import annotations

from pathlib import Path

from native.source_change import Change

_SOURCE = Path(__file__).resolve().parent / "cuda" / "gated-delta-net-columns.cuh"
_CUDA = "ggml/src/ggml-cuda"
_GDN = f"{_CUDA}/gated_delta_net.cu"

DELTA_NET_COLUMNS = (
    Change(f"{_CUDA}/gated-delta-net-columns.cuh", "", _SOURCE.read_text(encoding="utf-8")),
    Change(
        _GDN,
        """#include "gated_delta_net.cuh"
#include "ggml-cuda/common.cuh"
""",
        """#include "gated_delta_net.cuh"
#include "ggml-cuda/common.cuh"
#include "ggml-cuda/gated-delta-net-columns.cuh"
""",
    ),
    Change(
        _GDN,
        """    const uint3 rq3_magic   = init_fastdiv_values(rq3);

""",
        """    const uint3 rq3_magic   = init_fastdiv_values(rq3);

    if constexpr (!KDA) {
        if (gdn_takes_columns(S_v, H, n_seqs, warp_size, ggml_cuda_info().devices[ggml_cuda_get_device()].nsm)) {
            const dim3 n_blocks(H, n_seqs, 128/(GDN_COLUMNS*GDN_WARPS));
            const ggml_cuda_kernel_launch_params params =
                ggml_cuda_kernel_launch_params(n_blocks, dim3(WARP_SIZE, GDN_WARPS, 1), 0, stream);
            ggml_cuda_kernel_launch(gated_delta_net_columns<128, GDN_COLUMNS, keep_rs_t>, params,
                q_d, k_d, v_d, g_d, b_d, s_d, dst_d, state_d, H,
                n_tokens, n_seqs, sq1, sq2, sq3, sv1, sv2, sv3,
                sb1, sb2, sb3, neqk1_magic, rq3_magic, scale, state_slot_stride, K);
            return;
        }
    }

""",
    ),
)
