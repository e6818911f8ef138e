"""A card computes a delta net's steps of several tokens with their loads ahead and few sums across lanes.

The tokens of a sequence wait for each other. llama.cpp gives each of a state's 128 columns a warp, which for each token loads
its key, query and value, and adds up over its 32 lanes twice, in five steps each. On an H200 a token of 35B-A3B takes 0.6 us,
150 ms of a prompt of 8,192. Here eight lanes have two columns and do what 32 do there, so three of the five steps cross lanes
and a warp has eight columns; a CUDA block of 32 columns loads keys, queries and values once for all, some tokens ahead; and a
token's output is added up while the next one's keys are. Each sum has llama.cpp's order, so the bits are the same. It is for
states of 128 with one gate a head, in steps of 2 tokens and more. GGML_CUDA_GDN_TOKENS in the engine's environment is another
fewest number of tokens; 0 turns it off.

On an H200 512 tokens take 131 us instead of 281, 2,048 take 511 instead of 1,276, and 512 of each of four sequences 321 instead
of 858; drafts of 5 tokens of 32 streams 54 instead of 71. tests/native/prompts_on_card.cpp compares the bits and times both
ways.
"""

from __future__ import annotations

from pathlib import Path

from native.source_change import Change

_SOURCE = Path(__file__).resolve().parent / "cuda" / "gated-delta-net-tokens.cuh"
_CUDA = "ggml/src/ggml-cuda"
_GDN = f"{_CUDA}/gated_delta_net.cu"

DELTA_NET_TOKENS = (
    Change(f"{_CUDA}/gated-delta-net-tokens.cuh", "", _SOURCE.read_text(encoding="utf-8")),
    Change(
        _GDN,
        """template <int S_v, bool KDA, bool keep_rs_t>
__global__ void""",
        """#include "ggml-cuda/gated-delta-net-tokens.cuh"

template <int S_v, bool KDA, bool keep_rs_t>
__global__ void""",
    ),
    Change(
        _GDN,
        """    dim3      block_dims(warp_size <= S_v ? warp_size : S_v, num_warps, 1);
""",
        """    dim3      block_dims(warp_size <= S_v ? warp_size : S_v, num_warps, 1);

    if constexpr (!KDA) {
        if (gdn_takes_tokens(S_v, n_tokens, warp_size)) {
            const dim3 n_blocks(H, n_seqs, 128/GDN_BLOCK_COLUMNS);
            const dim3 n_threads(GDN_BLOCK_COLUMNS*GDN_LANES/GDN_LANE_COLUMNS);
            const ggml_cuda_kernel_launch_params params = ggml_cuda_kernel_launch_params(n_blocks, n_threads, 0, stream);
            ggml_cuda_kernel_launch(gated_delta_net_tokens<128, GDN_LANES, GDN_LANE_COLUMNS, keep_rs_t>, params,
                q_d, k_d, v_d, g_d, b_d, s_d, dst_d, state_d, H,
                n_tokens, n_seqs, sq1, sq2, sq3, sv1, sv2, sv3,
                sb1, sb2, sb3, init_fastdiv_values(neqk1), init_fastdiv_values(rq3), scale, state_slot_stride, K);
            return;
        }
    }
""",
    ),
)
