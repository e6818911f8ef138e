"""Pieces of sequences' state, out of the context and into it. Belongs to the core's thread; each call is one short slice.

A block of attention rows leaves through a scratch sequence that shares just its cells, and enters through one that is emptied
at once; so the scratch sequences are empty between calls. Our own builds of llama.cpp need none: a range is read where it is,
and appended where it belongs (native/state_ranges.py), which the probe proves first. llama.cpp checks little of what it loads
and may leave half a state behind: everything is checked here first, and whatever still fails leaves the sequence and the scratch
ones empty, verified.

What needs no context is apart (`finished_…`, `check_…`), so that a transfer can do it on another thread meanwhile.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from engines.errors import NoCellsFree, StateError, StateInvalid
from engines.runtime.cells import Sequence
from engines.runtime.llama import Batch, Llama
from engines.runtime.prefix import PrefixCache
from engines.runtime.state_draft import DraftCodec, probed_drafts
from engines.runtime.state_layout import Bytes, LayoutUnknown, StateLayout, Tokens
from engines.runtime.state_ranges import HAS_RANGES, HAS_WIPE

log = logging.getLogger("hydra.engine.state")

# Enough for two blocks of unequal length, few enough to decode in a step of any model.
PROBE_TOKENS = 7
PROBE_CUT = 4


class StateCodec:
    """Exports and imports for the sequences of one cache, whose states have `layout`."""

    def __init__(self, cache: PrefixCache, llama: Llama, layout: StateLayout) -> None:
        self.layout = layout
        self._cache = cache
        self._llama = llama
        self._scratch, self._empty = cache.scratch
        # Whether ranges leave and enter without a scratch sequence.
        self.ranges = False
        # Calls that moved state. Each waits for what was queued before it, which alone tells that this is there (state_dock.py).
        self.calls = 0
        # Where the engine drafts with the model's own head, and its states are known.
        self.drafts: DraftCodec | None = None
        # Also a windowed model's base rows, which its positions do not tell of.
        self._empty_bytes = llama.state_bytes(self._scratch.index)

    def capacity_bytes(self, tokens: int) -> int:
        """The buffer that `export_block` needs: llama.cpp also writes the window's rows, which then give way."""
        window = self.layout.window.section_bytes(tokens) if self.layout.window else 0
        return self.layout.block_bytes(tokens) + window

    def part_bytes(self, sequence: Sequence) -> int:
        """Exact size of `export_part`; 0 where attention rows are all of a state."""
        return self._llama.part_bytes(sequence.index) if self.layout.has_part else 0

    # --- out ------------------------------------------------------------------------------------

    def export_block(self, sequence: Sequence, start: int, end: int, buffer: Bytes) -> Bytes:
        """The attention rows of positions [start, end), written into `buffer`; the sequence may decode before and after.

        Raises StateError when llama.cpp does not hold just these positions.
        """
        written = self.take_block(sequence, start, end, buffer)
        return self.finished_block(buffer[:written], start, sequence.tokens[start:end])

    @property
    def queues(self) -> bool:
        """Whether pieces may be `queued`: their bytes are copied, from where they lie, while the next one is prepared, and are
        there after the next call of this codec, or `settle`."""
        return self._llama.queues_states

    def settle(self) -> None:
        """Waits for what is queued."""
        self._llama.synchronize()

    def take_block(self, sequence: Sequence, start: int, end: int, buffer: Bytes, *, queued: bool = False) -> int:
        """`export_block` without its checks: the bytes that llama.cpp writes, for `finished_block` (once they are there)."""
        if self.ranges:
            return self._called(self._llama.export_range(sequence.index, start, end, buffer, queued=queued))
        scratch = self._scratch.index
        try:
            self._llama.share_range(sequence.index, scratch, start, end)
            if self.layout.recurrent:
                # Sharing took the recurrent state along; an empty sequence's takes its place.
                self._llama.share_range(self._empty.index, scratch, 0, 0)
            return self._called(self._llama.export_into(scratch, buffer, partial=False, queued=queued))
        finally:
            self._llama.clear(scratch, end - start)

    def finished_block(self, taken: Bytes, start: int, tokens: Tokens) -> Bytes:
        """What was taken of a range of `tokens`, checked. On any thread."""
        count = len(tokens)
        if taken.nbytes < self.layout.block_bytes(count):
            raise StateError(
                f"llama.cpp gave {taken.nbytes} bytes for positions {start} to {start + count - 1} of a slot."
            )
        block = self.layout.as_block(taken, count)
        self.layout.check_block(block, start, tokens)
        self.layout.forget_sequence(block, partial=False)
        return block

    def export_part(self, sequence: Sequence, buffer: Bytes) -> Bytes:
        """What is no attention row (recurrent state, last window) as it is now, written into `buffer` of `part_bytes`."""
        written = self.take_part(sequence, buffer)
        return self.finished_part(buffer[:written], len(sequence))

    def take_part(self, sequence: Sequence, buffer: Bytes, *, queued: bool = False) -> int:
        """`export_part` without its checks: the bytes that llama.cpp writes, for `finished_part` (once they are there)."""
        return self._called(self._llama.export_into(sequence.index, buffer, partial=True, queued=queued))

    def _called(self, written: int) -> int:
        self.calls += written > 0
        return written

    def finished_part(self, taken: Bytes, tokens: int) -> Bytes:
        """What was taken of a sequence of `tokens` tokens, checked. On any thread."""
        self.layout.check_part(taken, tokens)
        self.layout.forget_sequence(taken, partial=True)
        return taken

    # --- in -------------------------------------------------------------------------------------

    def lend(self, source: Sequence, sequence: Sequence, count: int) -> None:
        """Begins an import into an empty sequence with the attention rows of the first `count` tokens of `source`, which costs
        nothing; where a window forgets cells that cannot be done."""
        self._llama.share_range(source.index, sequence.index, 0, count)
        if self.layout.recurrent:
            # Sharing took the recurrent state along, which is of another place; an empty sequence's takes its place.
            self._llama.share_range(self._empty.index, sequence.index, 0, 0)
        sequence.receive_shared(source, count)

    def import_block(self, sequence: Sequence, start: int, tokens: Tokens, block: Bytes) -> None:
        """Appends a block to a sequence that holds the `start` positions before it, and whose tokens are not told yet.

        Raises StateInvalid, StateIncompatible or NoCellsFree; after the first of them that llama.cpp itself causes the
        sequence is empty, else it is as before.
        """
        self.layout.check_block(block, start, tokens)
        self.enter_block(sequence, start, len(tokens), block)

    def enter_block(self, sequence: Sequence, start: int, count: int, block: Bytes, *, queued: bool = False) -> None:
        """`import_block` for a block that passed `layout.check_block` and has not changed since, nor does until it is there."""
        if len(sequence.cells) != start:
            raise StateError(f"A block of position {start} cannot follow {len(sequence.cells)} positions.")
        if not self._cache.make_room(count, at_once=True):
            raise NoCellsFree(f"The cache has {self._cache.ledger.free} free cells; {count} are needed.")
        # An empty sequence has nothing that reading would take away, so its first block need not pass through another one.
        through_scratch = start > 0 and not self.ranges
        if self.ranges:
            entered = self._llama.append_from(sequence.index, block, queued=queued)
        else:
            into = self._scratch if through_scratch else sequence
            entered = self._llama.import_from(into.index, block, partial=False, queued=queued)
        if not entered:
            self.abandon(sequence)
            raise StateInvalid("llama.cpp refused a block of the state.")
        self._called(block.nbytes)
        if through_scratch:
            self._llama.share_range(self._scratch.index, sequence.index, start, start + count)
            self._llama.clear(self._scratch.index, count)
        sequence.receive(count)

    def import_part(self, sequence: Sequence, tokens: int, part: Bytes) -> None:
        """Gives the sequence, which holds the attention rows of `tokens` tokens, the rest of its state. Raises as above."""
        self.layout.check_part(part, tokens)
        self.enter_part(sequence, part)

    def enter_part(self, sequence: Sequence, part: Bytes, *, queued: bool = False) -> None:
        """`import_part` for a part that passed `layout.check_part` and has not changed since, nor does until it is there."""
        if not self._llama.import_from(sequence.index, part, partial=True, queued=queued):
            self.abandon(sequence)
            raise StateInvalid("llama.cpp refused the last part of the state.")
        self._called(part.nbytes)

    def enters_alone(self, sequence: Sequence, part: Bytes) -> bool:
        """Gives an empty sequence a checked part of some state, and none of its attention rows; False where llama.cpp has no room
        for it. It is the caller's to clear."""
        entered = self._llama.import_from(sequence.index, part, partial=True)
        self._called(part.nbytes if entered else 0)
        return entered

    def complete(self, sequence: Sequence, tokens: list[int]) -> None:
        """Ends an import: from here on the sequence's prefix is found and reused. Raises StateError if the state is not whole."""
        last = self._llama.last_position(sequence.index)
        if last != len(tokens) - 1 or len(sequence.cells) != len(tokens):
            self.abandon(sequence)
            raise StateError(f"The imported state ends at position {last}, not at {len(tokens) - 1}.")
        sequence.received(tokens)

    def take_back_computed(self, sequence: Sequence, size_bytes: int) -> None:
        """Drops what was decoded behind the rows that have come into a sequence, and the recurrent state that it made. Raises
        StateError, with the sequence empty, when its state is not of `size_bytes` again."""
        if self.layout.recurrent:
            # Positions of a recurrent state cannot be dropped, but an empty sequence's state can take its place.
            self._llama.share_range(self._empty.index, sequence.index, 0, 0)
        kept = self._llama.keep_prefix(sequence.index, len(sequence.cells))
        if not kept or self._llama.state_bytes(sequence.index) != size_bytes:
            self.abandon(sequence)
            raise StateError("What was computed for a try could not be dropped.")

    @property
    def wipes(self) -> bool:
        """Whether a state that turns out to be damaged once it is in leaves nothing behind (`abandon`)."""
        return HAS_WIPE

    def abandon(self, sequence: Sequence, *, doubtful: bool = False) -> None:
        """Empties the sequence and the scratch ones, and looks whether they are: a failed import may leave half a state.
        `doubtful`: some of it was not proved to be what it should be, and might be no numbers."""
        if doubtful:
            self._llama.wipe(sequence.index)
        sequence.clear()
        for used in (sequence, *self._cache.scratch):
            self._llama.clear(used.index)
            if not self.is_empty(used):
                log.critical("sequence %d still holds state after it was emptied", used.index)
                raise StateError("A sequence could not be emptied.")

    def is_empty(self, sequence: Sequence) -> bool:
        llama, index = self._llama, sequence.index
        positions = (llama.first_position(index), llama.last_position(index))
        return positions == (-1, -1) and llama.state_bytes(index) == self._empty_bytes


