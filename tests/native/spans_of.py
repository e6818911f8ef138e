"""How many cells the parts of some prompts look at, in a cache that conversations have come to and left, as a process that may
use another llama.cpp: `… MODEL OUT`.

OUT gets for each part of the last prompts what its attention spans, and how many tokens its sequence has then; and the same of
each token of a stream that writes alone where others have left.
"""

from __future__ import annotations

import ctypes
import random
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

SLOTS, PROMPT_TOKENS, PART_TOKENS, ANSWER_TOKENS, STEPS = 16, 512, 128, 64, 100


class Cache:
    """A context whose sequences grow and go, and the cells that its attention looked at last."""

    def __init__(self, path: str) -> None:
        config = EngineConfig(
            model_path=path,
            model_name="m",
            slots=SLOTS,
            context_tokens=PROMPT_TOKENS + ANSWER_TOKENS,
            threads=1,
            sampling="host",
            checkpoints=0,
        )
        self._placement = place(config)
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), self._placement.native)
        kind = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)
        self._seen = kind(self._see)
        self._params = ContextParams(config, 1)
        self._params.native.cb_eval = ctypes.cast(self._seen, type(self._params.native.cb_eval))
        self._context = llama_cpp.llama_init_from_model(self._model, self._params.native)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = Batch(config.micro_batch_tokens)
        self.tokens = [0] * SLOTS
        self.span = 0

    def _see(self, address: int, is_question: bool, _user_data: object) -> bool:
        if is_question and text_of("ggml_op_desc", address) == "FLASH_ATTN_EXT":
            self.span = int(Tensor.from_address(Tensor.from_address(address).src[3]).ne[0])
        return False

    def feed(self, count: int, *slots: int) -> None:
        self._batch.clear()
        for slot in slots:
            self._batch.add(slot, self.tokens[slot], [7 + slot] * count, outputs=1)
            self.tokens[slot] += count
        assert llama_cpp.llama_decode(self._context, self._batch.native) == 0

    def drop(self, slot: int) -> None:
        assert llama_cpp.llama_memory_seq_rm(self._memory, slot, -1, -1)
        self.tokens[slot] = 0

    def close(self) -> None:
        llama_cpp.llama_free(self._context)
        self._params.close()
        llama_cpp.llama_model_free(self._model)


def prompts(cache: Cache, slots: list[int]) -> list[tuple[int, int]]:
    """One prompt after another, part by part; whoever has its prompt writes a token after each part."""
    parts, writing = [], []
    for slot in slots:
        cache.drop(slot)
        for _ in range(PROMPT_TOKENS // PART_TOKENS):
            cache.feed(PART_TOKENS, slot)
            parts.append((cache.span, cache.tokens[slot]))
            able = [other for other in writing if cache.tokens[other] < PROMPT_TOKENS + ANSWER_TOKENS]
            if able:
                cache.feed(1, *able)
        writing.append(slot)
    return parts


def alone(cache: Cache, slot: int) -> list[tuple[int, int]]:
    """The slot's stream, among the cells of those that wrote together."""
    cache.drop(slot)
    cache.feed(40, slot)
    steps = []
    for _ in range(STEPS):
        cache.feed(1, slot)
        steps.append((cache.span, cache.tokens[slot]))
    return steps


if __name__ == "__main__":
    llama_log.install()
    llama_cpp.llama_backend_init()
    cache = Cache(sys.argv[1])
    order = random.Random(3)
    prompts(cache, list(range(9)))
    for slot in order.sample(range(9), 5):  # conversations of other lengths come where some went
        cache.drop(slot)
        cache.feed(order.randrange(40, 300), slot)
    found = prompts(cache, order.sample(range(SLOTS), SLOTS))
    for slot in range(0, SLOTS, 2):
        cache.drop(slot)
    found += alone(cache, 1)
    np.save(Path(sys.argv[2]), np.array(found))
    cache.close()
