"""In which order the pieces of a state may stand, and how large each may be."""

from __future__ import annotations

from collections.abc import Sequence

from engines.errors import StateInvalid
from engines.runtime.state_layout import StateLayout
from engines.runtime.state_snapshot import StatePiece

MAX_BLOCK_TOKENS = 1 << 14
MAX_CHECKPOINTS = 8


def require_order(pieces: Sequence[StatePiece], count: int, layout: StateLayout, *, begin: int = 0) -> None:
    """Blocks without a gap from position `begin` on, then the last part, then checkpoints by rising cut, each of just the size
    that it has here; then a draft head's rows without a gap, and hidden rows up to the end. Raises StateInvalid."""
    order = _Order(count, layout, begin)
    for piece in pieces:
        if not order.takes(piece):
            raise StateInvalid(
                f"The state's {piece.kind} of positions {piece.start} to {piece.end - 1} cannot stand there."
            )
    if not order.is_complete:
        raise StateInvalid("The state lacks pieces.")


def require_blocks(pieces: Sequence[StatePiece], begin: int, end: int, layout: StateLayout) -> None:
    """Blocks from position `begin` on without a gap, up to `end`, each of just the size that it has here. Raises StateInvalid."""
    order = _Order(end, layout, begin)
    if not all(piece.kind == "block" and order.takes(piece) for piece in pieces) or order.at != end:
        raise StateInvalid(f"The state's blocks of positions {begin} to {end - 1} are not what they have to be.")


class _Order:
    """How far one has come."""

    def __init__(self, count: int, layout: StateLayout, begin: int) -> None:
        self._count, self._layout = count, layout
        self.at, self.parts = begin, 0
        self._cut = self._checkpoints = 0
        self._drafted: int | None = None
        self._ended = False

    def takes(self, piece: StatePiece) -> bool:
        if self._ended or piece.end > self._count:
            return False
        if piece.kind == "draft":
            return self._takes_draft(piece)
        if piece.kind == "hidden":
            self._ended = True
            return self._has_all and 0 <= piece.start < piece.end == self._count
        if self._drafted is not None:
            return False
        if piece.kind == "block":
            right = not self.parts and piece.start == self.at < piece.end and piece.tokens <= MAX_BLOCK_TOKENS
            self.at = piece.end
            return right and piece.size_bytes == self._layout.block_bytes(piece.tokens)
        return self._takes_part(piece)

    @property
    def is_complete(self) -> bool:
        """Rows of a draft head are of use only with the hidden rows behind them."""
        return self._has_all and (self._drafted is None or self._ended)

    @property
    def _has_all(self) -> bool:
        return self.at == self._count and bool(self.parts or not self._layout.has_part)

    def _takes_part(self, piece: StatePiece) -> bool:
        right = piece.start == 0 < piece.size_bytes <= self._layout.part_bytes(piece.end)
        if piece.kind == "part":
            self.parts += 1
            return right and self._layout.has_part and self.parts == 1 and self.at == piece.end == self._count
        self._checkpoints += 1
        rises, self._cut = self._cut < piece.end < self._count, piece.end
        return right and self._layout.has_part and self.parts == 1 and rises and self._checkpoints <= MAX_CHECKPOINTS

    def _takes_draft(self, piece: StatePiece) -> bool:
        follows = piece.start >= 0 if self._drafted is None else piece.start == self._drafted
        self._drafted = piece.end
        return self._has_all and follows and 0 < piece.tokens <= MAX_BLOCK_TOKENS and piece.size_bytes > 0
