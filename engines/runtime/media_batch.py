"""A batch of embeddings instead of tokens: one stretch of one span."""

from __future__ import annotations

import ctypes

import llama_cpp
import numpy as np

from engines.runtime.media_span import MediaSpan


class SpanBatch:
    """A reusable llama_batch in `native` for up to `capacity` embeddings of a sequence. It asks for no output.

    llama.cpp takes either tokens or embeddings in one call, so a span is always decoded by itself.
    """

    def __init__(self, capacity: int, width: int, axes: int) -> None:
        self.capacity = capacity
        self._embeddings = np.zeros((capacity, width), dtype=np.float32)
        self._positions = np.zeros(axes * capacity, dtype=np.int32)
        self._n_seq = np.ones(capacity, dtype=np.int32)
        self._seq = np.zeros(capacity, dtype=np.int32)
        self._output = np.zeros(capacity, dtype=np.int8)
        self._seq_rows = np.uint64(self._seq.ctypes.data) + np.arange(capacity, dtype=np.uint64) * np.uint64(4)
        self.native = llama_cpp.llama_batch()
        self.native.embd = self._embeddings.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        self.native.pos = self._positions.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_pos))
        self.native.n_seq_id = self._n_seq.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        self.native.seq_id = self._seq_rows.ctypes.data_as(ctypes.POINTER(ctypes.POINTER(llama_cpp.llama_seq_id)))
        self.native.logits = self._output.ctypes.data_as(ctypes.POINTER(ctypes.c_int8))

    def fill(self, seq: int, position: int, span: MediaSpan, start: int, count: int) -> None:
        """`count` embeddings of `span` from its `start`-th on; the span itself begins at `position` of the sequence."""
        if not 0 < count <= min(self.capacity, len(span) - start):
            raise ValueError(f"{count} embeddings from {start} of {len(span)} do not fit {self.capacity} rows")
        self._embeddings[:count] = span.embeddings[start : start + count]
        # Axis by axis, each as long as this batch.
        chosen = span.positions_at(position)[:, start : start + count]
        self._positions[: chosen.size] = chosen.ravel()
        self._seq[:count] = seq
        self.native.n_tokens = count
