"""The byte layout of llama.cpp's sequence states: learned from one known state, then used to check and cut others.

A whole state is a header and up to three sections: attention rows of all tokens; the rows of sliding-window layers, of which
only the last window is written; recurrent state, which has one cell. A *block* is a whole state of a token range without the
last two sections; a *part* is a state without the first one (llama.cpp calls it PARTIAL_ONLY). All integers are
little-endian, nothing is aligned, and there is neither a length nor a checksum: llama.cpp trusts most of it.

Pure: numpy only, no llama.cpp. Layouts with transposed values (no flash attention), more sections or other rows are unknown
here, and an engine that writes such ones shares no state.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from engines.errors import StateIncompatible, StateInvalid

Bytes = NDArray[np.uint8]
Tokens = list[int] | NDArray[np.int32]

MAGIC = 0xAF143CD8
HEADER_BYTES = 8
TENSOR_HEAD_BYTES = 12
_CELL = np.dtype([("pos", "<i4"), ("n_seq", "<u4"), ("seq", "<i4")])
# Models with several positions per token keep two more of them and the token itself.
_WIDE_CELL = np.dtype([("pos", "<i4"), ("n_seq", "<u4"), ("x", "<i4"), ("y", "<i4"), ("token", "<i4"), ("seq", "<i4")])
_MOST_TYPES, _MOST_ROW_BYTES, _MOST_LAYERS = 256, 1 << 24, 4096


class LayoutUnknown(Exception):
    """A state is laid out in a way this module does not know; the message says where it stopped."""


@dataclass(frozen=True)
class Tensor:
    """One layer's keys, values or state rows: ggml type and bytes of a row (one token's, or the one cell's)."""

    kind: int
    row_bytes: int

    @property
    def head(self) -> bytes:
        return struct.pack("<iQ", self.kind, self.row_bytes)


@dataclass(frozen=True)
class AttentionLayout:
    """A section of attention rows: stream count, cell count, cell records, then each tensor's rows, keys before values."""

    wide_cells: bool
    layers: int
    tensors: tuple[Tensor, ...]

    @property
    def cell_dtype(self) -> np.dtype[np.void]:
        return _WIDE_CELL if self.wide_cells else _CELL

    @cached_property
    def token_bytes(self) -> int:
        """What one more token adds."""
        return self.cell_dtype.itemsize + sum(tensor.row_bytes for tensor in self.tensors)

    @cached_property
    def fixed_bytes(self) -> int:
        return 16 + TENSOR_HEAD_BYTES * len(self.tensors)

    def section_bytes(self, cells: int) -> int:
        return self.fixed_bytes + cells * self.token_bytes if cells else 8

    @cached_property
    def _row_bytes(self) -> NDArray[np.intp]:
        return np.array([tensor.row_bytes for tensor in self.tensors], dtype=np.intp)

    def head_offsets(self, cells: int) -> NDArray[np.intp]:
        """Where each tensor's head stands in a section of `cells` cells, counted from the section's start."""
        sizes = TENSOR_HEAD_BYTES + cells * self._row_bytes
        return 16 + cells * self.cell_dtype.itemsize + np.cumsum(sizes) - sizes

    def _head_places(self, cells: int) -> NDArray[np.intp]:
        """The place of every byte of every head; most blocks of a state have as many cells."""
        known, places = self._known_places[0]
        if known != cells:
            places = np.add.outer(self.head_offsets(cells), np.arange(TENSOR_HEAD_BYTES))
            self._known_places[0] = (cells, places)
        return places

    @cached_property
    def _known_places(self) -> list[tuple[int, NDArray[np.intp]]]:
        return [(0, np.empty((0, TENSOR_HEAD_BYTES), dtype=np.intp))]

    @cached_property
    def heads(self) -> Bytes:
        joined = b"".join(tensor.head for tensor in self.tensors)
        return np.frombuffer(joined, dtype=np.uint8).reshape(-1, TENSOR_HEAD_BYTES)

    def cells(self, section: Bytes, count: int) -> NDArray[np.void]:
        """A view of the cell records."""
        return section[8 : 8 + count * self.cell_dtype.itemsize].view(self.cell_dtype)

    def check(self, section: Bytes, count: int) -> NDArray[np.void]:
        """Checks all but the cells' positions of a section whose length was checked. Returns the cell records."""
        streams, written = _read("<II", section)
        if (streams, written) != (1, count):
            raise StateInvalid(f"The state has {streams} streams of {written} cells; one of {count} was announced.")
        cells = self.cells(section, count)
        if (cells["n_seq"] != 1).any():
            raise StateInvalid("The state has cells of several sequences.")
        transposed, layers = _read("<II", section, 8 + cells.nbytes)
        if transposed:
            raise StateIncompatible(
                "The state's values are transposed: it comes from an engine without flash attention."
            )
        if layers != self.layers:
            raise StateIncompatible(f"The state has {layers} attention layers; this engine has {self.layers}.")
        wrong = (section[self._head_places(count)] != self.heads).any(axis=1)
        if wrong.any():
            self._refuse_tensor(section, count, int(wrong.argmax()))
        return cells

    def _refuse_tensor(self, section: Bytes, count: int, index: int) -> None:
        kind, row_bytes = _read("<iQ", section, int(self.head_offsets(count)[index]))
        here = self.tensors[index]
        raise StateIncompatible(
            f"Tensor {index} of the state has ggml type {kind} and rows of {row_bytes} bytes;"
            f" here it has type {here.kind} and rows of {here.row_bytes} bytes."
        )

    @property
    def empty_section(self) -> bytes:
        return struct.pack("<II", 1, 0)


