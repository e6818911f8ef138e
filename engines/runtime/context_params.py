"""The configuration as llama.cpp's context parameters; one place, so that a simulated context is the one that will be made."""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp

from engines.config import EngineConfig

POOLING_TYPES = {"mean": 1, "cls": 2, "last": 3, "rank": 4}
# A draft begins by feeding what the target has decoded since the last one: so many rows of each sequence in one call.
DRAFT_ROWS_PER_SEQUENCE = 16
GGML_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "bf16": 30}


class ContextParams:
    """llama_context_params in `native`, and the sampler chains they point to. Close it after the context is freed."""

    def __init__(self, config: EngineConfig, threads: int) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = config.cells
        params.n_batch = max(config.batch_tokens, config.outputs)
        params.n_ubatch = min(config.micro_batch_tokens, params.n_batch)
        params.n_seq_max = config.sequences
        params.n_outputs_max = config.outputs
        if config.longest_draft:
            # Rows whose state can be taken back, and whose results a step may ask for: a draft's and the one before it.
            params.n_rs_seq = config.longest_draft
            params.n_outputs_max_per_seq = 1 + config.longest_draft
            # llama.cpp keeps those rows in one micro-batch of a recurrent model, and aborts where that holds no row more.
            params.n_batch = max(params.n_batch, 2 + config.longest_draft)
            params.n_ubatch = max(params.n_ubatch, 2 + config.longest_draft)
        params.n_threads = threads
        params.n_threads_batch = threads
        # Pinned, not "auto": state of a context with flash attention cannot enter one without.
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.type_k = GGML_TYPES[config.kv_type_k]
        params.type_v = GGML_TYPES[config.kv_type_v]
        params.kv_unified = True
        params.swa_full = config.full_window
        params.no_perf = True
        if config.pooling:
            params.embeddings = True
            params.pooling_type = POOLING_TYPES[config.pooling]
            params.n_batch = params.n_ubatch = config.pooled_step_tokens
            # No state leaves such a context, and small encoders have head lengths without a kernel for it.
            params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO
        self.native: Any = params
        self._chains: list[Any] = []
        self._entries: Any = (llama_cpp.llama_sampler_seq_config * config.slots)()
        if config.samples_on_device:
            # Made with the context: attaching a chain later rebuilds the graph for every stream.
            for seq in range(config.slots):
                chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
                llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_top_k(config.device_candidates))
                self._chains.append(chain)
                self._entries[seq].seq_id = seq
                self._entries[seq].sampler = ctypes.cast(chain, ctypes.c_void_p)
            params.samplers, params.n_samplers = self._entries, config.slots

    def close(self) -> None:
        """Frees the chains; freeing one that a context still holds aborts the process. Calling it twice is harmless."""
        while self._chains:
            llama_cpp.llama_sampler_free(self._chains.pop())


class DraftContextParams:
    """The same for the context of a model's draft head, beside the target's; close it after the context is freed."""

    def __init__(self, config: EngineConfig, threads: int, target: Any) -> None:
        params = llama_cpp.llama_context_default_params()
        params.ctx_type = llama_cpp.LLAMA_CONTEXT_TYPE_MTP
        params.ctx_other = target
        # Guessed rows come on top of the target's.
        params.n_ctx = config.cells + config.decoding_sequences * config.longest_draft
        params.n_batch = max(config.batch_tokens, DRAFT_ROWS_PER_SEQUENCE * config.decoding_sequences)
        params.n_ubatch = min(config.micro_batch_tokens, params.n_batch)
        params.n_seq_max = config.sequences
        params.n_outputs_max = config.sequences
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.type_k, params.type_v = GGML_TYPES[config.kv_type_k], GGML_TYPES[config.kv_type_v]
        params.kv_unified = True
        params.no_perf = True
        self.native: Any = params
        self._chains: list[Any] = []
        self._entries: Any = (llama_cpp.llama_sampler_seq_config * config.decoding_sequences)()
        if config.samples_on_device:
            for seq in range(config.decoding_sequences):
                chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
                llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_greedy())
                self._chains.append(chain)
                self._entries[seq].seq_id = seq
                self._entries[seq].sampler = ctypes.cast(chain, ctypes.c_void_p)
            params.samplers, params.n_samplers = self._entries, config.decoding_sequences

    def close(self) -> None:
        """Frees the chains. Calling it twice is harmless."""
        while self._chains:
            llama_cpp.llama_sampler_free(self._chains.pop())