def probe(cache: PrefixCache, llama: Llama) -> tuple[StateCodec | None, str]:
    """A proved codec, or why there is none, which is logged: such an engine shares no state and serves all the same."""
    try:
        return probed(cache, llama), ""
    except LayoutUnknown as error:
        log.error("this engine will not share state: %s", error)
        return None, str(error)


def probed(cache: PrefixCache, llama: Llama) -> StateCodec:
    """A codec for this context, proved on a few tokens: out in two blocks and a part, in again, the same bytes.

    Needs an idle context whose scratch sequences and first slot are empty, and leaves it so. Raises LayoutUnknown when
    llama.cpp lays states out in another way than this engine's parser thinks, in which case nothing may be shared.
    """
    try:
        return _probed(cache, llama)
    except StateError as error:
        raise LayoutUnknown(error.message) from error
    finally:
        cache.slots[0].sequence.clear()
        for sequence in cache.scratch:
            llama.clear(sequence.index)


def _probed(cache: PrefixCache, llama: Llama) -> StateCodec:
    probe = cache.slots[0].sequence
    rng = np.random.default_rng(7)
    tokens = [int(token) for token in rng.integers(0, llama.vocabulary.size, PROBE_TOKENS)]
    batch = Batch(PROBE_TOKENS)
    batch.add(probe.index, 0, tokens, outputs=1)
    if llama.decode(batch) != 0:
        raise LayoutUnknown("the probe's tokens could not be computed")
    before = _whole(llama, probe)
    layout = StateLayout.learn(before, _part(llama, probe), PROBE_TOKENS)
    if layout.whole_bytes(PROBE_TOKENS, llama.part_bytes(probe.index)) != llama.state_bytes(probe.index):
        raise LayoutUnknown("a state has another size than its layout says")
    codec = StateCodec(cache, llama, layout)
    probe.append(tokens)
    _in(codec, probe, tokens, _out(codec, probe, tokens))
    if not np.array_equal(_whole(llama, probe), before):
        raise LayoutUnknown("a state that went out and in again has other bytes")
    if HAS_RANGES:
        _prove_ranges(codec, probe, tokens, before)
    if llama.queues_states:
        _in(codec, probe, tokens, _out(codec, probe, tokens, queued=True), queued=True)
        if not np.array_equal(_whole(llama, probe), before):
            log.error("queued copies of states are not what they should be: this engine copies them one by one")
            llama.queues_states = False
    codec.abandon(probe)
    codec.drafts = probed_drafts(probe.draft, codec._scratch.index)
    return codec


