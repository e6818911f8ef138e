"""A llama.cpp context that pools: many inputs in one call, one vector (or one row of scores) per input out of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from engines.config import EngineConfig
from engines.errors import ModelLoadFailed
from engines.runtime import memory_probe
from engines.runtime.llama import Batch, Llama

_CLASSIFIER = {"cls.output.weight", "cls.weight"}
# Kinds of tokenizers in which every byte of a text ends up in some token's piece; others have a token for the unknown.
_LOSSLESS_KINDS = (llama_cpp.LLAMA_VOCAB_TYPE_SPM, llama_cpp.LLAMA_VOCAB_TYPE_BPE)


class PoolingLlama(Llama):
    """A model and its pooling context. Belongs to the thread that made it, but for what is set in `__init__`.

    `width` is the number of values per input: the embedding's length, or with rank the number of classes. `splits_inputs` says
    whether an input may be computed over several calls: the last token of a causal model has seen all the others.
    """

    def __init__(self, config: EngineConfig, threads: int, on_progress: Callable[[float], None]) -> None:
        """Raises ModelLoadFailed also where the model has no head for the pooling that is asked for."""
        super().__init__(config, threads, on_progress)
        try:
            self._read_model(config)
        except BaseException:
            self.close()
            raise

    def _read_model(self, config: EngineConfig) -> None:
        self.ranks = config.pooling == "rank"
        self.classes: int = llama_cpp.llama_model_n_cls_out(self.model)
        self.width: int = self.classes if self.ranks else llama_cpp.llama_model_n_embd_out(self.model)
        self._encodes: bool = llama_cpp.llama_model_has_encoder(self.model)
        if self.ranks and not _CLASSIFIER & memory_probe.tensor_names(self.model):
            raise ModelLoadFailed(
                f"{config.model_path} has no classifier (cls tensors), so pooling 'rank' cannot score anything with it"
            )
        label = llama_cpp.llama_model_cls_label(self.model, 0) if self.ranks and self.classes > 1 else b"yes"
        if label != b"yes":
            raise ModelLoadFailed(
                f"{config.model_path} sorts into {self.classes} classes, the first of them {label!r}; a ranking model has"
                " one output, or the classes yes and no"
            )
        causal = bool(llama_cpp.llama_get_causal_attn(self.context)) and self.memory is not None
        self.splits_inputs = causal and not self._encodes and config.pooling in ("last", "rank")
        longest = config.context_tokens if self.splits_inputs else min(config.context_tokens, config.pooled_step_tokens)
        # Learned positions end with the training context, and llama.cpp does not look.
        self.input_limit_tokens = min(longest, self.context_train_tokens)
        template = llama_cpp.llama_model_chat_template(self.model, b"rerank")
        self.rerank_template: str | None = template.decode("utf-8", "replace") if template else None
        native = self.vocabulary.native
        self.adds_eos: bool = llama_cpp.llama_vocab_get_add_eos(native)
        self.adds_separator: bool = llama_cpp.llama_vocab_get_add_sep(native)
        self.separator: int = llama_cpp.llama_vocab_sep(native)
        self.is_lossless = llama_cpp.llama_vocab_type(native) in _LOSSLESS_KINDS

    def compute(self, batch: Batch) -> int:
        """0 done; 1 no room; negative: refused. Releases the GIL while it computes."""
        if self._encodes:
            return int(llama_cpp.llama_encode(self.context, batch.native))
        return self.decode(batch)

    def pooled(self, seq: int) -> NDArray[np.float32]:
        """A copy of the sequence's values, shape (width,). Raises ValueError where llama.cpp has none or they are no numbers."""
        pointer = llama_cpp.llama_get_embeddings_seq(self.context, seq)
        if not pointer:
            raise ValueError("llama.cpp gave no pooled values")
        values: NDArray[np.float32] = np.ctypeslib.as_array(pointer, (self.width,)).copy()
        if not np.isfinite(values).all():
            raise ValueError("the values are not finite")
        return values


class InputBatch(Batch):
    """A batch in which every row is an output, as pooling needs it; llama.cpp would set the flags itself and warn each time."""

    def add_input(self, seq: int, start: int, tokens: Sequence[int] | NDArray[np.int32]) -> None:
        first = self.count
        self.add(seq, start, tokens, outputs=1)  # type: ignore[arg-type]
        self._output[first : self.count] = 1
