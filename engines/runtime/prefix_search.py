"""Where most of a prompt can be had: sequences of the context, whole states in host memory, and cuts of which host memory has
the state and somebody else the attention rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engines.runtime.cells import Sequence, common_prefix
from engines.runtime.checkpoint_order import Checkpoint
from engines.runtime.generation import Generation
from engines.runtime.host_cache import MIN_TOKENS, HostEntry
from engines.runtime.llama import Llama
from engines.runtime.media_span import NO_SPANS, SpanMap
from engines.runtime.slots import Slot

if TYPE_CHECKING:
    from engines.runtime.prefix import PrefixCache

# Waiting for another generation that computes the same prefix pays from here on.
WORTH_WAITING_TOKENS = 64


@dataclass(frozen=True)
class Source:
    """Where `length` leading tokens of a prompt of `session` can be had: a sequence of the context, or a host entry, or nowhere
    (0). With a `cut` either has the attention rows alone, and the cut the state that goes with them."""

    length: int = 0
    sequence: Sequence | None = None
    entry: HostEntry | None = None
    cut: HostEntry | None = None
    session: str = ""


class PrefixSearch:
    """Looks, and changes nothing. Used by the core's thread only."""

    def __init__(self, cache: PrefixCache, llama: Llama) -> None:
        self._cache = cache
        self._llama = llama

    def best_source(self, tokens: list[int], spans: SpanMap = NO_SPANS, tenant: str = "", session: str = "") -> Source:
        """The longest reusable prefix of the tenant's `tokens`, of whose `spans` it cuts none; one token is always left to
        decode, since a state holds no logits."""
        best = Source(session=session)
        for sequence in self._still_sequences(tenant):
            length = self._usable(sequence, tokens, spans)
            if length > best.length:
                best = Source(length, sequence, session=session)
        # Loading costs time that sharing does not, so it must save something.
        entry, length = self._cache.host.best(tokens, spans, tenant)
        if entry and length >= best.length + MIN_TOKENS:
            rows = self.rows_of(entry) if self._cache.host.layout is not None and entry.state.part is not None else None
            # Where the context still has its rows its state alone comes back.
            best = Source(length, entry=entry, session=session)
            best = Source(length, rows, cut=entry, session=session) if rows is not None else best
        return self._best_cut(tokens, tenant, session, best.length + MIN_TOKENS) or best

    def _best_cut(self, tokens: list[int], tenant: str, session: str, least: int) -> Source | None:
        """The longest cut of at least `least` tokens that host memory has, and somebody its rows."""
        for cut in self._cache.host.cuts_in(tokens, tenant):
            length = len(cut.tokens)
            if length < least:
                return None
            if (sequence := self.rows_of(cut)) is not None:
                return Source(length, sequence, cut=cut, session=session)
            if (entry := self._cache.host.rows_of(cut)) is not None:
                return Source(length, entry=entry, cut=cut, session=session)
        return None

    def rows_of(self, cut: HostEntry) -> Sequence | None:
        """Whose attention rows go with a cut: of an idle slot if there is one, which may then be the place to go on."""
        length, last = len(cut.tokens), cut.tokens[-1]
        idle_first = sorted(self._cache.lenders, key=lambda holder: not (isinstance(holder, Slot) and holder.idle))
        for sequence in (holder.sequence for holder in idle_first):
            held = sequence.tokens
            if len(held) < length or held[length - 1] != last or sequence.origin.tenant != cut.origin.tenant:
                continue
            if held[:length] == cut.tokens:
                return sequence
        return None

    def _still_sequences(self, tenant: str) -> Iterable[Sequence]:
        """Sequences that may lend a prefix: a busy slot's moves on, which matters only where it cannot be cut. One that holds
        another tenant's tokens does not even tell whether they are the same."""
        still = (
            c.sequence for c in self._cache.lenders if isinstance(c, Checkpoint) or self._cache.cuts_anywhere or c.idle
        )
        return (sequence for sequence in still if sequence.origin.tenant == tenant)

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

    def leader(self, generation: Generation, at_hand: int) -> tuple[Slot, int] | None:
        """The slot whose generation is about to compute a longer prefix of this one than is at hand, and that prefix's length;
        None if there is none.

        Where prefixes cannot be cut anywhere, the leader is asked to leave a checkpoint at the fork.
        """
        for slot in self._cache.slots:
            leader = slot.generation
            if leader is None or slot.decoding or not leader.reuse_prefix or leader.tenant != generation.tenant:
                continue
            fork = min(common_prefix(leader.tokens, generation.tokens), len(generation.tokens) - 1)
            if generation.spans:
                fork = generation.spans.whole(fork)
            done = len(slot.sequence)
            # Whoever has everything that the leader has so far waits for the rest too, or it would leave just before the end.
            worth = 1 if at_hand == done > 0 else max(WORTH_WAITING_TOKENS, self._cache.checkpoint_min_tokens)
            if fork - at_hand < worth or done >= fork:
                continue
            if not self._cache.cuts_anywhere:
                nowhere = not self._cache.checkpoints if self._cache.can_share else not self._cache.host.budget_bytes
                if nowhere or fork >= len(leader.tokens):
                    continue
                leader.add_cut(fork)
            return slot, fork
        return None

    def cut_at_fork(self, generation: Generation, at_hand: int) -> None:
        """A prompt that branches off from what is held more than `at_hand` tokens behind its beginning leaves a checkpoint there,
        if none of its own is near: a third one of the kind then begins at it."""
        if self._cache.cuts_anywhere or not self._cache.checkpoints:
            return
        held = [(holder.sequence.origin, holder.sequence.tokens) for holder in self._cache.lenders]
        held += [(entry.origin, entry.tokens) for entry in self._cache.host]
        mine = (tokens for origin, tokens in held if origin.tenant == generation.tenant)
        fork = max((common_prefix(tokens, generation.tokens) for tokens in mine), default=0)
        fork = min(fork, len(generation.tokens) - 1)
        if generation.spans:
            fork = generation.spans.whole(fork)
        before = max([at_hand, *(cut for cut in generation.cuts if cut <= fork)])
        if fork - before >= max(WORTH_WAITING_TOKENS, self._cache.checkpoint_min_tokens):
            generation.add_cut(fork)