@dataclass(frozen=True)
class _Pieces:
    """What a probe's state left as: two blocks, by where they begin, and a part (of no bytes where there is none)."""

    blocks: dict[int, Bytes]
    part: Bytes

    def same(self, other: _Pieces) -> bool:
        blocks = all(np.array_equal(block, other.blocks[start]) for start, block in self.blocks.items())
        return blocks and np.array_equal(self.part, other.part)


def _prove_ranges(codec: StateCodec, probe: Sequence, tokens: list[int], before: Bytes) -> None:
    """Turns `codec.ranges` on if they leave as through the scratch sequence, and what they bring in is the state."""
    by_scratch = _out(codec, probe, tokens)
    codec.ranges = True
    try:
        by_range = _out(codec, probe, tokens)
        proved = by_range.same(by_scratch)
        _in(codec, probe, tokens, by_range)
        proved = proved and np.array_equal(_whole(codec._llama, probe), before)
    except StateError as error:
        log.error("ranges of states: %s", error.message)
        proved = False
    if not proved:
        log.error("ranges of states are not what they should be: this engine moves them through a scratch sequence")
        codec.ranges = False
        codec.abandon(probe)
        _in(codec, probe, tokens, by_scratch)


def _out(codec: StateCodec, probe: Sequence, tokens: list[int], *, queued: bool = False) -> _Pieces:
    """The probe's state in two blocks and a part."""
    taken = {}
    for start, end in ((0, PROBE_CUT), (PROBE_CUT, PROBE_TOKENS)):
        buffer = np.zeros(codec.capacity_bytes(end - start), dtype=np.uint8)
        taken[start, end] = buffer[: codec.take_block(probe, start, end, buffer, queued=queued)]
    part = np.zeros(codec.part_bytes(probe), dtype=np.uint8)
    if codec.layout.has_part:
        part = part[: codec.take_part(probe, part, queued=queued)]
    codec.settle()
    blocks = {start: codec.finished_block(block, start, tokens[start:end]) for (start, end), block in taken.items()}
    return _Pieces(blocks, codec.finished_part(part, PROBE_TOKENS) if codec.layout.has_part else part)


def _in(codec: StateCodec, probe: Sequence, tokens: list[int], pieces: _Pieces, *, queued: bool = False) -> None:
    """The pieces in place of what the probe holds."""
    probe.clear()
    for start, block in pieces.blocks.items():
        inside = tokens[start : PROBE_CUT if start == 0 else PROBE_TOKENS]
        codec.layout.check_block(block, start, inside)
        codec.enter_block(probe, start, len(inside), block, queued=queued)
    if codec.layout.has_part:
        codec.layout.check_part(pieces.part, PROBE_TOKENS)
        codec.enter_part(probe, pieces.part, queued=queued)
    codec.settle()
    codec.complete(probe, tokens)


def _whole(llama: Llama, sequence: Sequence) -> Bytes:
    return llama.export_state(sequence.index)


def _part(llama: Llama, sequence: Sequence) -> Bytes:
    part = np.empty(llama.part_bytes(sequence.index), dtype=np.uint8)
    return part[: llama.export_into(sequence.index, part, partial=True)]
