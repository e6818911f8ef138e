"""A windowed model's conversation on its way: besides its last window one more goes along, so that its end can be cut off at the
other engine too.

Of a windowed layer llama.cpp gives away just the rows that a sequence's last token can see. An engine that keeps windows whole
has those before them as well, and the next turn may branch off there. So a sequence that ends one window earlier is shared off
for as long as the state leaves, and its last window travels as a checkpoint does. At the other engine its rows join those of the
last one: a prefix may end anywhere behind the earlier cut, for as long as nobody needs their cells.

Of a running generation only the last window goes: one more would double what leaves behind its stop. At the target the next turn
may branch off anywhere behind that.
"""

from __future__ import annotations

from engines.runtime.cells import Sequence
from engines.runtime.checkpoint_order import Checkpoint
from engines.runtime.prefix import PrefixCache
from engines.runtime.state_codec import StateCodec
from engines.runtime.state_layout import Bytes


def earlier_cut(cache: PrefixCache, sequence: Sequence) -> int:
    """How far the sequence could be cut back at the other engine; 0 where nothing is to be sent for that: its last window is all
    of it, or what was before that is needed no more and overwritten."""
    window = sequence.llama.window_tokens
    if not cache.window_places or len(sequence) <= window:
        return 0
    first = sequence.llama.first_position(sequence.index)
    cut = max(len(sequence) - window, first + window if first > 0 else 0)
    return cut if cut < len(sequence) else 0


def window_bytes(codec: StateCodec, sequence: Sequence, cut: int) -> int:
    """Of the piece that leaves for that cut."""
    return codec.layout.part_bytes(min(cut, sequence.llama.window_tokens))


def held_window(cache: PrefixCache, sequence: Sequence) -> Checkpoint | None:
    """The sequence up to that cut, whose rows nobody overwrites until it is cleared; None where there is none to be had."""
    cut = earlier_cut(cache, sequence)
    place = next((place for place in cache.window_places if not place.leaving), None) if cut else None
    if place is None:
        return None
    place.sequence.share_prefix(sequence, cut)
    place.leaving = True
    return place


def enter_window(cache: PrefixCache, codec: StateCodec, sequence: Sequence, cut: int, part: Bytes) -> None:
    """Gives the sequence, which holds its last window, the rows before it out of `part`, a checked one of that cut. Where they do
    not meet, or there is no room for them, it stays as it is."""
    llama, scratch = sequence.llama, cache.scratch[0]
    first = llama.first_position(sequence.index)
    # A gap between the two would not be seen any more.
    if not cache.window_places or not 0 < first <= cut:
        return
    try:
        if codec.enters_alone(scratch, part):
            llama.share_range(scratch.index, sequence.index, 0, first)
    finally:
        llama.clear(scratch.index)
