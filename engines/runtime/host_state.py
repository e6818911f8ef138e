"""A conversation's state in host memory: blocks of attention rows as they left the context, and what is no attention row.

Blocks are immutable and of one size but for the last, so that a state leaves and comes back a slice at a time. Where a state
cannot be cut into blocks (an unknown layout, images) it is the one array that llama.cpp writes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engines.errors import StateError
from engines.runtime.state_layout import HEADER_BYTES, Bytes, StateLayout
from engines.runtime.state_whole import WholeState


@dataclass(frozen=True, eq=False)
class HostState:
    """Either `whole`, or `blocks` of `block_tokens` tokens each (the last one of fewer) and the `part` behind them, if there is
    one."""

    blocks: tuple[Bytes, ...] = ()
    block_tokens: int = 0
    part: Bytes | None = None
    whole: Bytes | None = None

    @property
    def is_part_alone(self) -> bool:
        """Whether its attention rows are not here."""
        return self.whole is None and not self.blocks

    @property
    def nbytes(self) -> int:
        arrays = (*self.blocks, self.part, self.whole)
        return sum(array.nbytes for array in arrays if array is not None)

    def block(self, layout: StateLayout, tokens: list[int], start: int, count: int) -> Bytes:
        """Rows [start, start + count) of a state of `tokens` as a block of their own; they must lie in one of the blocks."""
        index, offset = divmod(start, self.block_tokens)
        held = self.blocks[index]
        first = index * self.block_tokens
        inside = tokens[first : first + self.block_tokens]
        if offset + count > len(inside):
            raise StateError(f"Positions {start} to {start + count - 1} do not lie in one block of the state.")
        layout.check_block(held, first, inside)
        if count == len(inside):
            return held
        cells = layout.attention.cells(held[HEADER_BYTES:], len(inside))
        order = np.argsort(cells["pos"], kind="stable")
        return WholeState(layout, inside, held, order).block(offset, count)

    def first(self, layout: StateLayout, tokens: list[int], count: int, part: Bytes) -> HostState:
        """The rows of the first `count` of a state of `tokens`, in its own blocks where they end there, and another `part`."""
        full, rest = divmod(count, self.block_tokens)
        blocks = self.blocks[:full]
        if rest:
            blocks = (*blocks, self.block(layout, tokens, full * self.block_tokens, rest))
        return HostState(blocks, self.block_tokens, part)
