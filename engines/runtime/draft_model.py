"""The model's own draft head (NextN, "MTP") in a context of its own beside the target's.

Shapes and calls as in llama-ext.h of the llama.cpp that llama-cpp-python 0.3.36 vendors. Everything belongs to the core's
thread.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np
from llama_cpp import llama_cpp_ext
from numpy.typing import NDArray

from engines.config import EngineConfig
from engines.errors import ModelLoadFailed
from engines.runtime.context_params import DRAFT_ROWS_PER_SEQUENCE, DraftContextParams
from engines.runtime.draft_rows import DraftRows
from engines.runtime.llama import Batch, Llama, float_view
from engines.runtime.slots import Slot

if TYPE_CHECKING:
    from engines.runtime.planner import Row

log = logging.getLogger("hydra.engine.draft")

# So many hidden rows are kept for a sequence before they are fed without a draft being wanted.
KEPT_LIMIT = 1024
# Fewer rows are added one by one: that is what a draft is followed by, and joins no hidden rows.
FEW_ROWS = 8
_FLOAT_BYTES = 4
# A call of less than a microsecond, once the device is done, that keeps the interpreter.
_nextn_rows = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(
    ctypes.cast(llama_cpp_ext.llama_get_embeddings_nextn, ctypes.c_void_p).value or 0
)


class DraftBatch(Batch):
    """A batch whose rows have a hidden row of the target beside their token."""

    def __init__(self, capacity: int, embedding_length: int) -> None:
        super().__init__(capacity)
        self.hidden = np.zeros((capacity, embedding_length), dtype=np.float32)
        self.native.embd = self.hidden.ctypes.data_as(ctypes.POINTER(ctypes.c_float))

    def add_row(self, seq: int, position: int, token: int, hidden: NDArray[np.float32] | None, *, output: bool) -> int:
        row = self.add(seq, position, [token], outputs=int(output))
        self.hidden[row] = 0 if hidden is None else hidden
        return row

    def add_rows(
        self, seq: int, position: int, tokens: Sequence[int], hidden: NDArray[np.float32], *, output: bool = False
    ) -> int:
        """Rows from `position` on, the last one with a result if `output`; `hidden` is of shape (len(tokens), embedding)."""
        last = self.add(seq, position, tokens, outputs=int(output))
        self.hidden[last + 1 - len(tokens) : last + 1] = hidden
        return last

    def one_each(
        self, seqs: list[int], positions: list[int], tokens: NDArray[np.int32], hidden: NDArray[np.float32]
    ) -> None:
        """Holds one row of each sequence instead of what it held; `hidden` has their shape (count, embedding)."""
        self.clear()
        self.count = self.outputs = self.native.n_tokens = count = len(seqs)
        self._seq[:count], self._pos[:count], self._token[:count], self._output[:count] = seqs, positions, tokens, 1
        self.hidden[:count] = hidden


class DraftModel:
    """Drafts the likeliest continuation of many sequences at once. Raises ModelLoadFailed where no context can be made."""

    def __init__(self, llama: Llama, config: EngineConfig, threads: int) -> None:
        self.embedding_length = llama.embedding_length
        # Rises whenever all that the draft context held was given up.
        self.epoch = 0
        # What it holds, or is to hold, of all sequences.
        self.holders: list[DraftRows] = []
        # Whether the last draft was held up by feeding much of a sequence first.
        self.fed_backlog = False
        self._llama = llama
        self._on_device = config.samples_on_device
        self._cleanup = ExitStack()
        params = DraftContextParams(config, threads, llama.context)
        self._cleanup.callback(params.close)
        self._context = llama_cpp.llama_init_from_model(llama.model, params.native)
        if not self._context:
            self.close()
            raise ModelLoadFailed("llama.cpp could not make a context for the draft head; use speculation none")
        self._cleanup.callback(llama_cpp.llama_free, self._context)
        llama.count_draft_context(self._context)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._cells = int(llama_cpp.llama_n_ctx(self._context))
        # Both no more than the context has cells.
        self._batch = DraftBatch(llama_cpp.llama_n_batch(self._context), self.embedding_length)
        # So many rows go along with a draft's first call; of more, all but the last ones are fed in calls before it.
        self._along_rows = int(llama_cpp.llama_n_ubatch(self._context))
        llama_cpp_ext.llama_set_embeddings_nextn(llama.context, True, False)
        llama_cpp_ext.llama_set_embeddings_nextn(self._context, True, True)

    def close(self) -> None:
        """Frees the context, before the target's. Calling it twice is harmless."""
        self._cleanup.close()

    # --- what the target computed ---------------------------------------------------------------

    def target_rows(self, count: int) -> NDArray[np.float32]:
        """Hidden rows of the target's last decode, shape (count, embedding); sequences keep parts of it as they are."""
        pointer = llama_cpp_ext.llama_get_embeddings_nextn(self._llama.context)
        if not pointer:
            raise ValueError("the target has no hidden rows; it was decoded without them")
        return float_view(pointer, count * self.embedding_length).reshape(count, self.embedding_length).copy()

    def note_single(self, rows: Sequence[Row]) -> None:
        """Notes the hidden rows of a step of one token each, which were drawn from: so the device is done."""
        place = _nextn_rows(self._llama.context)
        if not place:
            raise ValueError("the target has no hidden rows; it was decoded without them")
        copied = ctypes.string_at(place, _FLOAT_BYTES * self.embedding_length * len(rows))
        hidden = np.frombuffer(copied, dtype=np.float32).reshape(len(rows), self.embedding_length)
        for row in rows:
            sequence, last = row.slot.sequence, row.last
            end = len(sequence.tokens)
            if end and sequence.draft is not None:  # empty: it failed while it was drawn from
                sequence.draft.note(end - 1, hidden[last : last + 1])

    def feed_backlog(self, rows: Sequence[Row]) -> None:
        """Feeds sequences of a step whose hidden rows have piled up, without asking for a draft."""
        sequences = [row.slot.sequence for row in rows]
        self._feed((s.draft, s.tokens) for s in sequences if s.draft is not None and s.draft.kept > KEPT_LIMIT)

    def make_shareable(self, rows: DraftRows, tokens: list[int], length: int) -> None:
        """Feeds a sequence of `tokens` of which another will take over `length`, where there would be no room for both to be fed
        the same."""
        if rows.end == len(tokens) and length + sum(holder.end for holder in self.holders) > self._cells:
            self._feed([(rows, tokens)])

    @property
    def native(self) -> Any:
        """The context itself, for whoever moves its state."""
        return self._context

    def feed_blind(self, index: int, tokens: list[int]) -> bool:
        """Feeds an empty sequence without hidden rows: good for nothing but to see what its state looks like. False when
        llama.cpp finds no room."""
        self._batch.clear()
        for position, token in enumerate(tokens):
            self._batch.add_row(index, position, token, None, output=position == len(tokens) - 1)
        return self._decode() == 0

    # --- drafting -------------------------------------------------------------------------------

    def propose(self, slots: list[Slot], count: int) -> dict[Slot, tuple[int, ...]]:
        """`count` tokens for each slot, whose sequences must lack just the last token drawn; none at all if llama.cpp
        finds no room. The draft context holds nothing guessed afterwards."""
        if not all(self._may_draft(slot) for slot in slots):
            return {}
        unfed = [self._unfed(slot) for slot in slots]
        is_too_much = sum(unfed) > self._along_rows
        self.fed_backlog = is_too_much or max(unfed) > DRAFT_ROWS_PER_SEQUENCE
        if is_too_much:
            sequences = [slot.sequence for slot in slots]
            if not self._feed((s.draft, s.tokens) for s in sequences if s.draft is not None):
                return {}
        tokens = np.empty((count, len(slots)), dtype=np.int32)
        self._batch.clear()
        rows = [self._add_unfed(slot) for slot in slots]
        for step in range(count):
            if self._decode() != 0:
                return {}
            tokens[step] = [self._likeliest(row) for row in rows]
            if step == 0:
                self._note_fed(slots)
            if step + 1 < count:
                sequences = [slot.sequence for slot in slots]
                hidden = self._hidden(len(slots))
                self._batch.one_each(
                    [sequence.index for sequence in sequences],
                    [len(sequence) + 1 + step for sequence in sequences],
                    tokens[step],
                    hidden,
                )
                rows = list(range(len(slots)))
        for slot in slots:
            self.forget(slot.sequence.index, len(slot.sequence) + 1)
        return {slot: tuple(tokens[:, place].tolist()) for place, slot in enumerate(slots)}

    def _may_draft(self, slot: Slot) -> bool:
        """False where a sequence's last hidden row was never seen."""
        rows, end = slot.sequence.draft, len(slot.sequence)
        return rows is not None and rows.end == end and (not end or rows.kept > 0)

    def _unfed(self, slot: Slot) -> int:
        """How many rows are to be fed, up to that of the last token drawn."""
        rows = slot.sequence.draft
        assert rows is not None
        return len(slot.sequence) + 1 - rows.feed_from()

    def _add_unfed(self, slot: Slot) -> int:
        """Adds all rows up to that of the last token drawn; the batch row of that one."""
        rows, generation, end = slot.sequence.draft, slot.generation, len(slot.sequence)
        assert rows is not None
        assert generation is not None
        place, begin = -1, rows.feed_from()
        if end - begin > FEW_ROWS:
            hidden_each = rows.hidden_before_each(begin, end + 1)
            return self._batch.add_rows(rows.index, begin, generation.tokens[begin : end + 1], hidden_each, output=True)
        for position in range(begin, end + 1):
            token, hidden = generation.tokens[position], rows.hidden_before(position)
            place = self._batch.add_row(slot.sequence.index, position, token, hidden, output=position == end)
        return place

    def _feed(self, sequences: Iterable[tuple[DraftRows, list[int]]]) -> bool:
        """Feeds sequences all their tokens, as many of them in one call as its batch holds: a call of few rows costs a head
        hardly less than one of many. False when llama.cpp finds no room."""
        self._batch.clear()
        fed: list[tuple[DraftRows, int]] = []
        for rows, tokens in sequences:
            begin, end = rows.feed_from(), len(tokens)
            while begin < end:
                stop = min(end, begin + self._batch.room)
                self._batch.add_rows(rows.index, begin, tokens[begin:stop], rows.hidden_before_each(begin, stop))
                fed.append((rows, stop))
                begin = stop
                if not self._batch.room and not self._feed_batch(fed):
                    return False
        return self._feed_batch(fed)

    def _feed_batch(self, fed: list[tuple[DraftRows, int]]) -> bool:
        if fed:
            if self._decode() != 0:
                return False
            for rows, stop in fed:
                rows.was_fed(stop)
            fed.clear()
            self._batch.clear()
        return True

    def _note_fed(self, slots: list[Slot]) -> None:
        for slot in slots:
            if slot.sequence.draft is not None:
                slot.sequence.draft.was_fed(len(slot.sequence) + 1)

    def _decode(self) -> int:
        status = int(llama_cpp.llama_decode(self._context, self._batch.native))
        if status != 0:
            # What the context holds now is unknown, so that all of it is fed anew.
            log.warning("the draft head's llama_decode answered %d for %d rows", status, self._batch.count)
            self._give_up()
        return status

    def _give_up(self) -> None:
        llama_cpp.llama_memory_clear(self._memory, False)
        self.epoch += 1

    def _likeliest(self, row: int) -> int:
        if self._on_device:
            return int(llama_cpp.llama_get_sampled_token_ith(self._context, row))
        logits = llama_cpp.llama_get_logits_ith(self._context, row)
        return int(float_view(logits, self._llama.vocabulary.size).argmax())

    def _hidden(self, count: int) -> NDArray[np.float32]:
        """Hidden rows of the `count` rows with results, in their order, shape (count, embedding); valid until the next decode."""
        pointer = llama_cpp_ext.llama_get_embeddings_nextn(self._context)
        return float_view(pointer, count * self.embedding_length).reshape(count, self.embedding_length)

    def time_draft(self, sequences: int, length: int, clock: Callable[[], float]) -> float | None:
        """Seconds by `clock` that drafts of `length` tokens of the first `sequences` sequences take, after a first time; they
        must be empty. None where llama.cpp refuses one."""
        elapsed_s, is_refused = 0.0, False
        seqs = list(range(sequences))
        for _ in range(2):
            self._batch.clear()
            for seq in seqs:
                self._batch.add_row(seq, 0, 0, None, output=True)
            started = clock()
            for step in range(length):
                is_refused = self._decode() != 0
                if is_refused:
                    break
                tokens = np.array([self._likeliest(row) for row in seqs], dtype=np.int32)
                if step + 1 < length:
                    self._batch.one_each(seqs, [step + 1] * sequences, tokens, self._hidden(sequences))
            elapsed_s = clock() - started
            for seq in seqs:
                self.forget(seq, 0)
        return None if is_refused else elapsed_s

    # --- following the target -------------------------------------------------------------------

    def forget(self, index: int, length: int) -> None:
        llama_cpp.llama_memory_seq_rm(self._memory, index, length, -1)

    def share(self, source: int, target: int, length: int) -> None:
        llama_cpp.llama_memory_seq_cp(self._memory, source, target, 0, length)
