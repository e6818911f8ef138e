"""Steps of a conversation that comes in, before it is there: of the very shape that its first one here will have.

llama.cpp builds, plans and places a graph anew for a step that differs from the last one in its rows, results, sequences, the
window of cells (rounded to 256) or the place of the recurrent state; and a card is given a graph's kernels one by one until it
was called twice and recorded. That takes as long as a few steps, and a client would wait for it. So the slot's own sequence
decodes some tokens behind the rows that have come in, and forgets them: the graph of the next step like them is there then.
While that goes on the source writes some tokens more. Where they could fill the window nothing is tried until they have.

Nothing of it stays. The rows' cells are free again, and the next rows to come in take them; a recurrent state that it made is let
go, and the real one is put into the same place. Where others run nothing is done: their steps, of another shape, would come
between and take the graph away; nor where a window's rows come in last, without which the shape is another one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as TokenSequence

from engines.runtime.llama import Batch, Llama
from engines.runtime.prefix import PrefixCache
from engines.runtime.slots import Slot
from engines.runtime.state_codec import StateCodec

log = logging.getLogger("hydra.engine.state")

# In these llama.cpp counts a window's cells.
WINDOW_STEP_CELLS = 256
# That the source takes between the question and its stop, at most: a try takes as long as a few of them.
STEPS_BETWEEN = 16


def calls_of(llama: Llama, *, on_card: bool) -> int:
    """How many steps it takes until one like them finds all made: a recurrent state's first one begins with an empty state, which
    is a graph of its own, and a card records a graph that comes a second time."""
    return 1 + llama.has_recurrent_state + on_card


def tokens_until_tried(cache: PrefixCache, rows: int) -> int:
    """How many tokens more must come in before a try: with steps of `rows` rows the first real one would else see another window
    of cells. 0: none. Cells are counted as if those in use stood in a row, as in an engine that nobody else uses; a guess that is
    wrong costs what there is without a try."""
    left = WINDOW_STEP_CELLS - (cache.ledger.count - cache.ledger.free) % WINDOW_STEP_CELLS
    return left if left < rows * STEPS_BETWEEN else 0


def can_rehearse(cache: PrefixCache, llama: Llama, slots: TokenSequence[Slot]) -> bool:
    """Whether a try is of use now."""
    return not cache.busy and not llama.forgets_window and all(len(slot.sequence.cells) for slot in slots)


def rehearsed(
    cache: PrefixCache, codec: StateCodec, llama: Llama, slots: TokenSequence[Slot], token: int, rows: int, calls: int
) -> bool:
    """Runs `calls` steps of `rows` rows of each of `slots`, in the order in which a planner would have them; their states have no
    last part yet. False where that is of no use now, or refused. On the core's thread, in one slice.

    Raises StateError when a sequence could not be brought back to what had come in; it is empty then.
    """
    sequences = [slot.sequence for slot in sorted(slots, key=lambda slot: slot.index)]
    places = [len(sequence.cells) for sequence in sequences]
    if not sequences or not can_rehearse(cache, llama, slots):
        return False
    # More rows than a batch holds would end the process.
    if len(sequences) * rows > llama.batch_tokens or len(sequences) * rows * calls > cache.ledger.free:
        return False
    before = [llama.state_bytes(sequence.index) for sequence in sequences]
    batch, status = Batch(len(sequences) * rows), 0
    try:
        for call in range(calls):
            batch.clear()
            for sequence, place in zip(sequences, places, strict=True):
                batch.add(sequence.index, place + call * rows, [token] * rows, outputs=rows)
            status = llama.decode(batch)
            if status != 0:
                log.warning("a step before a conversation was refused (llama_decode: %d)", status)
                break
        llama.synchronize()
    finally:
        for sequence, size_bytes in zip(sequences, before, strict=True):
            codec.take_back_computed(sequence, size_bytes)
    return status == 0
