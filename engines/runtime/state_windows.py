"""A windowed model's conversation on its way: besides its last window one more goes along, so that its end can be cut off at the
other engine too.

Of a windowed layer llama.cpp gives away just the rows that a sequence's last token can see. An engine that keeps windows whole
has those before them as well, and the next turn may branch off there. So a sequence that ends one window earlier is shared off
for as long as the state leaves, and its last window travels as a checkpoint does. At the other engine its rows join those of the
last one: a prefix may end anywhere behind the earlier cut. Of a running generation the window at its prompt's end leaves before
the stop; it is of use where the answer has not grown by more than a window until then.
"""

from __future__ import annotations

from engines.runtime.cells import Sequence
from engines.runtime.prefix import Checkpoint, PrefixCache
from engines.runtime.state_codec import StateCodec
from engines.runtime.state_layout import Bytes

# A prompt's last tokens open the answer, and one is always left to decode.
BEFORE_END_TOKENS = 16


def earlier_cut(cache: PrefixCache, sequence: Sequence) -> int:
    """How far the sequence could be cut back at the other engine; 0 where nothing is to be sent for that: its last window is all
    of it, or what was before that is needed no more and overwritten."""
    window = sequence.llama.window_tokens
    if not cache.window_places or len(sequence) <= window:
        return 0
    first = sequence.llama.first_position(sequence.index)
    cut = max(len(sequence) - window, first + window if first > 0 else 0)
    return cut if cut < len(sequence) else 0


def prompt_cut(cache: PrefixCache, sequence: Sequence, prompt_tokens: int) -> int:
    """The same of a running generation: where its prompt ends, nearly. It stays where it is while the answer grows."""
    window, cut = sequence.llama.window_tokens, prompt_tokens - BEFORE_END_TOKENS
    if not cache.window_places or not 0 < cut < len(sequence) or not window < len(sequence) <= cut + window:
        return 0
    return cut if sequence.llama.first_position(sequence.index) <= max(0, cut - window) else 0


def window_bytes(codec: StateCodec, sequence: Sequence, cut: int) -> int:
    """Of the piece that leaves for that cut."""
    return codec.layout.part_bytes(min(cut, sequence.llama.window_tokens))


def place_for_window(cache: PrefixCache) -> Checkpoint | None:
    return next((place for place in cache.window_places if not place.leaving), None)


def held_window(cache: PrefixCache, sequence: Sequence, cut: int) -> Checkpoint | None:
    """The sequence up to that cut, whose rows nobody overwrites until it is cleared; None where there is none to be had."""
    place = place_for_window(cache) if cut else None
    if place is None:
        return None
    place.sequence.share_prefix(sequence, cut)
    place.leaving = True
    return place


def meets_window(sequence: Sequence, cut: int) -> bool:
    """Whether a window that ends at the cut reaches to the sequence's own: a gap between them would not be seen any more."""
    return 0 < sequence.llama.first_position(sequence.index) <= cut


def join_window(sequence: Sequence, earlier: Sequence) -> None:
    """Gives the sequence, which holds its last window, the rows before it that the other one has, which it meets."""
    llama = sequence.llama
    llama.share_range(earlier.index, sequence.index, 0, llama.first_position(sequence.index))


def enter_window(cache: PrefixCache, codec: StateCodec, sequence: Sequence, cut: int, part: Bytes) -> None:
    """The same with the rows of `part`, a checked one of that cut. Where they do not meet, or there is no room for them, it stays
    as it is."""
    scratch = cache.scratch[0]
    if cache.window_places and meets_window(sequence, cut):
        try:
            if codec.enters_alone(scratch, part):
                join_window(sequence, scratch)
        finally:
            sequence.llama.clear(scratch.index)
