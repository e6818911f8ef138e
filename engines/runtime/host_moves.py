"""Conversations between the context and host memory, a slice at a time between the steps of those who decode.

Nothing is held while one leaves: its sequence stays where it is, and may be lent, gone on with or emptied. What had left by then
is dropped, since it would stand for something else. Whoever needs its place asks `is_out`, which sends it on its way, and waits;
only who cannot wait (the next token of a stream that decodes) has the rest of it done at once. On the core's thread.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import closing
from typing import Any

from engines.errors import EngineStopping, NoCellsFree, StateError
from engines.runtime.cells import Sequence
from engines.runtime.errands import Work
from engines.runtime.generation import Generation
from engines.runtime.host_cache import HostEntry
from engines.runtime.host_leaving import Leaving, LeavingCut
from engines.runtime.landing import Landing
from engines.runtime.prefix import PrefixCache
from engines.runtime.prefix_search import Source
from engines.runtime.slots import Slot
from engines.runtime.state_codec import StateCodec

log = logging.getLogger("hydra.engine.host")

Slices = Generator[None, None, None]


class HostMoves:
    """`errand` runs a piece of work between steps (errands.py). Without a `codec` states are one slice."""

    def __init__(
        self,
        cache: PrefixCache,
        codec: StateCodec | None,
        block_tokens: int,
        errand: Callable[[Work], Future[Any]],
        landing: Landing,
    ) -> None:
        self._cache = cache
        self._codec = codec
        self._block_tokens = block_tokens
        self._errand = errand
        self._landing = landing
        self._line: deque[Leaving] = deque()
        self._is_running = False
        # Sequences that have been put away as they are: by index, their life and length.
        self._out: dict[int, tuple[int, int]] = {}
        # Who was brought back once: a second try would be no better.
        self._returned: set[Generation] = set()
        self._returning: set[int] = set()
        if codec is not None and codec.layout.recurrent is not None:
            # Where a checkpoint's state leaves without the rows that others hold too.
            cache.host.layout = codec.layout

    def _begin(self, work: Work) -> None:
        self._errand(work).add_done_callback(_looked_at)

    # --- out ------------------------------------------------------------------------------------

    def is_out(self, sequence: Sequence) -> bool:
        """Whether emptying it loses nothing that host memory should have; if not, it is on its way from now on."""
        if self._is_in_line(sequence):
            return False
        if self._is_done(sequence) or self._is_one_slice(sequence):
            return True
        self._send(sequence)
        return False

    def starts(self, sequence: Sequence, then: Callable[[], object]) -> bool:
        """Sends it on its way, and calls `then` in the slice in which it is out; False where host memory does not want it or has
        no room for it."""
        if self._is_in_line(sequence):
            return True
        if self._was_out(sequence) or not self._is_wanted(sequence):
            return False
        self._send(sequence).then = then
        return True

    def put_out(self, sequence: Sequence) -> None:
        """At once, or what is left of it to do."""
        if self._is_done(sequence):
            return
        leaving = next((one for one in self._line if one.is_of(sequence)), None)
        deque(leaving.slices if leaving else self._leaving(sequence).slices, maxlen=0)

    def steps_aside(self, slot: Slot) -> bool:
        """Lets the slot go at once: what it holds leaves out of a sequence that shares its cells, and whose place is free. False
        where there is none, so that the slot must wait."""
        cache, sequence = self._cache, slot.sequence
        empty = [place for place in cache.spares if not place.leaving and not len(place.sequence)]
        # Checkpoints are made in the same places: one stays free for them.
        if len(empty) < (2 if cache.checkpoints else 1):
            return False
        leaving = next(one for one in self._line if one.is_of(sequence))
        place = empty[0]
        place.sequence.share_prefix(sequence, len(sequence))
        place.leaving, place.used_at = True, slot.used_at
        leaving.follow(place)
        cache.aside.append(place)
        return True

    @property
    def under_way(self) -> bool:
        return bool(self._line)

    def _is_done(self, sequence: Sequence) -> bool:
        if not len(sequence) or self._was_out(sequence):
            return True
        if self._is_cut(sequence):
            return (
                not self._cache.host.wants_cut(sequence) or self._size_bytes(sequence) > self._cache.host.budget_bytes
            )
        return sequence.cells_alone() < self._cache.least_worth_tokens or not self._is_wanted(sequence)

    def _is_cut(self, sequence: Sequence) -> bool:
        """Whether it is a checkpoint whose attention rows stay without it: in the context, or in host memory."""
        cache = self._cache
        if cache.host.layout is None or not cache.is_checkpoint(sequence):
            return False
        return sequence.cells_alone() < cache.least_worth_tokens or cache.host.rows_for(sequence)

    def _was_out(self, sequence: Sequence) -> bool:
        """What host memory has given up since then it need not have a second time."""
        return self._out.get(sequence.index) == (sequence.life, len(sequence))

    def _is_wanted(self, sequence: Sequence) -> bool:
        host = self._cache.host
        return host.wants(sequence) and self._size_bytes(sequence) <= host.budget_bytes

    def _is_in_line(self, sequence: Sequence) -> bool:
        return any(one.is_of(sequence) for one in self._line)

    def _is_one_slice(self, sequence: Sequence) -> bool:
        if self._codec is None or (sequence.spans and not self._is_cut(sequence)):
            return True
        return self._size_bytes(sequence) <= self._codec.layout.block_bytes(self._block_tokens)

    def _size_bytes(self, sequence: Sequence) -> int:
        return self._leaving(sequence).size_bytes

    def _leaving(self, sequence: Sequence) -> Leaving:
        if self._is_cut(sequence):
            assert self._codec is not None
            return LeavingCut(self._cache, self._codec, self._block_tokens, sequence, self._out)
        codec = None if sequence.spans else self._codec
        return Leaving(self._cache, codec, self._block_tokens, sequence, self._out)

    def _send(self, sequence: Sequence) -> Leaving:
        leaving = self._leaving(sequence)
        self._line.append(leaving)
        if not self._is_running:
            self._is_running = True
            self._begin(self._work)
        return leaving

    def _work(self, _cache: PrefixCache) -> Slices:
        try:
            while self._line:
                yield from self._line[0].slices
                self._end(self._line.popleft())
                yield
        finally:
            for leaving in self._line:
                leaving.slices.close()
                self._end(leaving)
            self._line.clear()
            self._is_running = False

    def _end(self, leaving: Leaving) -> None:
        if leaving.then is not None:
            leaving.then()
        place = leaving.place
        if place is not None:
            place.sequence.clear()
            place.leaving = False
            self._cache.aside.remove(place)

    # --- back -----------------------------------------------------------------------------------

    def load(self, sequence: Sequence, entry: HostEntry, length: int) -> bool:
        """Gives an empty sequence the first `length` tokens of an entry, or more, at once; False, and empty, where that cannot be
        done."""
        entering = self._enter(sequence, entry, length, at_once=True)
        try:
            while True:
                next(entering)
        except StopIteration as end:
            return bool(end.value)

    def returns(self, generation: Generation, slot: Slot, entry: HostEntry, length: int) -> bool:
        """True when the idle slot now waits for `length` tokens of the entry, and the generation for the slot; False where that
        is one slice, or was tried before."""
        self._returned = {one for one in self._returned if one.started_at is None}
        if generation in self._returned or self._enters_in_one_slice(entry, length):
            return False
        self._returned.add(generation)
        self._cache.put_away(slot)
        self._landing.begins(generation)

        def work(_cache: PrefixCache) -> Slices:
            began_at = time.monotonic()
            try:
                yield from self._into(slot, entry, length)
            finally:
                generation.restore_s += time.monotonic() - began_at
                self._landing.landed(generation)

        self._taken(slot, self._entering_tokens(entry, length))
        self._begin(work)
        return True

    def joins(self, generation: Generation, slot: Slot, source: Source) -> bool:
        """As `returns`, of a cut whose rows a sequence holds, which may be the slot's own. False where nobody waits for the slice
        that it is."""
        cut = source.cut
        self._returned = {one for one in self._returned if one.started_at is None}
        if cut is None or generation in self._returned or not self._cache.busy:
            return False
        self._returned.add(generation)
        self._cache.vacate(slot, source)
        self._landing.begins(generation)

        def work(_cache: PrefixCache) -> Slices:
            yield from ()
            began_at = time.monotonic()
            try:
                self.join(slot.sequence, source)
                slot.used_at = began_at
            finally:
                self._give_back(slot)
                generation.restore_s += time.monotonic() - began_at
                self._landing.landed(generation)

        slot.transfer = "restore"
        self._returning.add(slot.index)
        self._begin(work)
        return True

    def join(self, sequence: Sequence, source: Source) -> bool:
        """Gives a sequence what the source's has up to its cut, with the state that stood there. False where the source has
        changed since, and the sequence not, or where its state is of no use, and the sequence empty."""
        cut, rows, host = source.cut, source.sequence, self._cache.host
        assert cut is not None
        assert rows is not None
        assert cut.state.part is not None
        assert self._codec is not None
        if not host.holds(cut) or rows.origin.tenant != cut.origin.tenant or rows.tokens[: source.length] != cut.tokens:
            return False
        try:
            if rows is not sequence:
                sequence.share_prefix(rows, source.length)
            # Its own state is of a later place; behind it the rows go, which the other order would not let.
            self._codec.import_part(sequence, cut.positions, cut.state.part)
            sequence.take_back(source.length)
            if sequence.llama.last_position(sequence.index) != cut.positions - 1 or len(sequence) != source.length:
                self._codec.abandon(sequence)
                raise StateError(f"It does not end at position {cut.positions - 1}.")
        except StateError as error:
            log.warning("a checkpoint's state in host memory is of no use: %s", error.message)
            host.forget(cut)
            sequence.clear()
            return False
        host.used(cut)
        return True

    def bring(self, slot: Slot, entry: HostEntry) -> Slices:
        """Fills an idle slot, whose content goes first. The slot is taken meanwhile."""
        self._taken(slot, len(entry.tokens))
        try:
            if len(slot.sequence):
                yield from self._cache.emptied(slot)
        except BaseException:
            self._give_back(slot)
            raise
        yield from self._into(slot, entry, len(entry.tokens))

    def settled(self, slot: Slot) -> Slices:
        """Waits for what comes back into the slot."""
        while slot.index in self._returning:
            yield

    def _taken(self, slot: Slot, count: int) -> None:
        slot.transfer, slot.awaited_cells = "restore", count
        self._returning.add(slot.index)

    def _give_back(self, slot: Slot) -> None:
        self._returning.discard(slot.index)
        slot.transfer, slot.awaited_cells = "", 0

    def _into(self, slot: Slot, entry: HostEntry, length: int) -> Slices:
        count = self._entering_tokens(entry, length)
        try:
            # From the first block on the slot's content is that tenant's, and that session's.
            slot.sequence.origin = entry.origin
            with closing(self._enter(slot.sequence, entry, length)) as entering:
                for _ in entering:
                    slot.awaited_cells = max(0, count - len(slot.sequence.cells))
                    yield
            slot.used_at = time.monotonic()
        finally:
            self._give_back(slot)

    def _entering_tokens(self, entry: HostEntry, length: int) -> int:
        """How many tokens of an entry enter for the first `length`: whole blocks, or all where there is more than rows."""
        state, count = entry.state, len(entry.tokens)
        if state.whole is not None or state.part is not None:
            return count
        return min(count, -(-length // state.block_tokens) * state.block_tokens)

    def _enters_in_one_slice(self, entry: HostEntry, length: int) -> bool:
        state = entry.state
        if self._codec is None or state.whole is not None:
            return True
        return state.part is None and self._entering_tokens(entry, length) <= state.block_tokens

    def _enter(
        self, sequence: Sequence, entry: HostEntry, length: int, *, at_once: bool = False
    ) -> Generator[None, None, bool]:
        """Slices that give an empty sequence the first `length` tokens, or what it cannot be had without. The entry goes where
        its bytes are not what they should be."""
        cache, host = self._cache, self._cache.host
        if entry.state.whole is not None:
            if not cache.make_room(len(entry.tokens), at_once=True):
                return False
            entered = sequence.load(entry.state.whole, entry.tokens, entry.spans, entry.origin)
            (host.used if entered else host.forget)(entry)
            return entered
        assert self._codec is not None
        whole = False
        try:
            yield from self._enter_blocks(self._codec, sequence, entry, length, at_once=at_once)
            host.used(entry)
            whole = True
        except NoCellsFree:
            log.info("a conversation of %d tokens stays in host memory: there is no room for it", len(entry.tokens))
        except StateError as error:
            log.warning("a state in host memory is of no use: %s", error.message)
            host.forget(entry)
        finally:
            if not whole:
                self._codec.abandon(sequence)
        return whole

    def _enter_blocks(
        self, codec: StateCodec, sequence: Sequence, entry: HostEntry, length: int, *, at_once: bool
    ) -> Slices:
        state, size = entry.state, entry.state.block_tokens
        count = self._entering_tokens(entry, length)
        for index, block in enumerate(state.blocks):
            start = index * size
            if start >= count:
                break
            if index:
                yield
            inside = entry.tokens[start : start + size]
            while not self._cache.make_room(len(inside), at_once=at_once):
                if at_once or not self.under_way:
                    raise NoCellsFree("There are no cells free for what comes back from host memory.")
                yield
            codec.import_block(sequence, start, inside, block)
        if state.part is not None:
            yield
            codec.import_part(sequence, len(entry.tokens), state.part)
        codec.complete(sequence, entry.tokens[: len(sequence.cells)])
        sequence.origin = entry.origin


def _looked_at(work: Future[Any]) -> None:
    """Nobody waits for an errand of ours; an engine that stops ends it."""
    error = None if work.cancelled() else work.exception()
    if error is not None and not isinstance(error, EngineStopping):
        log.error("an errand between the context and host memory failed", exc_info=error)