@dataclass(frozen=True)
class RecurrentLayout:
    """A section of recurrent state: cell count, cell records (position, no sequence), then each tensor's row per cell."""

    layers: int
    tensors: tuple[Tensor, ...]

    def section_bytes(self, cells: int) -> int:
        rows = sum(tensor.row_bytes for tensor in self.tensors)
        return 12 + TENSOR_HEAD_BYTES * len(self.tensors) + cells * (8 + rows)

    def check(self, section: Bytes, position: int) -> None:
        """Checks a section of one cell at `position`, whose length was checked."""
        if _read("<IiI", section) != (1, position, 0):
            raise StateInvalid(f"The recurrent state is not that of position {position}.")
        if _read("<II", section, 12) != (0, self.layers):
            raise StateIncompatible("The recurrent state has another number of layers than this engine's.")
        at = 20
        for index, tensor in enumerate(self.tensors):
            if section[at : at + TENSOR_HEAD_BYTES].tobytes() != tensor.head:
                raise StateIncompatible(f"Tensor {index} of the recurrent state has another type or size than here.")
            at += TENSOR_HEAD_BYTES + tensor.row_bytes

    @cached_property
    def empty_section(self) -> bytes:
        heads = b"".join(tensor.head for tensor in self.tensors)
        return struct.pack("<III", 0, 0, self.layers) + heads


