"""Whole states in one piece, as foreign systems send and want them: put together from blocks, and cut into blocks again.

llama.cpp's whole state is layer-major, so one more token moves nearly every byte: it can neither be cut as it comes nor be
compared with an older one. Hence it lies in memory once, and the engine's thread sees blocks only.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engines.errors import StateIncompatible, StateInvalid
from engines.runtime.state_forms import RAW_MAGIC, V2_VERSION
from engines.runtime.state_layout import HEADER_BYTES, TENSOR_HEAD_BYTES, Bytes, StateLayout, Tensor


def v2_head(tokens: list[int]) -> bytes:
    return struct.pack("<BII", V2_VERSION, len(tokens), len(tokens)) + np.array(tokens, "<i4").tobytes() + b"\0"


@dataclass(frozen=True)
class WholeState:
    """llama.cpp's whole state of `tokens`, layer-major: to put blocks into, or to cut them out of."""

    layout: StateLayout
    tokens: list[int]
    data: Bytes
    order: NDArray[np.intp]  # which cell holds position i

    @classmethod
    def blank(cls, layout: StateLayout, tokens: list[int], part_bytes: int) -> WholeState:
        data = np.empty(layout.whole_bytes(len(tokens), part_bytes), dtype=np.uint8)
        return cls(layout, tokens, data, np.arange(len(tokens)))

    @classmethod
    def checked(cls, layout: StateLayout, tokens: list[int] | None, data: Bytes) -> WholeState:
        """A state from outside. `tokens` None: its cells name them. Raises StateInvalid or StateIncompatible."""
        if data.shape[0] < HEADER_BYTES + 8 or data[:4].tobytes() != RAW_MAGIC:
            raise StateInvalid("The state does not begin with llama.cpp's magic number.")
        streams, count = struct.unpack_from("<II", data.data, HEADER_BYTES)
        if streams != 1 or count < 1:
            raise StateInvalid(f"The state has {streams} streams and {count} cells; one of at least one was expected.")
        if tokens is not None and count != len(tokens):
            raise StateInvalid(f"The state has {count} cells for {len(tokens)} tokens.")
        end = HEADER_BYTES + layout.attention.section_bytes(count)
        if data.shape[0] < end:
            raise StateInvalid(f"The state is cut short: it has {data.shape[0]} bytes, its rows alone take {end}.")
        cells = layout.attention.check(data[HEADER_BYTES:end], count)
        order = np.argsort(cells["pos"], kind="stable")
        if not np.array_equal(cells["pos"][order], np.arange(count)):
            raise StateInvalid(f"The state's positions are not 0 to {count - 1}.")
        if tokens is None:
            if not layout.attention.wide_cells:
                raise StateIncompatible(
                    "A raw state of this model does not say which tokens it was computed from.", hint="Send form v2."
                )
            tokens = cells["token"][order].tolist()
        whole = cls(layout, tokens, data, order)
        if not layout.has_part and data.shape[0] != end:
            raise StateInvalid(f"{data.shape[0] - end} bytes follow the end of the state.")
        if layout.has_part:
            layout.check_part(whole.part(), count)
        return whole

    def put_block(self, start: int, count: int, block: Bytes) -> None:
        attention, size = self.layout.attention, len(self.tokens)
        whole, rows = self.data[HEADER_BYTES:], block[HEADER_BYTES:]
        if start == 0:
            self.data[:HEADER_BYTES] = block[:HEADER_BYTES]
            whole[:8] = np.frombuffer(struct.pack("<II", 1, size), np.uint8)
            behind = 8 + size * attention.cell_dtype.itemsize
            whole[behind : behind + 8] = np.frombuffer(struct.pack("<II", 0, attention.layers), np.uint8)
        attention.cells(whole, size)[start : start + count] = attention.cells(rows, count)
        for tensor, there, here in self._tensors(count):
            if start == 0:
                whole[there - TENSOR_HEAD_BYTES : there] = np.frombuffer(tensor.head, np.uint8)
            row = tensor.row_bytes
            whole[there + start * row : there + (start + count) * row] = rows[here : here + count * row]

    def put_part(self, part: Bytes) -> None:
        self.data[HEADER_BYTES + self.layout.attention.section_bytes(len(self.tokens)) :] = part[HEADER_BYTES:]

    def block(self, start: int, count: int) -> Bytes:
        """A block cut out, as `check_block` wants it."""
        attention, size = self.layout.attention, len(self.tokens)
        block = np.zeros(self.layout.block_bytes(count), dtype=np.uint8)
        block[:HEADER_BYTES] = self.data[:HEADER_BYTES]
        whole, rows = self.data[HEADER_BYTES:], block[HEADER_BYTES:]
        order = self.order[start : start + count]
        rows[:8] = np.frombuffer(struct.pack("<II", 1, count), np.uint8)
        attention.cells(rows, count)[:] = attention.cells(whole, size)[order]
        behind = 8 + count * attention.cell_dtype.itemsize
        rows[behind : behind + 8] = np.frombuffer(struct.pack("<II", 0, attention.layers), np.uint8)
        for tensor, there, here in self._tensors(count):
            rows[here - TENSOR_HEAD_BYTES : here] = np.frombuffer(tensor.head, np.uint8)
            row = tensor.row_bytes
            inside = whole[there : there + size * row].reshape(size, row)
            rows[here : here + count * row].reshape(count, row)[:] = inside[order]
        tail = HEADER_BYTES + attention.section_bytes(count)
        block[tail:] = np.frombuffer(self.layout.block_tail, np.uint8)
        return block

    def part(self) -> Bytes:
        """What follows the attention rows, with a header of its own."""
        rest = self.data[HEADER_BYTES + self.layout.attention.section_bytes(len(self.tokens)) :]
        return np.concatenate([self.data[:HEADER_BYTES], rest])

    def _tensors(self, count: int) -> Iterator[tuple[Tensor, int, int]]:
        """Each tensor with the place of its rows here and in a block of `count` tokens, counted behind the header."""
        attention = self.layout.attention
        there, here = attention.head_offsets(len(self.tokens)), attention.head_offsets(count)
        for index, tensor in enumerate(attention.tensors):
            yield tensor, int(there[index]) + TENSOR_HEAD_BYTES, int(here[index]) + TENSOR_HEAD_BYTES


