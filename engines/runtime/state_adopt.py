"""A running generation on its way in from another engine: the other side of state_follow.py.

Blocks enter a slot that was taken for them while the other engine still decodes; the manifest of its stop, the rest of the
pieces and the generation itself come last. Until `go_on` has returned nothing here runs, and leaving early leaves nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator, Sequence
from types import TracebackType
from typing import Any

from engines.errors import EngineStopping, StateInvalid
from engines.runtime.constraint import ConstraintCompiler
from engines.runtime.core import EngineCore
from engines.runtime.fingerprint import Fingerprint
from engines.runtime.generation import Generation, Mailbox
from engines.runtime.origin import NOBODY, Origin
from engines.runtime.prefix import PrefixCache
from engines.runtime.prefix_marks import longest_marked
from engines.runtime.state_codec import StateCodec
from engines.runtime.state_dock import to_its_end
from engines.runtime.state_order import require_order
from engines.runtime.state_snapshot import Manifest, StatePiece, resumed
from engines.runtime.state_terms import SharingTerms
from engines.runtime.state_transfer import Arrival, Delivery, arrive
from engines.wire_handoff import PrefixMark

# Pieces that are on their way in while the next one is asked for.
UNENTERED = 2


class Adopting:
    """`async with` it on the target, once `begun`. Pieces come in their order, each behind its tokens."""

    def __init__(self, core: EngineCore, terms: SharingTerms, arrival: Arrival) -> None:
        self.held_tokens = len(arrival.tokens)
        self.entered = 0
        self._core, self._terms, self._arrival = core, terms, arrival
        self._lane = terms.dock.lane()
        self._pieces: list[StatePiece] = []
        self._held_pieces = 0
        self._entering: deque[asyncio.Future[Any]] = deque()
        self._done = False

    async def __aenter__(self) -> Adopting:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._done:
            return
        # From here on nothing enters or goes on, whatever exchange is still under way: soon the slot is somebody else's.
        self._done = True
        while self._entering:
            entering = self._entering.popleft()
            await asyncio.wait((entering,))
            if not entering.cancelled():
                entering.exception()  # looked at: all of it is thrown away
        try:
            await self._terms.dock.perform(lambda cache: self._arrival.abort(self._terms.dock.codec))
        except EngineStopping:
            return  # the core has ended, and the slot with it

    @property
    def tokens(self) -> list[int]:
        """Those whose blocks came in."""
        return self._arrival.tokens

    async def take(self, tokens: list[int], delivery: Delivery) -> None:
        """One block of `tokens`, while the source still decodes. Raises as a restore does."""
        await self.begin(delivery, tokens)
        await self.settled()

    async def begin(self, delivery: Delivery, tokens: Sequence[int] = ()) -> None:
        """As `take`, but returns while the piece is on its way in; those before it have entered then. `tokens` are those of a
        block that comes before the manifest."""
        self._arrival.tokens += tokens
        arrival, codec = self._arrival, self._terms.dock.codec

        def check() -> None:
            delivery.check()
            arrival.check(codec, delivery.piece, delivery.data)

        def enter(cache: PrefixCache) -> None:
            self._require_open()
            arrival.enter(cache, codec, delivery.piece, delivery.data)

        entering = self._lane.submit(enter, first=check, quick=delivery.is_quick)
        entering.add_done_callback(lambda _: delivery.free())
        self._entering.append(entering)
        self._pieces.append(delivery.piece)
        await self._entered(UNENTERED)

    async def settled(self) -> None:
        """Returns when all that came has entered. Raises what went wrong with it."""
        await self._entered(0)

    async def _entered(self, most_left: int) -> None:
        while len(self._entering) > most_left:
            await to_its_end(self._entering.popleft())
            self.entered += 1

    async def complete(self, manifest: Manifest) -> list[StatePiece]:
        """What the source's stop says. Returns the pieces that are still to come, for `rest`.

        Raises StateIncompatible, or StateInvalid when what came in is not how it begins.
        """
        await self.settled()
        Fingerprint.parse(self._terms.fingerprint).require(Fingerprint.parse(manifest.fingerprint))
        tokens, there = list(manifest.tokens), len(self._arrival.tokens)
        every = manifest.all_tokens
        if not tokens or min(every) < 0 or max(every) >= self._core.loaded.vocabulary.size:
            raise StateInvalid("The state has no tokens, or some beyond the vocabulary.")
        require_order(manifest.pieces, len(tokens), self._terms.layout)
        held = [piece for piece in manifest.pieces if piece.kind == "block" and piece.end <= self.held_tokens]
        came = list(manifest.pieces[len(held) : len(held) + len(self._pieces)])
        if tokens[:there] != self._arrival.tokens or came != self._pieces:
            raise StateInvalid("The blocks that came in are not those that the state begins with.")
        if (held[-1].end if held else 0) != self.held_tokens:
            raise StateInvalid("The state's blocks do not end where what is held here does.")
        self._held_pieces = len(held)

        def promise(cache: PrefixCache) -> Generator[None, None, None]:
            yield from ()
            self._require_open()
            self._arrival.tokens = tokens
            self._arrival.slot.awaited_cells = len(tokens) - there

        await self._terms.dock.perform(promise)
        return list(manifest.pieces[len(held) + len(self._pieces) :])

    async def rest(self, delivery: Delivery) -> None:
        await self.begin(delivery)
        await self.settled()

    async def finish(self, manifest: Manifest) -> None:
        """The idle conversation is in its slot. Raises StateInvalid when not everything came in."""
        await self._require_all(manifest)

        def work(cache: PrefixCache) -> Generator[None, None, None]:
            yield from self._finish()

        await self._terms.dock.perform(work)

    async def _require_all(self, manifest: Manifest) -> None:
        await self.settled()
        missing = len(manifest.pieces) - self._held_pieces - len(self._pieces)
        if missing:
            raise StateInvalid(f"{missing} pieces of the state did not come in.")

    def _require_open(self) -> None:
        if self._done:
            raise StateInvalid("The move is over; nothing more of it is taken.")

    def _finish(self) -> Generator[None, None, None]:
        self._require_open()
        sequence = self._arrival.slot.sequence
        if not sequence.tokens:
            # Its last block came before anybody knew that it was the last.
            self._terms.dock.codec.complete(sequence, self._arrival.tokens)
        yield from self._arrival.finish()
        self._done = True

    async def go_on(
        self, manifest: Manifest, compiler: ConstraintCompiler, mailbox: Mailbox, deadline_at: float
    ) -> Generation:
        """The generation, waiting in this engine's line with its state in a slot; its pieces go to `mailbox`.

        Raises StateInvalid when not everything came in, and what `resumed` and `EngineCore.submit` raise.
        """
        generation = await self.resumed(manifest, compiler, mailbox, deadline_at)
        self._core.submit(generation)
        return generation

    async def resumed(
        self, manifest: Manifest, compiler: ConstraintCompiler, mailbox: Mailbox, deadline_at: float
    ) -> Generation:
        """As `go_on`, but it stands in no line yet."""
        await self._require_all(manifest)

        def work(cache: PrefixCache) -> Generator[None, None, Generation]:
            self._require_open()
            generation = resumed(manifest, self._core.loaded, compiler, mailbox, deadline_at)
            self._arrival.slot.sequence.origin = generation.origin
            yield from self._finish()
            return generation

        generation: Generation = await self._terms.dock.perform(work)
        return generation


async def adopting(
    terms: SharingTerms,
    core: EngineCore,
    slot_id: int,
    expected_tokens: int,
    *,
    origin: Origin = NOBODY,
    marks: Sequence[PrefixMark] = (),
    sibling: Adopting | None = None,
) -> Adopting:
    """Takes and empties the slot for a state of about so many tokens, `origin`'s. What another sequence of the same tenant holds
    of its beginning by `marks`, or a `sibling` that comes in too, is there already. Raises as `arrive`."""

    def work(cache: PrefixCache) -> Generator[None, None, Arrival]:
        arrival = yield from arrive(cache, slot_id, [0] * expected_tokens, erase_existing=True, origin=origin)
        beside = [] if sibling is None else [sibling._arrival]
        arrival.tokens = _lent(cache, terms.dock.codec, arrival, origin, marks, beside)
        return arrival

    def give_back(arrival: Arrival) -> Callable[[PrefixCache], Generator[None, None, Any]]:
        return lambda cache: arrival.abort(terms.dock.codec)

    return Adopting(core, terms, await terms.dock.take(work, give_back))


def _lent(
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
