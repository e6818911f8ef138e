"""Reuse of computed prefixes: which sequence or host entry holds most of a prompt, and which slot should run it.

A dense model's prefix may end anywhere, also inside a busy slot's sequence: sharing it is free in a unified cache. Where a
memory cannot drop a suffix (recurrent state), a prefix can be reused only where some sequence still stands: at the end of an
idle slot's, or at a checkpoint, which is a sequence that was shared off a slot at a cut and never runs itself. A memory that
forgets what lies behind a sliding window cannot share at all: a shared cell is never given back, also where it lies behind
both windows. There the checkpoints are whole states in host memory.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from functools import partial
from typing import TYPE_CHECKING

from engines.config import EngineConfig
from engines.runtime.cells import CellLedger, Sequence
from engines.runtime.checkpoint_order import Checkpoint, first_to_go, spare, stays
from engines.runtime.host_cache import MIN_TOKENS, HostCache, HostEntry
from engines.runtime.llama import Llama
from engines.runtime.origin import Origin
from engines.runtime.prefix_search import PrefixSearch, Source
from engines.runtime.slots import Slot

if TYPE_CHECKING:
    from engines.runtime.host_moves import HostMoves

# A source slot whose tail is at most this share of what it lends is overwritten: the tail is then most likely an answer that
# the client edited away. A longer tail is another conversation and keeps its slot.
DEAD_TAIL_SHARE = 0.25


class PrefixCache:
    """All sequences of a context. Used by the core's thread only."""

    def __init__(self, llama: Llama, config: EngineConfig) -> None:
        self.ledger = CellLedger(config.cells)
        # A memory that can be cut anywhere needs no checkpoints.
        self.cuts_anywhere = not llama.needs_checkpoints
        self.can_share = not llama.forgets_window
        self.checkpoint_min_tokens = 0
        self._llama = llama
        self._spacing_tokens = config.checkpoint_spacing_tokens
        sequences = [Sequence(index, llama, self.ledger) for index in range(config.sequences)]
        running = config.decoding_sequences
        self.most_running = config.slots
        self.slots = [
            Slot(i, sequences[i], has_raw_logits=not config.samples_on_device or i >= config.slots)
            for i in range(running)
        ]
        in_context = self.can_share and not self.cuts_anywhere
        kept = running + config.kept_checkpoints
        self.checkpoints = [Checkpoint(sequence) for sequence in sequences[running:kept] if in_context]
        # Where windows are kept whole: for what leaves of them (state_windows.py).
        keeps_windows = self.can_share and self.cuts_anywhere and llama.window_tokens > 0
        self.window_places = [Checkpoint(sequence) for sequence in sequences[running:kept] if keeps_windows]
        # Where what leaves a slot for host memory may step aside, so that the slot need not wait; `aside` are those in use.
        self.spares = self.checkpoints or self.window_places
        if self.can_share and not self.spares:
            self.spares = [Checkpoint(sequence) for sequence in sequences[running:kept]]
        self.aside: list[Checkpoint] = []
        # For exports and imports of ranges: always empty between two slices of an errand, so never reused.
        self.scratch = (sequences[kept], sequences[kept + 1])
        # llama.cpp exports of a windowed layer only what its last token can see.
        self.whole_only = whole_only = llama.has_recurrent_state or llama.window_tokens > 0
        self.host = HostCache(config.host_cache_bytes, cuts_anywhere=not whole_only)
        self.search = PrefixSearch(self, llama)
        self.host.has_rows = lambda cut: self.search.rows_of(cut) is not None
        self._moves: HostMoves | None = None
        # On a CPU attention walks the cells of idle conversations too: two of them nearly doubled a first token's time.
        self._puts_away_idle = config.put_away_idle and config.gpu_layers == 0 and not whole_only

    @property
    def moves(self) -> HostMoves:
        assert self._moves is not None
        return self._moves

    def begin(self, moves: HostMoves) -> None:
        """Called once, before anybody's tokens come."""
        self._moves = moves

    @property
    def least_worth_tokens(self) -> int:
        """What host memory is for: a recurrent state is large however short its text, so that it is not copied where computing it
        anew is quick."""
        return MIN_TOKENS if self.cuts_anywhere else max(MIN_TOKENS, self.checkpoint_min_tokens)

    @property
    def free_slots(self) -> int:
        """How many generations more may run: sequences for whole rows stand beside the slots, but no more run for them."""
        return max(0, self.most_running - sum(not slot.idle for slot in self.slots))

    @property
    def holders(self) -> list[Slot | Checkpoint]:
        """All whose sequences may hold a conversation."""
        return [*self.slots, *self.checkpoints]

    @property
    def lenders(self) -> list[Slot | Checkpoint]:
        """Those of whose sequences others may take. What is still coming in may yet prove to be wrong, when it is thrown away."""
        aside = [place for place in self.aside if place not in self.checkpoints]
        return [*(slot for slot in self.slots if slot.transfer != "restore"), *self.checkpoints, *aside]

    def glance(self) -> object:
        """Differs from an earlier one when an idle conversation came, went or went on. May be called from any thread."""
        slots = tuple((slot.used_at, len(slot.sequence)) if slot.idle else None for slot in self.slots)
        return slots, len(self.host), self.host.used_bytes

    # --- where a generation runs ----------------------------------------------------------------

    def best_slot(self, source: Source, *, raw_logits: bool, session: str = "") -> Slot | None:
        """The idle slot that loses least: the source's own if its tail is dead, an empty one, else the first to go. What is of
        nobody's `session` leaves a session the slot that it begins like, if it can do with one that is no session's."""
        idle = [slot for slot in self.slots if slot.idle and slot.has_raw_logits == raw_logits]
        own = next((slot for slot in idle if slot.sequence is source.sequence), None)
        # A checkpoint's conversation goes on in the slot that it was taken from; who says no session may want its end once more.
        if own is None and (session or all(len(slot.sequence) for slot in idle)):
            own = next((slot for slot in idle if self._is_branch(slot, source)), None)
        others = (slot for slot in idle if slot is not own)
        other = min(others, key=lambda slot: (len(slot.sequence) > 0, *stays(slot)), default=None)
        if own is None or other is None:
            return own or other
        spares_own = not session and own.sequence.origin.session and not other.sequence.origin.session
        return own if self._has_dead_tail(own, source) and not spares_own else other

    def _has_dead_tail(self, slot: Slot, source: Source) -> bool:
        """Whether nobody goes on with what the slot holds behind the source: where it is short, or of the prompt's own session
        and behind more than a system prompt (an answer whose reasoning the template drops, however long)."""
        tail, origin = len(slot.sequence) - source.length, slot.sequence.origin
        is_own = bool(source.session) and origin.session == source.session and source.length > origin.system_cut
        return not self.can_share or tail <= DEAD_TAIL_SHARE * source.length or (is_own and not self.cuts_anywhere)

    def _is_branch(self, slot: Slot, source: Source) -> bool:
        """Whether the slot holds the source's tokens, taken from a checkpoint or host memory, and a tail that is dead."""
        holder, held = source.sequence or source.entry, slot.sequence
        if holder is None or self.cuts_anywhere or not self.can_share or not source.length or holder is held:
            return False
        same = holder.origin.tenant == held.origin.tenant and len(held) >= source.length
        same = same and held.tokens[: source.length] == holder.tokens[: source.length]
        return same and self._has_dead_tail(slot, source)

    def prepare(self, slot: Slot, source: Source) -> None:
        """Brings the source's prefix into the slot's sequence; what the slot held goes to host memory if it is worth it."""
        sequence = slot.sequence
        self.vacate(slot, source)
        if source.sequence is not None and source.cut is not None:
            if not self.moves.join(sequence, source):
                sequence.clear()
        elif source.sequence is sequence:
            sequence.cut(source.length)
        elif source.sequence is not None and self.can_share:
            sequence.share_prefix(source.sequence, source.length)
            self._touch(source.sequence)
        elif (entry := self.entry_of(source)) is not None and self.moves.load(sequence, entry, source.length):
            sequence.cut(source.length)

    def entry_of(self, source: Source) -> HostEntry | None:
        """The state that the source has in host memory, put together where it lies there in two."""
        entry, cut = source.entry, source.cut
        return entry if entry is None or cut is None else self.host.joined(cut, entry)

    def vacate(self, slot: Slot, source: Source) -> None:
        """Empties the slot for what the source has, unless that is in it."""
        if source.sequence is slot.sequence:
            self.host.unlink(slot.index)
        elif self._is_branch(slot, source):
            self.host.unlink(slot.index)
            slot.sequence.clear()
        else:
            self.put_away(slot)

    def may_take(self, slot: Slot, source: Source) -> bool:
        """Whether `prepare` finds nothing in the slot that must still go to host memory, or elsewhere so that it goes from there;
        if not, it is on its way."""
        if source.sequence is slot.sequence or self._is_branch(slot, source):
            return True
        return self.moves.is_out(slot.sequence) or self.moves.steps_aside(slot)

    def bring_back(self, slot: Slot) -> Generator[None, None, None]:
        """Fills an empty, idle slot with its conversation that was put away, if that is still in host memory."""
        yield from self.moves.settled(slot)
        entry = self.host.of_slot(slot.index)
        if entry is not None and slot.idle and not len(slot.sequence) and self._has_room_for(entry):
            yield from self.moves.bring(slot, entry)
            self.host.unlink(slot.index)

    def of_session(self, slot: Slot, session: str) -> bool:
        """Whether the idle slot has a conversation of that name, also where it was put away meanwhile."""
        if len(slot.sequence):
            return slot.sequence.origin.session == session
        entry = self.host.of_slot(slot.index)
        return entry is not None and entry.origin.session == session

    def bring_in(self, session: str) -> Generator[None, None, Slot | None]:
        """The idle slot that is given what only host memory has of a session; None where that is nothing, or there is no room."""
        entry = self.host.of_session(session)
        places = (self.best_slot(Source(), raw_logits=kind) for kind in (False, True))
        slot = next((place for place in places if place is not None), None)
        if entry is None or slot is None or not self._has_room_for(entry):
            return None
        yield from self.moves.bring(slot, entry)
        return slot if len(slot.sequence) else None

    def _has_room_for(self, entry: HostEntry) -> bool:
        """Whether it takes no cells that are promised to others."""
        return self.promised_cells() + len(entry.tokens) <= self.ledger.count

    def emptied(self, slot: Slot, cells: int = 0) -> Generator[None, None, None]:
        """Empties a taken slot once its content is in host memory, and waits for so many free cells if they can be had."""
        while not self.moves.is_out(slot.sequence):
            yield
        self.put_away(slot)
        while not self.make_room(cells) and self.moves.under_way:
            yield

    def _put_away(self, sequence: Sequence, slot: int | None = None) -> None:
        """`slot`: whose conversation it stays."""
        alone = sequence.cells_alone()
        if alone >= self.least_worth_tokens or self.is_checkpoint(sequence):
            self.moves.put_out(sequence)
        if alone >= self.least_worth_tokens and slot is not None:
            self.host.link(slot, sequence)
        sequence.clear()

    def put_away_one(self) -> bool:
        """Takes one idle conversation, never the last to go, nearer to host memory. False when none is left that could go."""
        if not self._puts_away_idle:
            return False
        idle = sorted((s for s in self.slots if s.idle and len(s.sequence)), key=stays)
        for slot in idle[:-1]:
            if slot.sequence.cells_alone() < MIN_TOKENS:
                continue
            if self._leave_to_host(slot) or self.moves.starts(slot.sequence, partial(self._leave_to_host, slot)):
                return True
        return False

    def _leave_to_host(self, slot: Slot) -> bool:
        """Empties an idle slot whose conversation host memory has; False where it is not there."""
        if not slot.idle or not len(slot.sequence) or self.host.covering(slot.sequence) is None:
            return False
        self.host.link(slot.index, slot.sequence)
        slot.sequence.clear()
        return True

    def _touch(self, sequence: Sequence) -> None:
        for holder in self.holders:
            if holder.sequence is sequence:
                holder.used_at = time.monotonic()

    # --- checkpoints ----------------------------------------------------------------------------

    def checkpoint(self, slot: Slot) -> bool:
        """Keeps the slot's present state, if there is a place for it. Costs microseconds and no cells where it is shared.

        False while something must leave for host memory first. The slot then waits: behind its next token its state is another.
        """
        tokens = slot.sequence.tokens
        if not self.can_share:
            if not self.moves.is_out(slot.sequence):
                return False
            self.moves.put_out(slot.sequence)
            return True
        origin = slot.sequence.origin
        same = (c for c in self.checkpoints if c.sequence.origin.tenant == origin.tenant)
        if not self.checkpoints or any(c.sequence.tokens == tokens for c in same):
            return True
        self._thin(tokens, origin)
        going = self._next_place()
        if going is not None and not self.moves.is_out(going.sequence):
            return False
        place = self.checkpoint_place()
        if place is not None:
            place.sequence.share_prefix(slot.sequence, len(tokens))
            self._foresee_place()
        return True

    def goes_on(self, slot: Slot) -> bool:
        """Whether a slot that waits for its checkpoint has it now."""
        slot.waits_at_cut = not self.checkpoint(slot)
        return not slot.waits_at_cut

    def checkpoint_place(self) -> Checkpoint | None:
        """An emptied checkpoint, the first to go; None where there is none to be had."""
        place = self._next_place()
        if place is None:
            return None
        self._put_away(place.sequence)
        place.used_at = time.monotonic()
        return place

    def _next_place(self) -> Checkpoint | None:
        places = [checkpoint for checkpoint in self.checkpoints if not checkpoint.leaving]
        place = first_to_go(places)
        if place is None or not len(place.sequence):
            return place
        needless = spare(places, self._spacing_tokens)
        if needless is not None:
            needless.sequence.clear()
        return needless or place

    def _foresee_place(self) -> None:
        """Sends what the next checkpoint would push out to host memory, so that no prompt waits for it then."""
        places = [checkpoint for checkpoint in self.checkpoints if not checkpoint.leaving]
        going = first_to_go(places)
        if (
            going is not None
            and len(going.sequence)
            and len(places) > 1
            and spare(places, self._spacing_tokens) is None
        ):
            self.moves.is_out(going.sequence)

    def is_checkpoint(self, sequence: Sequence) -> bool:
        """Whether it is the frozen state of a cut, and not on its way to another engine."""
        return any(c.sequence is sequence and not c.leaving for c in self.checkpoints)

    def checkpoints_of(self, tokens: list[int], origin: Origin) -> list[Checkpoint]:
        """Those of the same tenant at a cut of `tokens` before their end, the shortest first."""
        mine = [c for c in self.checkpoints if c.sequence.origin.tenant == origin.tenant]
        found = [c for c in mine if 0 < len(c.sequence) < len(tokens)]
        return sorted(
            (c for c in found if tokens[: len(c.sequence)] == c.sequence.tokens), key=lambda c: len(c.sequence)
        )

    def put_away(self, slot: Slot) -> None:
        """Empties an idle slot for another content; what it holds goes to host memory if it is worth it."""
        self.host.unlink(slot.index)
        self._put_away(slot.sequence)

    def _thin(self, tokens: list[int], origin: Origin) -> None:
        """Drops earlier checkpoints of the same conversation that the new one makes superfluous: all but the first, and the last,
        to which an edited turn goes back."""
        inside = {len(c.sequence): c for c in self.checkpoints_of(tokens, origin) if not c.leaving}
        outside = {len(cut.tokens): cut for cut in self.host.cuts_in(tokens, origin.tenant)}
        for length in sorted({*inside, *outside})[1:-1]:
            if length in inside:
                inside[length].sequence.clear()
            if length in outside:
                self.host.forget(outside[length])

    # --- cells ----------------------------------------------------------------------------------

    def shared_with_running(self, source: Source) -> int:
        """Cells of the source that are counted already, because a running generation holds them."""
        busy = any(slot.sequence is source.sequence for slot in self.busy)
        return source.length if busy else 0

    @property
    def busy(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.generation is not None]

    def promised_cells(self) -> int:
        """Cells that running generations and transfers hold, and those that generations need before their next token."""
        held = self.ledger.distinct(slot.sequence.cells for slot in self.slots if not slot.idle)
        awaited = sum(slot.awaited_cells for slot in self.slots)
        return held + awaited + sum(slot.todo_tokens + 1 for slot in self.busy)

    def make_room(self, cells: int, *, at_once: bool = False) -> bool:
        """Empties idle slots and checkpoints in the order of `stays` until `cells` are free. False if that was not enough, or
        content is still on its way to host memory, which `at_once` does not wait for."""
        coming = 0
        for holder in self._going() if self.ledger.free < cells else ():
            if self.ledger.free + coming >= cells:
                break
            if at_once or self.moves.is_out(holder.sequence):
                self._put_away(holder.sequence, holder.index if isinstance(holder, Slot) else None)
            else:
                coming += holder.sequence.cells_alone()
        return self.ledger.free >= cells

    def foresee(self, cells: int) -> None:
        """Sends what `make_room` would empty for so many cells to host memory, so that nobody waits for it then."""
        coming = 0
        for holder in self._going():
            if self.ledger.free + coming >= cells:
                return
            self.moves.is_out(holder.sequence)
            coming += holder.sequence.cells_alone()

    def _going(self) -> list[Slot | Checkpoint]:
        """Whose content others need not keep, the first to go first."""
        holders: list[Slot | Checkpoint] = [slot for slot in self.slots if slot.idle]
        holders += [checkpoint for checkpoint in self.checkpoints if not checkpoint.leaving]
        return [holder for holder in (*self.aside, *sorted(holders, key=stays)) if len(holder.sequence)]
