"""A running generation on its way in from another engine: the other side of state_follow.py.

Blocks enter a slot that was taken for them while the other engine still decodes; the manifest of its stop, the rest of the
pieces and the generation itself come last. Until `begin_together` (state_together.py) nothing here runs, and leaving early leaves
nothing.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.errors import EngineStopping, StateError, StateInvalid
from engines.runtime.core import EngineCore
from engines.runtime.fingerprint import Fingerprint
from engines.runtime.handoff_marks import Marks
from engines.runtime.origin import NOBODY, Origin
from engines.runtime.prefix import PrefixCache
from engines.runtime.state_cuts import ComingCuts
from engines.runtime.state_dock import to_its_end
from engines.runtime.state_lending import lent_to
from engines.runtime.state_order import require_blocks, require_order
from engines.runtime.state_snapshot import Manifest, StatePiece
from engines.runtime.state_terms import SharingTerms
from engines.runtime.state_transfer import Arrival, Delivery, arrive
from engines.wire_handoff import PrefixMark

NO_IDS = np.empty(0, dtype=np.int32)
# Pieces that are on their way in while more are asked for.
UNENTERED = 2


class Adopting:
    """`async with` it on the target, once `begun`. Pieces come in their order, each behind its tokens."""

    def __init__(self, core: EngineCore, terms: SharingTerms, arrival: Arrival) -> None:
        self.held_tokens = len(arrival.tokens)
        self.others_run = arrival.others_run
        self.entered = 0
        # Made when the manifest comes.
        self.marks: Marks | None = None
        self.core, self.terms, self.arrival = core, terms, arrival
        self._lane = terms.dock.lane(paired=True)
        self._pieces: list[StatePiece] = []
        # Checkpoints that come before the manifest.
        self._cuts = ComingCuts()
        # Pieces that are still to come, once the manifest is here.
        self._missing: int | None = None
        self._entering: deque[asyncio.Future[Any]] = deque()
        # Proofs that have not been told yet, of pieces among these.
        self._unproved: list[asyncio.Future[bytes]] = []
        self._done = False
        # Set on the core's thread: the slot is a generation's or an idle conversation's, and no move's any more.
        self._is_in = False

    async def __aenter__(self) -> Adopting:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._done:
            return
        # From here on nothing enters or goes on, whatever exchange is still under way: soon the slot is somebody else's.
        self._done = True
        for proof in self._unproved:
            proof.cancel()
        while self._entering:
            entering = self._entering.popleft()
            await asyncio.wait((entering,))
            if not entering.cancelled():
                entering.exception()  # looked at: all of it is thrown away
        # As they are now: `let_go` may have its turn before the core's thread does.
        aborted = partial(self._aborted, self._cuts, self.arrival)
        try:
            await self.terms.dock.perform(aborted)
        except EngineStopping:
            return  # the core has ended, and the slot with it

    def let_go(self) -> None:
        """Once all of it is in: what was told of it is kept no longer."""
        self._pieces, self._cuts = [], ComingCuts()
        self.arrival = Arrival(self.arrival.slot, [])

    def mark(self, name: str) -> None:
        """Notes the time of something in the pause."""
        if self.marks is not None:
            self.marks.note(name)

    @property
    def slot_id(self) -> int:
        return self.arrival.slot.index

    def _aborted(self, cuts: ComingCuts, arrival: Arrival, _cache: PrefixCache) -> Generator[None, None, None]:
        if self._is_in:
            return  # it was on its way in when the move was given up
        cuts.drop()
        yield from arrival.abort(self.terms.dock.codec)

    @property
    def tokens(self) -> list[int]:
        """Those whose blocks came in."""
        return self.arrival.tokens

    async def begin(self, delivery: Delivery, tokens: Sequence[int] = ()) -> None:
        """Returns while the piece is on its way in; most of those before it have entered then, and raise as a restore does.
        `tokens` are those of a block that comes before the manifest. Raises StateInvalid for one that cannot stand there."""
        if tokens:
            try:
                self._take_tokens(delivery.piece, tokens)
            except BaseException:
                delivery.free()
                raise
        self.enters(delivery)
        await self._entered(UNENTERED)

    def _take_tokens(self, piece: StatePiece, tokens: Sequence[int]) -> None:
        begin = len(self.arrival.tokens)
        require_blocks((piece,), begin, begin + len(tokens), self.terms.layout)
        _ids(tokens, self.core.loaded.vocabulary.size)
        self.arrival.tokens += tokens

    async def begin_cut(self, delivery: Delivery) -> None:
        """As `begin`, of a checkpoint that comes before the manifest. Raises StateInvalid for one that cannot."""
        cuts, codec, piece = self._cuts, self.terms.dock.codec, delivery.piece
        try:
            cuts.announce(piece, codec, self.core.config.context_tokens)
        except BaseException:
            delivery.free()
            raise

        def check() -> None:
            delivery.check()
            cuts.check(piece, codec, delivery.data)

        def enter(cache: PrefixCache) -> None:
            self.require_open()
            cuts.enter(cache, codec, piece, delivery.data)

        self._enters(delivery, check, enter)
        await self._entered(UNENTERED)

    def enters(self, delivery: Delivery) -> None:
        """As `begin`, of a piece behind the manifest; waits for nothing."""
        self._note(delivery.piece)
        self._enters(delivery, *self._entry(delivery))

    @contextmanager
    def enters_unproved(self, delivery: Delivery) -> Iterator[Callable[[bytes], None]]:
        """As `enters`, of a piece of a running generation whose proof is still to come, which the block tells what it gives. The
        piece enters meanwhile; nothing goes on with it before it is proved."""
        proof: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._unproved.append(proof)
        self.arrival.is_doubtful = True
        self._note(delivery.piece)
        check, enter = self._entry(delivery)
        entering = self._lane.submit(enter, first=check, quick=True)
        making = asyncio.ensure_future(self.terms.dock.in_thread(delivery.prove, memoryview(delivery.data.data)))
        self._entering.append(asyncio.ensure_future(self._proved(delivery, entering, making, proof)))
        try:
            yield lambda told: None if proof.done() else proof.set_result(told)
        finally:
            proof.cancel()  # of one that was told this does nothing

    async def _proved(
        self,
        delivery: Delivery,
        entering: asyncio.Future[None],
        making: asyncio.Future[bytes],
        proof: asyncio.Future[bytes],
    ) -> None:
        try:
            await asyncio.wait((entering, making))
        finally:
            delivery.free()
        making.add_done_callback(_looked_at)
        entering.result()
        made = making.result()
        replace(delivery, proof=await proof, prove=lambda _: made).check()
        self.mark(f"{delivery.piece.kind}_proved")

    def _note(self, piece: StatePiece) -> None:
        if self._missing is None:
            self._pieces.append(piece)
        else:
            self._missing -= 1

    def _entry(self, delivery: Delivery) -> tuple[Callable[[], None], Callable[[PrefixCache], None]]:
        """What checks a piece behind the manifest, and what takes it in."""
        arrival, codec, kind = self.arrival, self.terms.dock.codec, delivery.piece.kind
        # Before it nobody knows which block is the last one.
        behind_manifest = self._missing is not None

        def check() -> None:
            self.mark(f"{kind}_came")
            delivery.check()
            arrival.check(codec, delivery.piece, delivery.data)
            self.mark(f"{kind}_checked")

        def enter(cache: PrefixCache) -> None:
            self.require_open()
            arrival.enter(cache, codec, delivery.piece, delivery.data, completes=behind_manifest)
            self.mark(f"{kind}_entered")

        return check, enter

    def _enters(self, delivery: Delivery, check: Callable[[], None], enter: Callable[[PrefixCache], None]) -> None:
        entering = self._lane.submit(enter, first=check, quick=delivery.is_quick)
        entering.add_done_callback(lambda _: delivery.free())
        self._entering.append(entering)

    async def nearly_settled(self) -> None:
        """Returns when so little is on its way in that more may come. Raises what went wrong."""
        await self._entered(UNENTERED)

    async def settled(self) -> None:
        """Returns when all that came has entered. Raises what went wrong with it."""
        await self._entered(0)

    async def _entered(self, most_left: int) -> None:
        while len(self._entering) > most_left or (self._entering and self._entering[0].done()):
            await to_its_end(self._entering.popleft())
            self.entered += 1

    async def complete(self, manifest: Manifest, told: NDArray[np.int32] = NO_IDS) -> list[StatePiece]:
        """What the source's stop says, which is not longer for what came before it; `told`: its tokens, where they are at hand as
        an array. Returns the pieces that are still to come.

        Raises StateIncompatible, or StateInvalid when what came in is not how it begins.
        """
        await self.settled()
        Fingerprint.parse(self.terms.fingerprint).require(Fingerprint.parse(manifest.fingerprint))
        arrival, there = self.arrival, len(self.arrival.tokens)
        ids = _ids(manifest.tokens, self.core.loaded.vocabulary.size, told)
        # Whoever tells the blocks again that came, tells the same.
        again = there - manifest.before
        came = [piece for piece in self._pieces if piece.start >= manifest.before] if again else []
        others = [piece for piece in manifest.pieces if piece not in self._cuts.pieces]
        is_known = again >= 0 and list(manifest.tokens[:again]) == arrival.tokens[manifest.before :]
        if not is_known or others[: len(came)] != came:
            raise StateInvalid("The blocks that came in are not those that the state begins with.")
        if len(others) + len(self._cuts.pieces) != len(manifest.pieces):
            raise StateInvalid("Checkpoints came in that are not the state's.")
        if not manifest.count or not 0 <= (manifest.next_token or 0) < self.core.loaded.vocabulary.size:
            raise StateInvalid("The state has no tokens, or some beyond the vocabulary.")
        wanted = others[len(came) :]
        require_order(wanted, manifest.count, self.terms.layout, begin=there)

        def promise(_cache: PrefixCache) -> None:
            self.require_open()
            arrival.slot.awaited_cells = manifest.count - there

        # Nothing is on its way in that could look at them meanwhile.
        arrival.tokens += manifest.tokens[again:]
        arrival.ids, arrival.ids_from, self._missing = ids, manifest.before, len(wanted)
        # The pieces stand behind it, and fail with it.
        self._lane.submit(promise).add_done_callback(_looked_at)
        return wanted

    async def finish(self) -> None:
        """The idle conversation is in its slot. Raises StateInvalid when not everything came in."""
        self._require_came()
        # In the slice of the last piece.
        finishing = self._lane.submit(lambda cache: deque(self._finished_idle(cache), maxlen=0))
        finishing.add_done_callback(_looked_at)
        await self.settled()
        await to_its_end(finishing)

    async def require_all(self) -> None:
        """Raises StateInvalid when not everything came in."""
        await self.settled()
        self._require_came()

    def _require_came(self) -> None:
        if self._missing != 0:
            raise StateInvalid(f"{self._missing or 'The last'} pieces of the state did not come in.")

    def require_open(self) -> None:
        """Raises StateInvalid."""
        if self._done:
            raise StateInvalid("The move is over; nothing more of it is taken.")

    def require_whole(self) -> None:
        """Raises StateError, StateInvalid. On the core's thread."""
        self.require_open()
        sequence = self.arrival.slot.sequence
        if not sequence.tokens:
            # Its last block came before anybody knew that it was the last.
            self.terms.dock.codec.complete(sequence, self.arrival.tokens)
        if sequence.tokens != self.arrival.tokens:
            raise StateError("The engine lost the state while it came in.")

    def _finished_idle(self, cache: PrefixCache) -> Generator[None, None, None]:
        self.require_whole()
        yield from self.take_over(cache)

    def take_over(self, cache: PrefixCache) -> Generator[None, None, None]:
        """The slot is no move's any more. Nothing of it may fail: `require_whole` was asked in the same slice."""
        self._done = self._is_in = True
        yield from self.arrival.finish()
        self._cuts.join(cache, self.arrival.slot)


