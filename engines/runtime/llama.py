"""llama.cpp behind plain Python types: model, vocabulary, batch and context. What stands before it, placement and memory,
is in modules of its own.

Everything here except `Vocabulary` belongs to the thread that made the context. Shapes and return codes as in llama.h of
the llama.cpp that llama-cpp-python 0.3.36 vendors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from engines.config import EngineConfig
from engines.errors import ModelLoadFailed
from engines.runtime import llama_log, state_ranges
from engines.runtime.context_params import ContextParams
from engines.runtime.long_runs import BLOCK_CHARS, cut_long_runs
from engines.runtime.media_batch import SpanBatch
from engines.runtime.memory import LoadWatch, MemoryReport
from engines.runtime.placement import place
from engines.runtime.state_ranges import BYTES

# Calls of a few microseconds that keep the interpreter: to get it back from a busy event loop takes longer than they do.
_KEEPING = ctypes.PyDLL("libllama", handle=llama_cpp.llama_cpp._lib._handle)
_seq_cp, _seq_rm = _KEEPING.llama_memory_seq_cp, _KEEPING.llama_memory_seq_rm
_seq_cp.argtypes, _seq_cp.restype = [ctypes.c_void_p, *[ctypes.c_int32] * 4], None
_seq_rm.argtypes, _seq_rm.restype = [ctypes.c_void_p, *[ctypes.c_int32] * 3], ctypes.c_bool
# With more cells they take longer than that, and whoever proves pieces of state beside waits.
KEEPING_TOKENS = 512
_QUEUED = 4  # a flag of states that only our builds know


class Vocabulary:
    """Tokens of a loaded model. Read-only, so any thread may use it; all pieces are kept as bytes."""

    def __init__(self, model: Any) -> None:
        self._vocab = self.native = llama_cpp.llama_model_get_vocab(model)
        self.size: int = llama_cpp.llama_vocab_n_tokens(self._vocab)
        self.bos: int = llama_cpp.llama_vocab_bos(self._vocab)
        self.eos: int = llama_cpp.llama_vocab_eos(self._vocab)
        # What stands behind the text before a cursor, -1 where nothing does.
        self.cursor_marker: int = llama_cpp.llama_vocab_fim_suf(self._vocab)
        self.adds_bos: bool = llama_cpp.llama_vocab_get_add_bos(self._vocab)
        self.pieces: list[bytes] = [self._piece(token, special=False) for token in range(self.size)]
        self.longest_piece_bytes = max(1, max(len(piece) for piece in self.pieces))
        # As written in a prompt: control tokens have no piece, but stand there by their names.
        self.written_bytes = np.array(
            [len(piece or self._piece(token, special=True)) for token, piece in enumerate(self.pieces)], dtype=np.int64
        )
        self.end_tokens = frozenset(t for t in range(self.size) if llama_cpp.llama_vocab_is_eog(self._vocab, t))

    def _piece(self, token: int, *, special: bool) -> bytes:
        for size in (64, 4096):
            buffer = ctypes.create_string_buffer(size)
            length = llama_cpp.llama_token_to_piece(self._vocab, token, buffer, size, 0, special)
            if length >= 0:
                return buffer.raw[:length]
        raise ModelLoadFailed(f"Token {token} of the vocabulary is longer than 4096 bytes")

    def text_of(self, token: int) -> str:
        """The token as the vocabulary writes it, control tokens included; "" for a token that does not exist (-1)."""
        return "" if token < 0 else self._piece(token, special=True).decode("utf-8", "replace")

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of `text`. Long runs of one kind of characters are taken piece by piece (see long_runs.py)."""
        pieces = [text]
        if len(text) > BLOCK_CHARS and self._splits_by_regex:
            pieces = cut_long_runs(text, self._special_texts)
        tokens = self._tokenize(pieces[0], add_special=add_special, parse_special=parse_special)
        if len(pieces) == 1:
            return tokens
        # What a vocabulary puts behind a text comes after its last piece.
        ending = [tokens.pop()] if add_special and llama_cpp.llama_vocab_get_add_eos(self._vocab) else []
        for piece in pieces[1:]:
            tokens += self._tokenize(piece, add_special=False, parse_special=parse_special)
        return tokens + ending

    def _tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """llama.cpp tells the needed size by a negative count, hence at most two calls."""
        raw = text.encode("utf-8")
        capacity = len(raw) + 8
        for _ in range(2):
            buffer = (llama_cpp.llama_token * capacity)()
            count = llama_cpp.llama_tokenize(self._vocab, raw, len(raw), buffer, capacity, add_special, parse_special)
            if count >= 0:
                return list(buffer[:count])
            capacity = -count
        raise ValueError("llama_tokenize wants more room than it asked for")

    @cached_property
    def _splits_by_regex(self) -> bool:
        kind: int = llama_cpp.llama_vocab_type(self._vocab)
        return kind == int(llama_cpp.LLAMA_VOCAB_TYPE_BPE)

    @cached_property
    def _special_texts(self) -> list[str]:
        """Tokens that llama.cpp finds in a text before it splits the rest: control tokens and others that were added."""
        special = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED
        return [
            self.text_of(token)
            for token in range(self.size)
            if llama_cpp.llama_vocab_get_attr(self._vocab, token) & special
        ]


