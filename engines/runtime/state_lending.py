"""What a conversation that comes in need not bring: rows that another sequence of its tenant holds already."""

from __future__ import annotations

from collections.abc import Sequence

from engines.runtime.origin import Origin
from engines.runtime.prefix import PrefixCache
from engines.runtime.prefix_marks import longest_marked
from engines.runtime.state_codec import StateCodec
from engines.runtime.state_transfer import Arrival
from engines.wire_handoff import PrefixMark


def lent_to(
    cache: PrefixCache,
    codec: StateCodec,
    arrival: Arrival,
    origin: Origin,
    marks: Sequence[PrefixMark],
    siblings: Sequence[Arrival],
) -> list[int]:
    """The tokens whose rows the slot holds now because another of the tenant's sequences does."""
    if not marks or not cache.can_share:
        return []
    slot, best, source = arrival.slot, 0, None
    lent: list[int] = []
    for one in siblings:
        there = one.tokens[: len(one.slot.sequence.cells)]
        best, source = longest_marked(there, marks), one.slot.sequence
        lent = there[:best]
    for holder in cache.lenders:
        sequence = holder.sequence
        if sequence is slot.sequence or sequence.origin.tenant != origin.tenant or sequence.spans:
            continue
        length = longest_marked(sequence.tokens, marks)
        if length > best:
            best, source, lent = length, sequence, sequence.tokens[:length]
    if source is None or not best:
        return []
    codec.lend(source, slot.sequence, best)
    slot.awaited_cells -= best
    return lent
