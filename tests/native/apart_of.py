"""How many products with weights a step computes for each sequence apart, as a process that may use another llama.cpp:
`… MODEL OUT`.

OUT gets the number in a step of one token for each of some streams, and in one of several tokens for each of them.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import llama_cpp
import numpy as np

from bench.step import Tensor, text_of
from engines.config import EngineConfig
from engines.runtime import llama_log
from engines.runtime.context_params import ContextParams
from engines.runtime.llama import Batch
from engines.runtime.placement import place

STREAMS = 3


class Apart:
    def __init__(self) -> None:
        self.count = 0

    def seen(self, address: int, is_question: bool, _user_data: object) -> bool:
        if is_question and text_of("ggml_op_desc", address) == "MUL_MAT":
            weights, rows = (Tensor.from_address(source) for source in Tensor.from_address(address).src[:2])
            is_weight = text_of("ggml_get_name", ctypes.addressof(weights)).endswith(".weight")
            self.count += is_weight and rows.ne[2] > 1
        return False


if __name__ == "__main__":
    llama_log.install()
    llama_cpp.llama_backend_init()
    config = EngineConfig(
        model_path=sys.argv[1], model_name="m", slots=STREAMS, context_tokens=256, threads=1, sampling="host"
    )
    placement = place(config)
    model = llama_cpp.llama_model_load_from_file(sys.argv[1].encode(), placement.native)
    apart = Apart()
    kind = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)
    seen = kind(apart.seen)
    params = ContextParams(config, 1)
    params.native.cb_eval = ctypes.cast(seen, type(params.native.cb_eval))
    context = llama_cpp.llama_init_from_model(model, params.native)
    counts, position = [], 0
    for tokens in (1, 5):
        batch = Batch(config.micro_batch_tokens)
        for stream in range(STREAMS):
            batch.add(stream, position, [7 + stream] * tokens, outputs=1)
        position += tokens
        apart.count = 0
        assert llama_cpp.llama_decode(context, batch.native) == 0
        counts.append(apart.count)
    np.save(Path(sys.argv[2]), np.array(counts))
    llama_cpp.llama_free(context)
    params.close()
    llama_cpp.llama_model_free(model)
