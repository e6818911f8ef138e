"""What a draft head holds of a sequence, out of its context and into another's: its rows in blocks, and the hidden rows it has
not been fed yet. Belongs to the core's thread, but for `finished` and `check`.

Without it drafts begin anew behind a state that came in, which costs speed and no token: whatever does not fit here is left
out, and only bytes that were damaged on their way are an error.
"""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import llama_cpp
import numpy as np

from engines.errors import StateError
from engines.runtime import state_ranges
from engines.runtime.draft_rows import DraftRows
from engines.runtime.state_layout import Bytes, LayoutUnknown, StateLayout

if TYPE_CHECKING:
    from engines.runtime.draft_model import DraftModel

log = logging.getLogger("hydra.engine.state")

_PROBE_TOKENS = (3, 1, 4, 1, 5)
_PROBE_CUT = 3
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class DraftLook:
    """What there is to move: the draft context's rows of positions [start, end), hidden rows of [first, last)."""

    start: int
    end: int
    first: int
    last: int


class DraftCodec:
    """Exports and imports of one draft context, whose states have `layout`. `scratch` is a sequence id that stays empty."""

    def __init__(self, model: DraftModel, scratch: int, layout: StateLayout) -> None:
        self.layout = layout
        self.row_bytes = _FLOAT_BYTES * model.embedding_length
        self._model = model
        self._scratch = scratch
        self._memory = llama_cpp.llama_get_memory(model.native)
        # Whether rows leave and enter without the scratch sequence.
        self.ranges = False

    def look(self, rows: DraftRows | None, length: int) -> DraftLook | None:
        """None where the head could not go on from a sequence of `length` tokens anyway."""
        if rows is None or rows.end != length or not rows.kept:
            return None
        fed = min(rows.feed_from(), length)
        start = min(rows.start, fed)
        return DraftLook(start, fed, length - rows.kept, length)

    # --- out ------------------------------------------------------------------------------------

    def take_block(self, index: int, start: int, end: int, buffer: Bytes) -> int:
        """Writes the rows of positions [start, end) into `buffer`; the bytes written, for `finished_block`."""
        if self.ranges:
            return state_ranges.export_range(self._model.native, index, start, end, buffer)
        try:
            llama_cpp.llama_memory_seq_cp(self._memory, index, self._scratch, start, end)
            return _get(self._model.native, self._scratch, buffer)
        finally:
            self._clear(self._scratch)

    def finished_block(self, taken: Bytes, start: int, tokens: list[int]) -> Bytes:
        """Raises StateError when the head gave up what it held."""
        if taken.nbytes < self.layout.block_bytes(len(tokens)):
            raise StateError(f"The draft context lost positions {start} to {start + len(tokens) - 1} meanwhile.")
        block = self.layout.as_block(taken, len(tokens))
        self.layout.check_block(block, start, tokens)
        self.layout.forget_sequence(block, partial=False)
        return block

    # --- in -------------------------------------------------------------------------------------

    def fits(self, kind: str, tokens: int, size_bytes: int) -> bool:
        """Whether a piece has the size that it has here."""
        return size_bytes == (self.layout.block_bytes(tokens) if kind == "draft" else tokens * self.row_bytes)

    def enter_block(self, rows: DraftRows, start: int, count: int, block: Bytes) -> bool:
        """Appends a checked block. False, and the head holds nothing of the sequence, where there was no room."""
        if self.ranges:
            done = state_ranges.append_from(self._model.native, rows.index, block)
        else:
            done = _set(self._model.native, self._scratch, block)
            if done:
                llama_cpp.llama_memory_seq_cp(self._memory, self._scratch, rows.index, start, start + count)
            self._clear(self._scratch)
        if not done:
            log.warning("the draft context takes no rows of a state: drafts begin anew")
            self._clear(rows.index)
        return done

    def resume(self, rows: DraftRows, look: DraftLook, hidden: Bytes) -> None:
        """Ends an import: the head goes on behind what came in."""
        table = np.frombuffer(hidden.tobytes(), dtype=np.float32).reshape(look.last - look.first, -1)
        rows.resume(look.start, look.end, look.first, table)

    def forget(self, rows: DraftRows) -> None:
        """Drops all of a sequence, also what came in without `resume`."""
        self._clear(rows.index)
        rows.clear()

    def _clear(self, index: int) -> None:
        llama_cpp.llama_memory_seq_rm(self._memory, index, -1, -1)


def probed_drafts(rows: DraftRows | None, scratch: int) -> DraftCodec | None:
    """A codec that was proved on a few rows of an idle context; None, which is logged, where its states are unknown here."""
    if rows is None:
        return None
    model, index = rows.model, rows.index
    try:
        return _probed(model, index, scratch)
    except (LayoutUnknown, StateError) as error:
        log.warning("drafts will begin anew behind states from elsewhere: %s", error)
        return None
    finally:
        memory = llama_cpp.llama_get_memory(model.native)
        for used in (index, scratch):
            llama_cpp.llama_memory_seq_rm(memory, used, -1, -1)


def _probed(model: DraftModel, index: int, scratch: int) -> DraftCodec:
    tokens, count = list(_PROBE_TOKENS), len(_PROBE_TOKENS)
    if not model.feed_blind(index, tokens):
        raise LayoutUnknown("the probe's rows could not be computed")
    before = _whole(model, index)
    layout = StateLayout.learn(before, before, count)
    codec = DraftCodec(model, scratch, layout)
    for ranges in (False, True) if state_ranges.HAS_RANGES else (False,):
        codec.ranges = ranges
        try:
            _prove(codec, index, tokens, before)
        except StateError as error:
            if not ranges:
                raise
            log.error("ranges of drafts' rows move through a scratch sequence: %s", error.message)
            codec.ranges = False
    return codec


def _prove(codec: DraftCodec, index: int, tokens: list[int], before: Bytes) -> None:
    """Raises StateError if the probe's rows, out in two blocks and in again, are others."""
    blocks = []
    for start, end in ((0, _PROBE_CUT), (_PROBE_CUT, len(tokens))):
        buffer = np.empty(codec.layout.block_bytes(end - start), dtype=np.uint8)
        taken = buffer[: codec.take_block(index, start, end, buffer)]
        blocks.append((start, end, codec.finished_block(taken, start, tokens[start:end])))
    codec._clear(index)
    entering = DraftRows(index, codec._model)
    for start, end, block in blocks:
        if not codec.enter_block(entering, start, end - start, block):
            raise StateError("the probe's rows could not be brought back")
    if not np.array_equal(_whole(codec._model, index), before):
        raise StateError("rows that went out and in again have other bytes")


def _whole(model: DraftModel, index: int) -> Bytes:
    state = np.empty(int(llama_cpp.llama_state_seq_get_size(model.native, index)), dtype=np.uint8)
    state = state[: _get(model.native, index, state)]
    state[4:8] = 0
    return state


def _get(context: object, index: int, buffer: Bytes) -> int:
    pointer = buffer.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
    return int(llama_cpp.llama_state_seq_get_data(context, pointer, buffer.nbytes, index))


def _set(context: object, index: int, block: Bytes) -> bool:
    pointer = block.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
    return int(llama_cpp.llama_state_seq_set_data(context, pointer, block.nbytes, index)) == block.nbytes > 0