async def adopting(
    terms: SharingTerms,
    core: EngineCore,
    slot_id: int | Callable[[PrefixCache], int],
    expected_tokens: int,
    *,
    origin: Origin = NOBODY,
    marks: Sequence[PrefixMark] = (),
    sibling: Adopting | None = None,
) -> Adopting:
    """Takes and empties the slot, or the one that is chosen then, for a state of about so many tokens, `origin`'s. What another
    sequence of the same tenant holds of its beginning by `marks`, or a `sibling` that comes in too, is there already. Raises as
    `arrive`, and what the choice does."""

    def work(cache: PrefixCache) -> Generator[None, None, Arrival]:
        index = slot_id if isinstance(slot_id, int) else slot_id(cache)
        arrival = yield from arrive(cache, index, [0] * expected_tokens, erase_existing=True, origin=origin)
        beside = [] if sibling is None else [sibling.arrival]
        arrival.others_run = bool(cache.busy)
        arrival.tokens = lent_to(cache, terms.dock.codec, arrival, origin, marks, beside)
        return arrival

    def give_back(arrival: Arrival) -> Callable[[PrefixCache], Generator[None, None, Any]]:
        return lambda cache: arrival.abort(terms.dock.codec)

    return Adopting(core, terms, await terms.dock.take(work, give_back))


def _ids(tokens: Sequence[int], vocabulary_size: int, told: NDArray[np.int32] = NO_IDS) -> NDArray[np.int32]:
    """The tokens as an array, which may be at hand (`told`). Raises StateInvalid for some beyond the vocabulary."""
    if len(told) != len(tokens):
        try:
            told = np.frombuffer(array("i", tokens), dtype=np.int32)
        except OverflowError:
            raise StateInvalid("The state has tokens beyond all vocabularies.") from None
    if len(told) and not 0 <= told.min() <= told.max() < vocabulary_size:
        raise StateInvalid("The state has no tokens, or some beyond the vocabulary.")
    return told


def _looked_at(future: asyncio.Future[Any]) -> None:
    """What went wrong with it is told by those behind it."""
    if not future.cancelled():
        future.exception()
