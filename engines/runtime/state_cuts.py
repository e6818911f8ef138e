"""Checkpoints of a running generation that come in before it stops, each as its recurrent state alone.

They do not change while the generation goes on, so that they need not be sent while it stands still. The rows that belong to one
come with the blocks: until all is there the state waits in its place, which nobody finds or takes.
"""

from __future__ import annotations

import time

from engines.errors import StateInvalid
from engines.runtime.checkpoint_order import Checkpoint
from engines.runtime.prefix import PrefixCache
from engines.runtime.slots import Slot
from engines.runtime.state_codec import StateCodec
from engines.runtime.state_layout import Bytes
from engines.runtime.state_order import MAX_CHECKPOINTS
from engines.runtime.state_snapshot import StatePiece


class ComingCuts:
    """Those of one arrival. `announce` and `check` on any thread, all else on the core's."""

    def __init__(self) -> None:
        self.pieces: list[StatePiece] = []
        self._places: list[tuple[int, Checkpoint]] = []

    def announce(self, piece: StatePiece, codec: StateCodec, most_tokens: int) -> None:
        """Raises StateInvalid for one that cannot come now."""
        known = any(piece.end == other.end for other in self.pieces)
        fits = piece.start == 0 < piece.end <= most_tokens and codec.layout.recurrent is not None
        if known or not fits or len(self.pieces) >= MAX_CHECKPOINTS:
            raise StateInvalid("A checkpoint came that cannot be one of the state's.")
        self.pieces.append(piece)

    @staticmethod
    def check(piece: StatePiece, codec: StateCodec, data: Bytes) -> None:
        """Raises StateInvalid or StateIncompatible for what must not reach llama.cpp."""
        codec.layout.check_part(data, piece.end)

    def enter(self, cache: PrefixCache, codec: StateCodec, piece: StatePiece, data: Bytes) -> None:
        place = cache.checkpoint_place()
        if place is None:
            return  # fewer places than the sender had
        codec.enter_part(place.sequence, data)
        place.leaving = True
        self._places.append((piece.end, place))

    def join(self, cache: PrefixCache, slot: Slot) -> None:
        """The slot has its whole state: what came of its earlier cuts can be gone on from now, too."""
        scratch, origin = cache.scratch[0], slot.sequence.origin
        for cut, place in self._places:
            place.leaving = False
            sequence, llama = place.sequence, place.sequence.llama
            tokens = slot.sequence.tokens[:cut]
            mine = (
                c.sequence for c in cache.checkpoints if c is not place and c.sequence.origin.tenant == origin.tenant
            )
            if any(other.tokens == tokens for other in mine):
                sequence.clear()
                continue
            # Sharing the rows takes the slot's own state along, so that the earlier one waits elsewhere meanwhile.
            llama.share_range(sequence.index, scratch.index, 0, 0)
            sequence.share_prefix(slot.sequence, cut)
            llama.share_range(scratch.index, sequence.index, 0, 0)
            llama.clear(scratch.index)
            if llama.last_position(sequence.index) != cut - 1:
                sequence.clear()
            place.used_at = time.monotonic()
        self._places.clear()

    def drop(self) -> None:
        """Leaves nothing of what came in."""
        for _, place in self._places:
            place.leaving = False
            place.sequence.clear()
        self._places.clear()