def read_v2(data: bytes | bytearray, vocabulary_size: int, layout: StateLayout) -> tuple[list[int], Bytes]:
    """The tokens and the whole state in a version 2 blob; its checkpoint and logits are passed over.

    Raises StateInvalid. A checkpoint of the foreign system stands for one cut and is no part of the state itself.
    """
    view, at = memoryview(data), 9
    if len(view) < 10:
        raise StateInvalid(f"The state is cut short: it has {len(view)} bytes.")
    _, past, count = struct.unpack_from("<BII", view)
    if not 0 < past <= count or at + 4 * count + 1 > len(view):
        raise StateInvalid(f"The state says that {past} of {count} tokens have state; it has {len(view)} bytes.")
    tokens = np.frombuffer(view, "<i4", past, at).tolist()
    at += 4 * count
    flags, at = view[at], at + 1
    if flags & ~1:
        raise StateInvalid(f"The state has flags {flags:#x}, which are not known.")
    if flags:
        at += 16  # positions and token count of the checkpoint
        for _ in ("target", "draft"):
            if at + 8 > len(view):
                raise StateInvalid("The state's checkpoint is cut short.")
            at += 8 + int(struct.unpack_from("<Q", view, at)[0])
    if at >= len(view):
        raise StateInvalid("The state ends before its rows.")
    whole = np.frombuffer(view[at:], dtype=np.uint8)
    rows = HEADER_BYTES + layout.attention.section_bytes(past)
    logits = 4 * vocabulary_size
    wanted = rows if not layout.has_part else rows + _rest_bytes(whole, rows, layout)
    return tokens, whole[:-logits] if whole.shape[0] == wanted + logits else whole


def _rest_bytes(whole: Bytes, at: int, layout: StateLayout) -> int:
    """Length of the sections behind the attention rows at `at`."""
    window_cells = 0
    if layout.window and whole.shape[0] >= at + 8:
        window_cells = struct.unpack_from("<I", whole.data, at + 4)[0]
    return layout.part_bytes(window_cells) - HEADER_BYTES
