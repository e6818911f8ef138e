"""How many states of a delta net each of some steps gathers, as a process that may use another llama.cpp: `… MODEL OUT`.

OUT gets two rows: of a context that takes nothing back, and of one that can take tokens back.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from bench.step import Tensor, text_of
from engines.config import EngineConfig
from engines.runtime import llama_log
from engines.runtime.context_params import ContextParams
from engines.runtime.llama import Batch
from engines.runtime.placement import place

STREAMS, PROMPT_TOKENS, TAKEN_BACK = 3, 5, 2


class Gathered:
    """Counts the operations that gather what a cache holds, as llama.cpp shows them."""

    def __init__(self) -> None:
        self.count = 0

    def seen(self, address: int, is_question: bool, _user_data: object) -> bool:
        if is_question and text_of("ggml_op_desc", address) == "GET_ROWS":
            tensor = Tensor.from_address(address)
            self.count += tensor.ne[1] > 0 and text_of("ggml_get_name", tensor.src[0]).startswith("cache_")
        return False


class Steps:
    """A context, and how many states each of its steps gathered."""

    def __init__(self, model: Any, config: EngineConfig) -> None:
        self._gathered = Gathered()
        kind = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)
        self._seen = kind(self._gathered.seen)
        self._params = ContextParams(config, 1)
        self._params.native.cb_eval = ctypes.cast(self._seen, type(self._params.native.cb_eval))
        self._context = llama_cpp.llama_init_from_model(model, self._params.native)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._done = [0] * (STREAMS + 1)
        self.counts: list[int] = []

    def feed(self, count: int, *streams: int) -> None:
        batch = Batch(config.micro_batch_tokens)
        for stream in streams:
            batch.add(stream, self._done[stream], [7 + stream] * count, outputs=1)
            self._done[stream] += count
        self._gathered.count = 0
        assert llama_cpp.llama_decode(self._context, batch.native) == 0
        llama_cpp.llama_synchronize(self._context)
        self.counts.append(self._gathered.count)

    def share(self, source: int, target: int) -> None:
        llama_cpp.llama_memory_seq_cp(self._memory, source, target, 0, self._done[source])
        self._done[target] = self._done[source]

    def take_back(self, stream: int, count: int) -> None:
        self._done[stream] -= count
        assert llama_cpp.llama_memory_seq_rm(self._memory, stream, self._done[stream], -1)

    def close(self) -> None:
        llama_cpp.llama_free(self._context)
        self._params.close()


def counts(model: Any, config: EngineConfig, takes_back: bool) -> list[int]:
    """Of: a step of several tokens, and the one behind it; a step of all streams, and the next; one whose state two hold, and
    the next; one from which tokens were taken back, and the next."""
    steps = Steps(model, config)
    for stream in range(STREAMS):
        steps.feed(PROMPT_TOKENS, stream)
    steps.counts.clear()
    steps.feed(PROMPT_TOKENS, 0)
    steps.feed(1, 0)
    steps.feed(1, *range(STREAMS))
    steps.feed(1, *range(STREAMS))
    steps.share(STREAMS - 1, STREAMS)
    steps.feed(1, STREAMS)
    steps.feed(1, STREAMS)
    steps.feed(TAKEN_BACK + 1, 0)
    if takes_back:
        steps.take_back(0, TAKEN_BACK)
    steps.feed(1, 0)
    steps.feed(1, 0)
    found = steps.counts
    steps.close()
    return found


if __name__ == "__main__":
    llama_log.install()
    llama_cpp.llama_backend_init()
    shape: dict[str, Any] = {"slots": STREAMS + 1, "context_tokens": 256, "threads": 1, "sampling": "host"}
    rows = []
    for speculation in ("none", "auto"):
        config = EngineConfig(
            model_path=sys.argv[1], model_name="m", speculation=speculation, draft_tokens=TAKEN_BACK + 1, **shape
        )
        placement = place(config)
        loaded = llama_cpp.llama_model_load_from_file(sys.argv[1].encode(), placement.native)
        rows.append(counts(loaded, config, speculation == "auto"))
        llama_cpp.llama_model_free(loaded)
    np.save(Path(sys.argv[2]), np.array(rows))
