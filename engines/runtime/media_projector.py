"""A projector (mmproj file) through libmtmd: pixels in, spans of embeddings out.

It computes apart from the model's context, so it may run on a thread of its own beside decoding, but on one at a time.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp import llama_cpp as model_bindings
from numpy.typing import NDArray

from engines.config import EngineConfig
from engines.errors import DecodeFailed, EngineStopping, InvalidRequest, ModelLoadFailed
from engines.runtime import llama_log
from engines.runtime.media_span import MediaSpan, span_ids
from engines.runtime.placement import place

# One axis for plain positions; time, row, column and a reserved one where image tokens stand on a grid.
GRID_AXES = 4
Part = list[int] | MediaSpan


@cache
def bindings() -> Any:
    """llama_cpp.mtmd_cpp, with the libmtmd that lies beside the libllama in use. Raises ModelLoadFailed.

    The package's own switch for libllama's folder does not reach libmtmd.
    """
    folder = os.environ.get("LLAMA_CPP_LIB_PATH")
    if folder:
        os.environ.setdefault("MTMD_CPP_LIB", folder)
    try:
        from llama_cpp import mtmd_cpp
    except (OSError, RuntimeError, AttributeError) as error:
        raise ModelLoadFailed(f"libmtmd could not be loaded, so projectors cannot be used: {error}") from error
    if _address(mtmd_cpp._libmtmd) != _address(model_bindings._lib):
        raise ModelLoadFailed("libmtmd belongs to another libllama than the one in use; they must lie in one folder")
    mtmd_cpp.mtmd_helper_log_set(llama_log.callback(), ctypes.c_void_p(0))
    return mtmd_cpp


def _address(library: Any) -> int:
    """Where a library, or what it is linked to, has llama_decode."""
    return ctypes.cast(library.llama_decode, ctypes.c_void_p).value or 0


def context_params(config: EngineConfig, threads: int) -> Any:
    """mtmd_context_params for the projector of `config`: on the model's first device, if layers of the model are on one."""
    params = bindings().mtmd_context_params_default()
    local = [device for device in place(config).devices if device.registry != "RPC"]
    params.use_gpu = config.gpu_layers != 0 and bool(local)
    if params.use_gpu:
        params.device = local[0].handle
    params.n_threads = threads
    params.print_timings = False
    # Its buffers are then made at loading, and a plan counts them.
    params.warmup = True
    params.image_max_tokens = config.image_max_tokens or -1
    return params


