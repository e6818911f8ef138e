"""The layout of states, learned and checked on bytes made here after the documented format; real ones are in test_state_codec."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.errors import StateError, StateIncompatible, StateInvalid
from engines.runtime.state_layout import MAGIC, AttentionLayout, LayoutUnknown, RecurrentLayout, StateLayout, Tensor

F16, Q8 = 1, 8
DENSE = AttentionLayout(False, 2, (Tensor(F16, 32), Tensor(F16, 64), Tensor(F16, 32), Tensor(F16, 64)))
WIDE = AttentionLayout(True, 1, (Tensor(Q8, 34), Tensor(F16, 32)))
COMPRESSED = AttentionLayout(False, 3, (Tensor(F16, 48),) * 3)
STATE = RecurrentLayout(8, (Tensor(0, 96), Tensor(0, 96), Tensor(0, 512), Tensor(0, 512)))
LAYOUTS = {
    "dense": StateLayout(DENSE),
    "wide cells": StateLayout(WIDE),
    "keys only": StateLayout(COMPRESSED),
    "windowed": StateLayout(DENSE, window=COMPRESSED),
    "hybrid": StateLayout(WIDE, recurrent=STATE),
    "windowed hybrid": StateLayout(DENSE, window=DENSE, recurrent=STATE),
}
TOKENS = [5, 9, 5, 7, 3, 1]


def section(layout: AttentionLayout, positions: list[int], tokens: list[int], seq: int = 3) -> bytes:
    if not positions:
        return struct.pack("<II", 1, 0)
    out = struct.pack("<II", 1, len(positions))
    for position in positions:
        wide = struct.pack("<iii", position, position, tokens[position]) if layout.wide_cells else b""
        out += struct.pack("<iI", position, 1) + wide + struct.pack("<i", seq)
    out += struct.pack("<II", 0, layout.layers)
    for index, tensor in enumerate(layout.tensors):
        out += struct.pack("<iQ", tensor.kind, tensor.row_bytes)
        out += b"".join(bytes([(index * 31 + p) % 251] * tensor.row_bytes) for p in positions)
    return out


def recurrent(layout: RecurrentLayout, position: int | None) -> bytes:
    cells = b"" if position is None else struct.pack("<iI", position, 0)
    out = struct.pack("<I", 0 if position is None else 1) + cells + struct.pack("<II", 0, layout.layers)
    for tensor in layout.tensors:
        out += struct.pack("<iQ", tensor.kind, tensor.row_bytes)
        out += b"" if position is None else bytes([tensor.row_bytes % 251] * tensor.row_bytes)
    return out


def state(
    layout: StateLayout, *, window: int = 3, block: tuple[int, int] | None = None, partial: bool = False
) -> np.ndarray:
    """A whole state of TOKENS, the block of a range, or the part."""
    count = len(TOKENS)
    start, end = block or (0, count)
    out = struct.pack("<Ii", MAGIC, 3)
    out += b"" if partial else section(layout.attention, list(range(start, end)), TOKENS)
    if layout.window:
        out += section(layout.window, [] if block else list(range(count - window, count)), TOKENS)
    if layout.recurrent:
        out += recurrent(layout.recurrent, None if block else count - 1)
    return np.frombuffer(bytearray(out), dtype=np.uint8)


def part_of(layout: StateLayout) -> np.ndarray:
    return state(layout, partial=layout.has_part)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_learned_from_one_state_and_foretells_every_size(name: str) -> None:
    layout = LAYOUTS[name]
    whole, part = state(layout), part_of(layout)
    learned = StateLayout.learn(whole, part, len(TOKENS))
    assert learned == layout
    assert learned.whole_bytes(len(TOKENS), part.shape[0]) == whole.shape[0]
    assert learned.block_bytes(2) == state(layout, block=(1, 3)).shape[0]
    if layout.has_part:
        assert learned.part_bytes(3 if layout.window else 0) == part.shape[0]
        learned.check_part(part, len(TOKENS))
    learned.check_block(state(layout, block=(1, 3)), 1, TOKENS[1:3])


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_export_with_a_window_becomes_a_block_without_one(name: str) -> None:
    layout = LAYOUTS[name]
    exported = state(layout)
    block = layout.as_block(exported, len(TOKENS))
    layout.check_block(block, 0, TOKENS)
    assert block.tobytes() == state(layout, block=(0, len(TOKENS))).tobytes()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda b: b[:-1], StateInvalid),
        (lambda b: np.append(b, np.uint8(0)), StateInvalid),
        (lambda b: _put(b, 0, "<I", 7), StateInvalid),  # magic
        (lambda b: _put(b, 8, "<I", 4), StateInvalid),  # streams
        (lambda b: _put(b, 12, "<I", 3), StateInvalid),  # cells
        (lambda b: _put(b, 16, "<i", 4), StateInvalid),  # a position twice
        (lambda b: _put(b, 20, "<I", 2), StateInvalid),  # sequences of a cell
        (lambda b: _put(b, 40, "<I", 1), StateIncompatible),  # transposed values
        (lambda b: _put(b, 44, "<I", 9), StateIncompatible),  # layers
        (lambda b: _put(b, 48, "<i", 8), StateIncompatible),  # type of the first keys
        (lambda b: _put(b, 52, "<Q", 34), StateIncompatible),  # their row size
    ],
)
def test_a_changed_field_is_refused(change: object, error: type[StateError]) -> None:
    layout = LAYOUTS["dense"]
    block = state(layout, block=(2, 4))
    layout.check_block(block, 2, TOKENS[2:4])
    with pytest.raises(error):
        layout.check_block(change(block.copy()), 2, TOKENS[2:4])  # type: ignore[operator]


def _put(block: np.ndarray, at: int, form: str, value: int) -> np.ndarray:
    struct.pack_into(form, block.data, at, value)
    return block


@given(name=st.sampled_from(sorted(LAYOUTS)), at=st.integers(0, 4000), bit=st.integers(0, 7), partial=st.booleans())
def test_a_flipped_bit_is_refused_or_harmless(name: str, at: int, bit: int, partial: bool) -> None:
    """Harmless are the rows themselves, which digests protect, and the ids of the sequence, which llama.cpp passes over."""
    layout = LAYOUTS[name]
    original = part_of(layout) if partial and layout.has_part else state(layout, block=(1, 5))
    changed = original.copy()
    changed[at % changed.shape[0]] ^= 1 << bit
    try:
        if partial and layout.has_part:
            layout.check_part(changed, len(TOKENS))
        else:
            layout.check_block(changed, 1, TOKENS[1:5])
    except StateError:
        return
    assert changed.shape == original.shape
    assert struct.unpack_from("<I", changed.data) == (MAGIC,)


@given(st.binary(max_size=600), st.binary(max_size=300), st.integers(1, 6))
def test_learning_from_noise_ends_in_a_refusal(whole: bytes, part: bytes, tokens: int) -> None:
    with pytest.raises(LayoutUnknown):
        StateLayout.learn(np.frombuffer(whole, np.uint8), np.frombuffer(part, np.uint8), tokens)


@given(st.sampled_from(sorted(LAYOUTS)), st.integers(1, 400))
def test_learning_from_a_cut_state_ends_in_a_refusal(name: str, missing: int) -> None:
    layout = LAYOUTS[name]
    whole, part = state(layout), part_of(layout)
    with pytest.raises(LayoutUnknown):
        StateLayout.learn(whole[:-missing], part, len(TOKENS))


def test_transposed_values_are_an_unknown_layout() -> None:
    layout = LAYOUTS["dense"]
    whole = state(layout)
    struct.pack_into("<I", whole.data, 16 + 12 * len(TOKENS), 1)
    with pytest.raises(LayoutUnknown):
        StateLayout.learn(whole, whole.copy(), len(TOKENS))
