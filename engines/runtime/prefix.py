"""Reuse of computed prefixes: which sequence or host entry holds most of a prompt, and which slot should run it.

A dense model's prefix may end anywhere, also inside a busy slot's sequence: sharing it is free in a unified cache. Where a
memory cannot drop a suffix (recurrent state), a prefix can be reused only where some sequence still stands: at the end of an
idle slot's, or at a checkpoint, which is a sequence that was shared off a slot at a cut and never runs itself. A memory that
forgets what lies behind a sliding window cannot share at all: a shared cell is never given back, also where it lies behind
both windows. There the checkpoints are whole states in host memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from engines.config import EngineConfig
from engines.runtime.cells import CellLedger, Sequence, common_prefix
from engines.runtime.generation import Generation
from engines.runtime.host_cache import MIN_TOKENS, HostCache, HostEntry
from engines.runtime.llama import Llama
from engines.runtime.media_span import NO_SPANS, SpanMap
from engines.runtime.origin import Origin
from engines.runtime.slots import Slot

# A source slot whose tail is at most this share of what it lends is overwritten: the tail is then most likely an answer that
# the client edited away. A longer tail is another conversation and keeps its slot.
DEAD_TAIL_SHARE = 0.25
MAX_CHECKPOINTS_PER_LINEAGE = 3
# Waiting for another generation that computes the same prefix pays from here on.
WORTH_WAITING_TOKENS = 64


@dataclass(eq=False)
class Checkpoint:
    """A frozen sequence; empty when unused. While its state leaves the engine (`leaving`) it stays."""

    sequence: Sequence
    used_at: float = 0.0
    leaving: bool = False


@dataclass(frozen=True)
class Source:
    """Where `length` leading tokens of a prompt can be had: a sequence of the context, or a host entry, or nowhere (0)."""

    length: int = 0
    sequence: Sequence | None = None
    entry: HostEntry | None = None


def stays(holder: Slot | Checkpoint) -> tuple[bool, float]:
    """In which order content goes, the least first: that of nobody's session, with which hardly anybody goes on (a title), then
    the longest unused. It only orders: where all content is sessions', theirs goes, so that whoever comes has a place."""
    return bool(holder.sequence.origin.session), holder.used_at


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
        self.slots = [
            Slot(i, sequences[i], has_raw_logits=not config.samples_on_device or i >= config.slots)
            for i in range(running)
        ]
        in_context = self.can_share and not self.cuts_anywhere
        kept = running + config.checkpoints
        self.checkpoints = [Checkpoint(sequence) for sequence in sequences[running:kept] if in_context]
        # Where windows are kept whole: for what leaves of them (state_windows.py).
        keeps_windows = self.can_share and self.cuts_anywhere and llama.window_tokens > 0
        self.window_places = [Checkpoint(sequence) for sequence in sequences[running:kept] if keeps_windows]
        # For exports and imports of ranges: always empty between two slices of an errand, so never reused.
        self.scratch = (sequences[kept], sequences[kept + 1])
        # llama.cpp exports of a windowed layer only what its last token can see.
        self.whole_only = whole_only = llama.has_recurrent_state or llama.window_tokens > 0
        self.host = HostCache(config.host_cache_bytes, cuts_anywhere=not whole_only)
        # On a CPU attention walks the cells of idle conversations too: two of them nearly doubled a first token's time.
        self._puts_away_idle = config.put_away_idle and config.gpu_layers == 0 and not whole_only

    @property
    def holders(self) -> list[Slot | Checkpoint]:
        """All whose sequences may hold a conversation."""
        return [*self.slots, *self.checkpoints]

    @property
    def lenders(self) -> list[Slot | Checkpoint]:
        """Those of whose sequences others may take. What is still coming in may yet prove to be wrong, when it is thrown away."""
        return [*(slot for slot in self.slots if slot.transfer != "restore"), *self.checkpoints]

    def glance(self) -> object:
        """Differs from an earlier one when an idle conversation came, went or went on. May be called from any thread."""
        slots = tuple((slot.used_at, len(slot.sequence)) if slot.idle else None for slot in self.slots)
        return slots, len(self.host), self.host.used_bytes

    # --- where a prefix is ----------------------------------------------------------------------

    def best_source(self, tokens: list[int], spans: SpanMap = NO_SPANS, tenant: str = "") -> Source:
        """The longest reusable prefix of the tenant's `tokens`, of whose `spans` it cuts none; one token is always left to
        decode, since a state holds no logits."""
        best = Source()
        for sequence in self._still_sequences(tenant):
            length = self._usable(sequence, tokens, spans)
            if length > best.length:
                best = Source(length, sequence)
        entry, length = self.host.best(tokens, spans, tenant)
        # Loading costs time that sharing does not, so it must save something.
        return Source(length, entry=entry) if entry and length >= best.length + MIN_TOKENS else best

    def _still_sequences(self, tenant: str) -> Iterable[Sequence]:
        """Sequences that may lend a prefix: a busy slot's moves on, which matters only where it cannot be cut. One that holds
        another tenant's tokens does not even tell whether they are the same."""
        still = (c.sequence for c in self.lenders if isinstance(c, Checkpoint) or self.cuts_anywhere or c.idle)
        return (sequence for sequence in still if sequence.origin.tenant == tenant)

    def shared_with_running(self, source: Source) -> int:
        """Cells of the source that are counted already, because a running generation holds them."""
        busy = any(slot.sequence is source.sequence for slot in self.busy)
        return source.length if busy else 0

    def _usable(self, sequence: Sequence, tokens: list[int], spans: SpanMap) -> int:
        shared = min(common_prefix(sequence.tokens, tokens), len(tokens) - 1)
        if spans:
            shared = spans.whole(shared)
        if shared == len(sequence):
            return shared
        if self._llama.has_recurrent_state:
            return 0
        window = self._llama.window_tokens
        if not window:
            return shared
        # Also where windows are kept whole: a state that came back from host memory brought its last window only.
        position = spans.position(shared) if spans else shared
        return shared if self._llama.first_position(sequence.index) <= max(0, position - window) else 0

    def leader(self, generation: Generation, at_hand: int) -> Generation | None:
        """A running generation that is about to compute a longer prefix of this one than is at hand; None if there is none.

        Where prefixes cannot be cut anywhere, the leader is asked to leave a checkpoint at the fork.
        """
        for slot in self.slots:
            leader = slot.generation
            if leader is None or slot.decoding or not leader.reuse_prefix or leader.tenant != generation.tenant:
                continue
            fork = min(common_prefix(leader.tokens, generation.tokens), len(generation.tokens) - 1)
            if generation.spans:
                fork = generation.spans.whole(fork)
            done = len(slot.sequence)
            # Whoever has everything that the leader has so far waits for the rest too, or it would leave just before the end.
            worth = 1 if at_hand == done > 0 else max(WORTH_WAITING_TOKENS, self.checkpoint_min_tokens)
            if fork - at_hand < worth or done >= fork:
                continue
            if not self.cuts_anywhere:
                nowhere = not self.checkpoints if self.can_share else not self.host.budget_bytes
                if nowhere or fork >= len(leader.tokens):
                    continue
                leader.add_cut(fork)
            return leader
        return None

    # --- where a generation runs ----------------------------------------------------------------

    def best_slot(self, source: Source, *, raw_logits: bool, session: str = "") -> Slot | None:
        """The idle slot that loses least: the source's own if its tail is dead, an empty one, else the first to go. What is of
        nobody's `session` leaves a session the slot that it begins like, if it can do with one that is no session's."""
        idle = [slot for slot in self.slots if slot.idle and slot.has_raw_logits == raw_logits]
        own = next((slot for slot in idle if slot.sequence is source.sequence), None)
        others = (slot for slot in idle if slot is not own)
        other = min(others, key=lambda slot: (len(slot.sequence) > 0, *stays(slot)), default=None)
        if own is None or other is None:
            return own or other
        spares_own = not session and own.sequence.origin.session and not other.sequence.origin.session
        tail = len(own.sequence) - source.length
        is_dead = not self.can_share or tail <= DEAD_TAIL_SHARE * source.length
        return own if is_dead and not spares_own else other

    def prepare(self, slot: Slot, source: Source) -> None:
        """Brings the source's prefix into the slot's sequence; what the slot held goes to host memory if it is worth it."""
        sequence = slot.sequence
        if source.sequence is sequence:
            self.host.unlink(slot.index)
            sequence.cut(source.length)
            return
        self.put_away(slot)
        if source.sequence is not None and self.can_share:
            sequence.share_prefix(source.sequence, source.length)
            self._touch(source.sequence)
        elif source.entry is not None:
            if not self.make_room(len(source.entry.tokens)):
                return  # the entry is good, it only has no room now
            if self._load(sequence, source.entry):
                sequence.cut(source.length)

    def _load(self, sequence: Sequence, entry: HostEntry) -> bool:
        if sequence.load(entry.state, entry.tokens, entry.spans, entry.origin):
            self.host.used(entry)
            return True
        self.host.forget(entry)
        return False

    def bring_back(self, slot: Slot) -> None:
        """Fills an empty, idle slot with its conversation that was put away, if that is still in host memory."""
        entry = self.host.of_slot(slot.index)
        if entry is not None and slot.idle and not len(slot.sequence) and self._makes_room_for(entry):
            slot.used_at = time.monotonic()
            self._load(slot.sequence, entry)
            self.host.unlink(slot.index)

    def of_session(self, slot: Slot, session: str) -> bool:
        """Whether the idle slot has a conversation of that name, also where it was put away meanwhile."""
        if len(slot.sequence):
            return slot.sequence.origin.session == session
        entry = self.host.of_slot(slot.index)
        return entry is not None and entry.origin.session == session

    def bring_in(self, session: str) -> Slot | None:
        """The idle slot that is given what only host memory has of a session; None where that is nothing, or there is no room."""
        entry = self.host.of_session(session)
        places = (self.best_slot(Source(), raw_logits=kind) for kind in (False, True))
        slot = next((place for place in places if place is not None), None)
        if entry is None or slot is None or not self._makes_room_for(entry):
            return None
        self.put_away(slot)
        if not self._load(slot.sequence, entry):
            return None
        slot.used_at = time.monotonic()
        return slot

    def _makes_room_for(self, entry: HostEntry) -> bool:
        """Empties nobody's slot where that were not enough."""
        count = len(entry.tokens)
        return self.promised_cells() + count <= self.ledger.count and self.make_room(count)

    def _put_away(self, sequence: Sequence, slot: int | None = None) -> None:
        """`slot`: whose conversation it stays."""
        # A recurrent state is large however short its text: where computing it anew is quick, it is not copied.
        least = MIN_TOKENS if self.cuts_anywhere else max(MIN_TOKENS, self.checkpoint_min_tokens)
        if sequence.cells_alone() >= least:
            self.host.save(sequence)
            if slot is not None:
                self.host.link(slot, sequence)
        sequence.clear()

    def put_away_one(self) -> bool:
        """Moves one idle conversation, never the last to go, to host memory. False when none is left that could go."""
        if not self._puts_away_idle:
            return False
        idle = sorted((s for s in self.slots if s.idle and len(s.sequence)), key=stays)
        for slot in idle[:-1]:
            if slot.sequence.cells_alone() >= MIN_TOKENS and self.host.holds_after_save(slot.sequence):
                self.host.link(slot.index, slot.sequence)
                slot.sequence.clear()
                return True
        return False

    def _touch(self, sequence: Sequence) -> None:
        for holder in self.holders:
            if holder.sequence is sequence:
                holder.used_at = time.monotonic()

    # --- checkpoints ----------------------------------------------------------------------------

    def checkpoint(self, slot: Slot) -> None:
        """Keeps the slot's present state, if there is a place for it. Costs microseconds and no cells where it is shared."""
        tokens = slot.sequence.tokens
        if not self.can_share:
            self.host.save(slot.sequence)
            return
        origin = slot.sequence.origin
        same = (c for c in self.checkpoints if c.sequence.origin.tenant == origin.tenant)
        if not self.checkpoints or any(c.sequence.tokens == tokens for c in same):
            return
        self._thin(tokens, origin)
        place = self.checkpoint_place()
        if place is not None:
            place.sequence.share_prefix(slot.sequence, len(tokens))

    def checkpoint_place(self) -> Checkpoint | None:
        """An emptied checkpoint, the first to go; None where there is none to be had."""
        places = [checkpoint for checkpoint in self.checkpoints if not checkpoint.leaving]
        if not places:
            return None
        place = min(places, key=lambda c: (len(c.sequence) > 0, *stays(c)))
        self._put_away(place.sequence)
        place.used_at = time.monotonic()
        return place

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
        """Drops earlier checkpoints of the same conversation that the new one makes superfluous; the first one stays."""
        lineage = [checkpoint for checkpoint in self.checkpoints_of(tokens, origin) if not checkpoint.leaving]
        middle = lineage[1:]
        for checkpoint in middle:
            if len(tokens) - len(checkpoint.sequence) < self._spacing_tokens:
                checkpoint.sequence.clear()
        middle = [checkpoint for checkpoint in middle if len(checkpoint.sequence)]
        for checkpoint in middle[: max(0, len(middle) - (MAX_CHECKPOINTS_PER_LINEAGE - 2))]:
            checkpoint.sequence.clear()

    # --- cells ----------------------------------------------------------------------------------

    @property
    def busy(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.generation is not None]

    def promised_cells(self) -> int:
        """Cells that running generations and transfers hold, and those that generations need before their next token."""
        held = self.ledger.distinct(slot.sequence.cells for slot in self.slots if not slot.idle)
        awaited = sum(slot.awaited_cells for slot in self.slots)
        return held + awaited + sum(slot.todo_tokens + 1 for slot in self.busy)

    def make_room(self, cells: int) -> bool:
        """Empties idle slots and checkpoints in the order of `stays` until `cells` are free. False if that was not enough."""
        if self.ledger.free >= cells:
            return True
        holders: list[Slot | Checkpoint] = [slot for slot in self.slots if slot.idle]
        holders += [checkpoint for checkpoint in self.checkpoints if not checkpoint.leaving]
        for holder in sorted(holders, key=stays):
            if self.ledger.free >= cells:
                break
            if len(holder.sequence):
                self._put_away(holder.sequence, holder.index if isinstance(holder, Slot) else None)
        return self.ledger.free >= cells