def keeps_candidates() -> bool:
    """Whether what a chain on the device hands out stays until it is read (native/kept_candidates.py)."""
    return hasattr(_KEEPING, "llama_sampling_keeps_candidates")


def float_view(pointer: Any, count: int) -> NDArray[np.float32]:
    """A view of `count` floats of llama.cpp's; np.ctypeslib.as_array takes fifty microseconds for this."""
    array: Any = (ctypes.c_float * count).from_address(ctypes.addressof(pointer.contents))
    view: NDArray[np.float32] = np.frombuffer(array, dtype=np.float32)
    return view


class Batch:
    """A reusable llama_batch over numpy arrays; row i has one token, one position, one sequence and an output flag."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.count = 0
        self.outputs = 0
        self._token = np.zeros(capacity, dtype=np.int32)
        self._pos = np.zeros(capacity, dtype=np.int32)
        self._n_seq = np.ones(capacity, dtype=np.int32)
        self._seq = np.zeros(capacity, dtype=np.int32)
        self._output = np.zeros(capacity, dtype=np.int8)
        # llama.cpp wants a pointer per row; row i points at element i of _seq, so filling _seq is enough.
        self._seq_rows = np.uint64(self._seq.ctypes.data) + np.arange(capacity, dtype=np.uint64) * np.uint64(4)
        self.native = llama_cpp.llama_batch()
        self.native.token = self._token.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token))
        self.native.pos = self._pos.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_pos))
        self.native.n_seq_id = self._n_seq.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        self.native.seq_id = self._seq_rows.ctypes.data_as(ctypes.POINTER(ctypes.POINTER(llama_cpp.llama_seq_id)))
        self.native.logits = self._output.ctypes.data_as(ctypes.POINTER(ctypes.c_int8))

    def clear(self) -> None:
        self.count = 0
        self.outputs = 0

    @property
    def room(self) -> int:
        return self.capacity - self.count

    def add(self, seq: int, start: int, tokens: Sequence[int], *, outputs: int) -> int:
        """Appends `tokens` at positions `start`… of `seq`, the last `outputs` of them with results; returns the last row."""
        first, end = self.count, self.count + len(tokens)
        if end == first + 1:  # a stream that decodes: numpy takes longer to make a slice than to fill it
            self._token[first], self._pos[first], self._seq[first], self._output[first] = tokens[0], start, seq, outputs
            self.outputs += outputs
            self.count = self.native.n_tokens = end
            return first
        self._token[first:end] = tokens
        self._pos[first:end] = np.arange(start, start + len(tokens))
        self._seq[first:end] = seq
        self._output[first:end] = 0
        self._output[end - outputs : end] = 1
        self.outputs += outputs
        self.count = end
        self.native.n_tokens = end
        return end - 1


class Llama:
    """A model and its context. Made, used and closed by one thread. Raises ModelLoadFailed with a line for people."""

    def __init__(self, config: EngineConfig, threads: int, on_progress: Callable[[float], None]) -> None:
        self._cleanup = ExitStack()
        llama_log.install()
        llama_cpp.llama_backend_init()
        try:
            self._watch = LoadWatch(config)
            self._load(config, on_progress)
            with llama_log.collected() as self._said:
                self._make_context(config, threads)
            self.memory_report: MemoryReport = self._watch.report(self.model, self.context, self._said.lines)
        except BaseException:
            self.close()
            raise

    def _load(self, config: EngineConfig, on_progress: Callable[[float], None]) -> None:
        self._placement = place(config)  # llama.cpp reads its arrays as long as the model lives
        params = self._placement.native

        @llama_cpp.llama_progress_callback
        def progress(share: float, _user_data: object) -> bool:
            on_progress(share)
            return True

        params.progress_callback = progress
        self.model = llama_cpp.llama_model_load_from_file(config.model_path.encode(), params)
        if not self.model:
            raise ModelLoadFailed(f"llama.cpp could not load {config.model_path}; is it a complete, supported GGUF?")
        self._cleanup.callback(llama_cpp.llama_model_free, self.model)
        self.vocabulary = Vocabulary(self.model)
        self.context_train_tokens: int = llama_cpp.llama_model_n_ctx_train(self.model)
        self.window_tokens: int = llama_cpp.llama_model_n_swa(self.model)
        # A recurrent state cannot drop a suffix, which decides how prefixes are reused and batches are built.
        self.has_recurrent_state: bool = llama_cpp.llama_model_is_recurrent(
            self.model
        ) or llama_cpp.llama_model_is_hybrid(self.model)
        self.forgets_window = self.window_tokens > 0 and not config.full_window
        # Our builds copy states beside the processor's work on cells (native/changes.py); on a CPU there is nothing beside it.
        self.queues_states = config.gpu_layers != 0 and hasattr(_KEEPING, "llama_state_seq_queues")
        self.parameter_count: int = llama_cpp.llama_model_n_params(self.model)
        self.size_bytes: int = llama_cpp.llama_model_size(self.model)
        self.embedding_length: int = llama_cpp.llama_model_n_embd(self.model)
        template = llama_cpp.llama_model_chat_template(self.model, None)
        self.chat_template: str | None = template.decode("utf-8", "replace") if template else None

    def _make_context(self, config: EngineConfig, threads: int) -> None:
        params = ContextParams(config, threads)
        # Registered before the context, so freed after it.
        self._cleanup.callback(params.close)
        self.context = llama_cpp.llama_init_from_model(self.model, params.native)
        if not self.context:
            raise ModelLoadFailed(
                f"llama.cpp could not make a context of {config.cells} cells for {config.slots} slots;"
                " use fewer slots, a shorter context or smaller KV types"
            )
        self._cleanup.callback(llama_cpp.llama_free, self.context)
        self.memory = llama_cpp.llama_get_memory(self.context)
        # At most as many as there are cells, however large a batch was asked for.
        self.batch_tokens: int = llama_cpp.llama_n_batch(self.context)
        self._candidate_ids = np.zeros(config.device_candidates, dtype=np.int32)
        self._candidate_logits = np.zeros(config.device_candidates, dtype=np.float32)
        # Asked for once: numpy takes longer to tell an address than to copy what lies there.
        self._candidate_places = self._candidate_ids.ctypes.data, self._candidate_logits.ctypes.data

    def count_draft_context(self, context: Any) -> None:
        """Measures again, with the context of the model's draft head."""
        self.memory_report = self._watch.report(self.model, self.context, self._said.lines, context)

    def decode(self, batch: Batch) -> int:
        """0 done; 1 no room in the cache; negative: refused. Releases the GIL while it computes."""
        return int(llama_cpp.llama_decode(self.context, batch.native))

    def decode_span(self, batch: SpanBatch, *, sees_itself: bool) -> int:
        """The same for embeddings, which all see each other if `sees_itself`; changing that costs a new graph each time."""
        if not sees_itself:
            return int(llama_cpp.llama_decode(self.context, batch.native))
        llama_cpp.llama_set_causal_attn(self.context, False)
        try:
            return int(llama_cpp.llama_decode(self.context, batch.native))
        finally:
            llama_cpp.llama_set_causal_attn(self.context, True)

    def synchronize(self) -> None:
        """Waits until the device has computed what `decode` asked for."""
        llama_cpp.llama_synchronize(self.context)

    def logits(self, row: int) -> NDArray[np.float32]:
        """A view of the row's logits, shape (vocabulary,); valid until the next decode."""
        pointer = llama_cpp.llama_get_logits_ith(self.context, row)
        if not pointer:
            raise ValueError(f"row {row} of the batch asked for no logits")
        return float_view(pointer, self.vocabulary.size)

    def candidates(self, row: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Ids and logits of the row's device candidates, in no order; valid until the next call.

        Raises ValueError where no chain handed any out.
        """
        count = int(llama_cpp.llama_get_sampled_candidates_count_ith(self.context, row))
        if not 0 < count <= self._candidate_ids.shape[0]:
            raise ValueError(f"row {row} of the batch has {count} candidates")
        ids = llama_cpp.llama_get_sampled_candidates_ith(self.context, row)
        logits = llama_cpp.llama_get_sampled_logits_ith(self.context, row)
        ids_place, logits_place = self._candidate_places
        ctypes.memmove(ids_place, ids, count * 4)
        ctypes.memmove(logits_place, logits, count * 4)
        return self._candidate_ids[:count], self._candidate_logits[:count]

    def share(self, source: int, target: int, length: int) -> None:
        """Lets `target` hold the first `length` positions of `source` too; recurrent state is shared as it is now."""
        llama_cpp.llama_memory_seq_cp(self.memory, source, target, 0, length)

    def state_bytes(self, seq: int) -> int:
        return int(llama_cpp.llama_state_seq_get_size(self.context, seq))

    def export_state(self, seq: int) -> NDArray[np.uint8]:
        """The whole state of `seq` in llama.cpp's own format (llama_state_seq_get_data)."""
        state = np.empty(self.state_bytes(seq), dtype=np.uint8)
        pointer = state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        written = int(llama_cpp.llama_state_seq_get_data(self.context, pointer, state.nbytes, seq))
        return state[:written]

    def import_state(self, seq: int, state: NDArray[np.uint8]) -> bool:
        """Loads what `export_state` of this very context gave. False when llama.cpp did not take every byte of it."""
        pointer = state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        read = int(llama_cpp.llama_state_seq_set_data(self.context, pointer, state.nbytes, seq))
        return read == state.nbytes > 0

    def share_range(self, source: int, target: int, start: int, end: int) -> None:
        """Lets `target` hold positions [start, end) of `source` too, in a unified cache without a copy. A recurrent state has
        no positions: `target` then shares the source's as it is now, and none where the source is empty."""
        call = _seq_cp if end - start <= KEEPING_TOKENS else llama_cpp.llama_memory_seq_cp
        call(self.memory, source, target, start, end)

    def part_bytes(self, seq: int) -> int:
        """Size of what `export_into(…, partial=True)` writes."""
        flags = llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        return int(llama_cpp.llama_state_seq_get_size_ext(self.context, seq, flags))

    def export_into(self, seq: int, buffer: NDArray[np.uint8], *, partial: bool, queued: bool = False) -> int:
        """Writes the state of `seq` into `buffer`, `partial`: only what cannot be cut (recurrent state, last window).

        `queued`, where `queues_states`: the bytes are there after the next such call, import or `synchronize`, and the buffer
        must stay until then. Returns the bytes written, 0 when the buffer is too small.
        """
        flags = llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY if partial else 0
        flags |= _QUEUED if queued and self.queues_states else 0
        pointer = ctypes.cast(buffer.ctypes.data, BYTES)
        return int(llama_cpp.llama_state_seq_get_data_ext(self.context, pointer, buffer.nbytes, seq, flags))

    def import_from(self, seq: int, buffer: NDArray[np.uint8], *, partial: bool, queued: bool = False) -> bool:
        """Loads what `export_into` gave, whose every field must have been checked before: llama.cpp does not.

        `queued` as there: the buffer is still being read. False when it did not take all of it; parts of the old state may then
        survive until `clear`.
        """
        flags = llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY if partial else 0
        flags |= _QUEUED if queued and self.queues_states else 0
        pointer = ctypes.cast(buffer.ctypes.data, BYTES)
        read = int(llama_cpp.llama_state_seq_set_data_ext(self.context, pointer, buffer.nbytes, seq, flags))
        return read == buffer.nbytes > 0

    def export_range(self, seq: int, start: int, end: int, buffer: NDArray[np.uint8], *, queued: bool = False) -> int:
        """`export_range` of state_ranges.py, queued as in `export_into`."""
        return state_ranges.export_range(
            self.context, seq, start, end, buffer, _QUEUED if queued and self.queues_states else 0
        )

    def append_from(self, seq: int, buffer: NDArray[np.uint8], *, queued: bool = False) -> bool:
        """`append_from` of state_ranges.py, queued as in `import_from`."""
        return state_ranges.append_from(self.context, seq, buffer, _QUEUED if queued and self.queues_states else 0)

    def metadata(self) -> dict[str, str]:
        """The model file's scalar keys and values as llama.cpp prints them; long values are cut."""
        found = {}
        for index in range(llama_cpp.llama_model_meta_count(self.model)):
            key, value = ctypes.create_string_buffer(256), ctypes.create_string_buffer(1024)
            if llama_cpp.llama_model_meta_key_by_index(self.model, index, key, len(key)) >= 0:
                llama_cpp.llama_model_meta_val_str_by_index(self.model, index, value, len(value))
                found[key.value.decode("utf-8", "replace")] = value.value.decode("utf-8", "replace")
        return found

    @property
    def needs_checkpoints(self) -> bool:
        """Whether a prefix can be reused only where some state still stands, not cut out of a longer one."""
        return self.has_recurrent_state or self.forgets_window

    def keep_prefix(self, seq: int, length: int) -> bool:
        """Drops positions ≥ `length` of `seq`. False when the memory cannot (recurrent state); nothing changed then."""
        return bool(llama_cpp.llama_memory_seq_rm(self.memory, seq, length, -1))

    def clear(self, seq: int, tokens: int = 0) -> None:
        """Empties `seq`, which has about so many tokens, wholly; never fails and also drops a recurrent state."""
        call = _seq_rm if tokens <= KEEPING_TOKENS else llama_cpp.llama_memory_seq_rm
        call(self.memory, seq, -1, -1)

    def wipe(self, seq: int) -> None:
        """`clear`; by our own builds what only `seq` held is zeros then, for llama.cpp also reads rows that nobody holds."""
        if state_ranges.HAS_WIPE:
            state_ranges.wipe(self.context, seq)
        self.clear(seq)

    def first_position(self, seq: int) -> int:
        """The lowest position still held in every layer, -1 when empty; above 0 behind a sliding window."""
        return int(llama_cpp.llama_memory_seq_pos_min(self.memory, seq))

    def last_position(self, seq: int) -> int:
        return int(llama_cpp.llama_memory_seq_pos_max(self.memory, seq))

    def close(self) -> None:
        """Frees context and model. Calling it twice is harmless."""
        self._cleanup.close()