@dataclass(frozen=True)
class StateLayout:
    """What this engine's states look like. Byte counts are exact for every token count."""

    attention: AttentionLayout
    window: AttentionLayout | None = None
    recurrent: RecurrentLayout | None = None

    @classmethod
    def learn(cls, whole: Bytes, part: Bytes, tokens: int) -> StateLayout:
        """The layout of a whole state of `tokens` tokens at positions 0…, and its part. Raises LayoutUnknown."""
        # Where nothing is partial llama.cpp ignores the wish and writes the whole state.
        rest = part[HEADER_BYTES:] if not np.array_equal(whole, part) else part[:0]
        end = whole.shape[0] - rest.shape[0]
        if end < HEADER_BYTES or not np.array_equal(whole[end:], rest):
            raise LayoutUnknown("a whole state does not end in its part")
        if _read("<I", whole)[0] != MAGIC:
            raise LayoutUnknown("a state does not begin with the known magic number")
        found = [
            cls(attention, window, recurrent)
            for attention in _attention_layouts(whole[HEADER_BYTES:end], tokens)
            for window, recurrent in _rest_layouts(rest)
        ]
        if len(found) != 1:
            raise LayoutUnknown(f"{len(found)} layouts fit a state of {tokens} tokens")
        return found[0]

    @property
    def has_part(self) -> bool:
        """Whether attention rows alone are not all of a sequence's state."""
        return self.window is not None or self.recurrent is not None

    @cached_property
    def block_tail(self) -> bytes:
        """The empty sections that end a block."""
        return b"".join(section.empty_section for section in (self.window, self.recurrent) if section)

    def block_bytes(self, tokens: int) -> int:
        return HEADER_BYTES + self.attention.section_bytes(tokens) + len(self.block_tail)

    def part_bytes(self, window_cells: int) -> int:
        window = self.window.section_bytes(window_cells) if self.window else 0
        return HEADER_BYTES + window + (self.recurrent.section_bytes(1) if self.recurrent else 0)

    def whole_bytes(self, tokens: int, part_bytes: int) -> int:
        rest = part_bytes - HEADER_BYTES if self.has_part else 0
        return HEADER_BYTES + self.attention.section_bytes(tokens) + rest

    @property
    def text(self) -> str:
        """The layout in one line, the same for equal layouts only: a piece of the fingerprint."""
        return ";".join(
            f"{name}:{section.layers}:{'wide' if getattr(section, 'wide_cells', False) else ''}:"
            + ",".join(f"{tensor.kind}x{tensor.row_bytes}" for tensor in section.tensors)
            for name, section in (("attn", self.attention), ("window", self.window), ("recurrent", self.recurrent))
            if section
        )

    # --- checks: nothing reaches llama.cpp that did not pass them ---------------------------------

    def check_block(self, block: Bytes, start: int, tokens: Tokens) -> None:
        """Raises StateInvalid or StateIncompatible unless `block` holds just `tokens` at positions `start`…"""
        self._check_header(block, self.block_bytes(len(tokens)))
        end = HEADER_BYTES + self.attention.section_bytes(len(tokens))
        cells = self.attention.check(block[HEADER_BYTES:end], len(tokens))
        # Cells mostly stand in order; only what a fragmented cache gave does not.
        positions = cells["pos"] - np.int32(start)
        in_order = np.array_equal(positions, _counted(len(tokens)))
        if not in_order and not np.array_equal(np.sort(positions), _counted(len(tokens))):
            raise StateInvalid(f"The block's positions are not {start} to {start + len(tokens) - 1}.")
        if self.attention.wide_cells:
            told = np.asarray(tokens, dtype=np.int32)
            if not np.array_equal(cells["token"], told if in_order else told[positions]):
                raise StateInvalid("The block was computed from other tokens than its manifest says.")
        if block[end:].tobytes() != self.block_tail:
            raise StateIncompatible("The block ends in other sections than this engine's.")

    def check_part(self, part: Bytes, tokens: int) -> None:
        """Raises StateInvalid or StateIncompatible unless `part` belongs to a state of `tokens` tokens."""
        window_cells = 0
        if self.window:
            if part.shape[0] < HEADER_BYTES + 8:
                raise StateInvalid(f"The state's last part is cut short: it has {part.shape[0]} bytes.")
            window_cells = _read("<I", part, HEADER_BYTES + 4)[0]
            if not 0 < window_cells <= tokens:
                raise StateInvalid(f"The state's last window has {window_cells} cells of {tokens} tokens.")
        self._check_header(part, self.part_bytes(window_cells))
        end = HEADER_BYTES
        if self.window:
            end += self.window.section_bytes(window_cells)
            cells = self.window.check(part[HEADER_BYTES:end], window_cells)
            if not np.array_equal(np.sort(cells["pos"]), np.arange(tokens - window_cells, tokens)):
                raise StateInvalid(f"The state's last window does not end at position {tokens - 1}.")
        if self.recurrent:
            self.recurrent.check(part[end:], tokens - 1)

    def _check_header(self, state: Bytes, wanted_bytes: int) -> None:
        if state.shape[0] != wanted_bytes:
            raise StateInvalid(f"A piece of the state has {state.shape[0]} bytes; {wanted_bytes} were expected.")
        if _read("<I", state)[0] != MAGIC:
            raise StateInvalid("A piece of the state does not begin with llama.cpp's magic number.")

    # --- the same state, the same bytes -----------------------------------------------------------

    def forget_sequence(self, state: Bytes, *, partial: bool) -> None:
        """Zeroes the sequence ids inside a checked state, which say only where it lay."""
        state[4:8] = 0
        section = self.window if partial else self.attention
        if section:
            cells = _read("<I", state, HEADER_BYTES + 4)[0]
            section.cells(state[HEADER_BYTES:], cells)["seq"] = 0

    def as_block(self, exported: Bytes, tokens: int) -> Bytes:
        """Makes a block of what was exported of a range: whatever stands behind the attention rows gives way."""
        end = HEADER_BYTES + self.attention.section_bytes(tokens)
        block = exported[: end + len(self.block_tail)]
        block[end:] = np.frombuffer(self.block_tail, dtype=np.uint8)
        return block