class Projector:
    """A loaded projector and the model it is for. Raises ModelLoadFailed; `close` before the model is freed."""

    def __init__(self, config: EngineConfig, model: Any, threads: int) -> None:
        self._mtmd = bindings()
        self._micro_batch_tokens = min(config.micro_batch_tokens, max(config.batch_tokens, config.decoding_sequences))
        self._cleanup = ExitStack()
        self._one_at_a_time = threading.Lock()
        with llama_log.collected(forward=False) as said:
            path = config.projector_path.encode()
            self._context = self._mtmd.mtmd_init_from_file(path, model, context_params(config, threads))
        if not self._context:
            reason = said.reason or "it is no projector of this model"
            raise ModelLoadFailed(f"libmtmd could not load {config.projector_path}: {reason}")
        self._cleanup.callback(self._mtmd.mtmd_free, self._context)
        if not self._mtmd.mtmd_support_vision(self._context):
            self.close()
            raise ModelLoadFailed(f"{config.projector_path} has no vision encoder")
        self.width: int = llama_cpp.llama_model_n_embd_inp(model)
        self.axes = GRID_AXES if self._mtmd.mtmd_decode_use_mrope(self._context) else 1

    def close(self) -> None:
        """Waits for the image that is being computed. Calling it twice is harmless."""
        with self._one_at_a_time:
            self._context = None
            self._cleanup.close()

    def parts(self, image: NDArray[np.uint8], digest: bytes, limit_tokens: int, param: str) -> list[Part]:
        """What stands in a prompt for `image`, shape (height, width, 3): tokens of the model's own marks, and spans.

        Raises InvalidRequest where they are more than `limit_tokens`, before anything is computed, DecodeFailed, and
        EngineStopping once it is closed.
        """
        with self._one_at_a_time, ExitStack() as stack:
            if not self._context:
                raise EngineStopping("The engine is shutting down.")
            chunks = self._chunks(image, stack)
            total = sum(self._mtmd.mtmd_input_chunk_get_n_tokens(chunk) for chunk in chunks)
            if total > limit_tokens:
                message = f"An image of {image.shape[1]} × {image.shape[0]} pixels takes {total} tokens;"
                raise InvalidRequest(
                    f"{message} {limit_tokens} are the most.",
                    param=param,
                    hint="Send it smaller, or set image_max_tokens.",
                )
            found: list[Part] = []
            spans = 0
            for chunk in chunks:
                if self._mtmd.mtmd_input_chunk_get_type(chunk) == self._mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT:
                    found.append(self._text(chunk))
                else:
                    found.append(self._span(chunk, digest, spans, param))
                    spans += 1
            return found

    def _chunks(self, image: NDArray[np.uint8], stack: ExitStack) -> list[Any]:
        """The image as libmtmd cuts it: one or several pieces, with the model's marks around them. Freed by `stack`."""
        mtmd = self._mtmd
        flat = np.ascontiguousarray(image)
        pointer = flat.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        bitmap = mtmd.mtmd_bitmap_init(image.shape[1], image.shape[0], pointer)
        stack.callback(mtmd.mtmd_bitmap_free, bitmap)
        chunks = mtmd.mtmd_input_chunks_init()
        stack.callback(mtmd.mtmd_input_chunks_free, chunks)
        part = mtmd.mtmd_input_part(None, bitmap)
        # Not its text interface, which would look for markers in what users wrote.
        parts = (ctypes.POINTER(mtmd.mtmd_input_part) * 1)(ctypes.pointer(part))
        status = mtmd.mtmd_tokenize_from_parts(self._context, chunks, parts, 1, False)
        if status != 0:
            raise DecodeFailed(f"The projector could not take the image apart (mtmd_tokenize: {status}).")
        return [mtmd.mtmd_input_chunks_get(chunks, index) for index in range(mtmd.mtmd_input_chunks_size(chunks))]

    def _text(self, chunk: Any) -> list[int]:
        count = ctypes.c_size_t()
        tokens = self._mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(count))
        return list(tokens[: count.value])

    def _span(self, chunk: Any, digest: bytes, part: int, param: str) -> MediaSpan:
        mtmd = self._mtmd
        tokens = int(mtmd.mtmd_input_chunk_get_n_tokens(chunk))
        sees_itself = bool(mtmd.mtmd_decode_use_non_causal(self._context, chunk))
        if sees_itself and tokens > self._micro_batch_tokens:
            message = f"An image takes {tokens} tokens at once; micro_batch_tokens is {self._micro_batch_tokens}."
            raise InvalidRequest(
                message, param=param, hint="Start the engine with larger batch_tokens and micro_batch_tokens."
            )
        status = mtmd.mtmd_encode_chunk(self._context, chunk)
        if status != 0:
            raise DecodeFailed(f"The projector could not compute the image (mtmd_encode_chunk: {status}).")
        embeddings = np.ctypeslib.as_array(mtmd.mtmd_get_output_embd(self._context), (tokens, self.width)).copy()
        if not np.isfinite(embeddings).all():
            raise DecodeFailed("The projector gave values for the image that are not finite.")
        offsets = self._positions(chunk, tokens, 0)
        return MediaSpan(
            ids=tuple(span_ids(digest, part, tokens)),
            embeddings=embeddings,
            offsets=offsets,
            moves=self._positions(chunk, tokens, 1) - offsets,
            positions=int(mtmd.mtmd_input_chunk_get_n_pos(chunk)),
            sees_itself=sees_itself,
        )

    def _positions(self, chunk: Any, tokens: int, start: int) -> NDArray[np.int32]:
        """Shape (axes, tokens). libmtmd's axes come as time, column, row; llama.cpp wants time, row, column."""
        if self.axes == 1:
            return np.arange(start, start + tokens, dtype=np.int32)[None, :]
        image = self._mtmd.mtmd_input_chunk_get_tokens_image(chunk)
        return np.array(list(self._grid(image, tokens, start)), dtype=np.int32).T.copy()

    def _grid(self, image: Any, tokens: int, start: int) -> Iterator[tuple[int, int, int, int]]:
        for index in range(tokens):
            at = self._mtmd.mtmd_image_tokens_get_decoder_pos(image, start, index)
            yield at.t, at.y, at.x, at.z
