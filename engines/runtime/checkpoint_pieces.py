"""A conversation's earlier cuts, whose states go along when it moves: in checkpoints of the context, or in host memory."""

from __future__ import annotations

from dataclasses import dataclass

from engines.runtime.cells import Sequence
from engines.runtime.checkpoint_order import Checkpoint
from engines.runtime.prefix import PrefixCache
from engines.runtime.state_codec import StateCodec
from engines.runtime.state_layout import Bytes
from engines.runtime.state_order import MAX_CHECKPOINTS


@dataclass(frozen=True, eq=False)
class HeldCut:
    """The state behind `length` tokens: a `checkpoint`'s, or the `part` itself."""

    length: int
    size_bytes: int
    checkpoint: Checkpoint | None = None
    part: Bytes | None = None

    def take(self, codec: StateCodec, buffer: Bytes, *, queued: bool = False) -> int:
        """Writes it into `buffer`, for `codec.finished_part`; returns its bytes. On the core's thread."""
        if self.checkpoint is not None:
            return codec.take_part(self.checkpoint.sequence, buffer, queued=queued)
        assert self.part is not None
        buffer[: self.size_bytes] = self.part
        return self.size_bytes


def held_cuts(cache: PrefixCache, codec: StateCodec, sequence: Sequence) -> list[HeldCut]:
    """Those of a sequence before its end that would be reused here, the shortest first; of too many the last. None where a state
    can be cut anyway."""
    if codec.layout.recurrent is None or sequence.spans:
        return []
    tokens, origin = sequence.tokens, sequence.origin
    outside = [(len(entry.tokens), entry.state.part) for entry in cache.host.parts_in(tokens, origin.tenant)]
    found = {length: HeldCut(length, part.nbytes, part=part) for length, part in outside if part is not None}
    for one in cache.checkpoints_of(tokens, origin):
        found[len(one.sequence)] = HeldCut(len(one.sequence), codec.part_bytes(one.sequence), one)
    return [found[length] for length in sorted(found)][-MAX_CHECKPOINTS:]