@lru_cache(maxsize=8)
def _counted(count: int) -> NDArray[np.int32]:
    """0 to count - 1; most blocks of a state have as many cells."""
    counted = np.arange(count, dtype=np.int32)
    counted.flags.writeable = False
    return counted


def _read(form: str, data: Bytes, at: int = 0) -> tuple[int, ...]:
    return struct.unpack_from(form, data.data, at)


def _attention_layouts(section: Bytes, count: int) -> Iterator[AttentionLayout]:
    """Every layout under which `section` is one of `count` cells at positions 0…, to the last byte."""
    for layout, end in _attention_readings(section, count):
        if end == section.shape[0] and np.array_equal(np.sort(layout.cells(section, count)["pos"]), np.arange(count)):
            yield layout


def _attention_readings(section: Bytes, count: int) -> Iterator[tuple[AttentionLayout, int]]:
    """Layouts that fit the section's start, and where it would end."""
    if section.shape[0] < 16 or _read("<II", section) != (1, count):
        return
    for wide in (False, True):
        at = 8 + count * (_WIDE_CELL if wide else _CELL).itemsize
        if at + 8 > section.shape[0]:
            continue
        transposed, layers = _read("<II", section, at)
        if transposed or not 0 < layers <= _MOST_LAYERS:
            continue
        # Values may be missing altogether: some models compress both into one row.
        for wanted in (2 * layers, layers):
            tensors, end = _read_tensors(section, at + 8, count, wanted)
            layout = AttentionLayout(wide, layers, tensors)
            if len(tensors) == wanted and (layout.cells(section, count)["n_seq"] == 1).all():
                yield layout, end


def _read_tensors(section: Bytes, at: int, cells: int, most: int) -> tuple[tuple[Tensor, ...], int]:
    tensors: list[Tensor] = []
    while len(tensors) < most and at + TENSOR_HEAD_BYTES <= section.shape[0]:
        kind, row_bytes = _read("<iQ", section, at)
        end = at + TENSOR_HEAD_BYTES + cells * row_bytes
        if not (0 <= kind < _MOST_TYPES and 0 < row_bytes <= _MOST_ROW_BYTES and end <= section.shape[0]):
            break
        tensors.append(Tensor(kind, row_bytes))
        at = end
    return tuple(tensors), at


def _rest_layouts(rest: Bytes) -> Iterator[tuple[AttentionLayout | None, RecurrentLayout | None]]:
    if not rest.shape[0]:
        yield None, None
        return
    recurrent = _recurrent_layout(rest)
    if recurrent:
        yield None, recurrent
    if rest.shape[0] < 8:
        return
    for window, end in _attention_readings(rest, _read("<II", rest)[1]):
        behind = _recurrent_layout(rest[end:]) if end < rest.shape[0] else None
        if end == rest.shape[0] or behind:
            yield window, behind


def _recurrent_layout(section: Bytes) -> RecurrentLayout | None:
    """The layout under which `section` is a recurrent state of one cell, to the last byte; None if it is none."""
    if section.shape[0] < 20 or _read("<I", section)[0] != 1:
        return None
    _, sequences, transposed, layers = _read("<iIII", section, 4)
    if sequences or transposed or not 0 < layers <= _MOST_LAYERS:
        return None
    tensors, end = _read_tensors(section, 20, 1, 2 * layers)
    # As many convolution as attention states, in this order.
    return RecurrentLayout(layers, tensors) if tensors and end == section.shape[0] and len(tensors) % 2 == 0 else None
