"""A running generation on its way in from another engine: the other side of state_follow.py.

Blocks enter a slot that was taken for them while the other engine still decodes; the manifest of its stop, the rest of the
pieces and the generation itself come last. Until `go_on` has returned nothing here runs, and leaving early leaves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any

from engines.errors import EngineStopping, StateInvalid
from engines.runtime.constraint import ConstraintCompiler
from engines.runtime.core import EngineCore
from engines.runtime.fingerprint import Fingerprint
from engines.runtime.generation import Generation, Mailbox
from engines.runtime.prefix import PrefixCache
from engines.runtime.state_dock import to_its_end
from engines.runtime.state_order import require_order
from engines.runtime.state_snapshot import Manifest, StatePiece, resumed
from engines.runtime.state_terms import SharingTerms
from engines.runtime.state_transfer import Arrival, Delivery, arrive


class Adopting:
    """`async with` it on the target, once `begun`. Pieces come in their order, each behind its tokens."""

    def __init__(self, core: EngineCore, terms: SharingTerms, arrival: Arrival) -> None:
        self._core, self._terms, self._arrival = core, terms, arrival
        self._lane = terms.dock.lane()
        self._pieces: list[StatePiece] = []
        self._done = False

    async def __aenter__(self) -> Adopting:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._done:
            return
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
        self._arrival.tokens += tokens
        await self._enter(delivery)

    async def _enter(self, delivery: Delivery) -> None:
        arrival, codec = self._arrival, self._terms.dock.codec

        def check() -> None:
            delivery.check()
            arrival.check(codec, delivery.piece, delivery.data)

        def enter(cache: PrefixCache) -> None:
            arrival.enter(cache, codec, delivery.piece, delivery.data)

        try:
            await to_its_end(self._lane.submit(enter, first=check))
        finally:
            delivery.free()
        self._pieces.append(delivery.piece)

    async def complete(self, manifest: Manifest) -> list[StatePiece]:
        """What the source's stop says. Returns the pieces that are still to come, for `rest`.

        Raises StateIncompatible, or StateInvalid when what came in is not how it begins.
        """
        Fingerprint.parse(self._terms.fingerprint).require(Fingerprint.parse(manifest.fingerprint))
        tokens, there = list(manifest.tokens), len(self._arrival.tokens)
        require_order(manifest.pieces, len(tokens), self._terms.layout)
        if tokens[:there] != self._arrival.tokens or list(manifest.pieces[: len(self._pieces)]) != self._pieces:
            raise StateInvalid("The blocks that came in are not those that the state begins with.")

        def promise(cache: PrefixCache) -> Generator[None, None, None]:
            yield from ()
            self._arrival.tokens = tokens
            self._arrival.slot.awaited_cells = len(tokens) - there

        await self._terms.dock.perform(promise)
        return list(manifest.pieces[len(self._pieces) :])

    async def rest(self, delivery: Delivery) -> None:
        await self._enter(delivery)

    async def go_on(
        self, manifest: Manifest, compiler: ConstraintCompiler, mailbox: Mailbox, deadline_at: float
    ) -> Generation:
        """The generation, waiting in this engine's line with its state in a slot; its pieces go to `mailbox`.

        Raises StateInvalid when not everything came in, and what `resumed` and `EngineCore.submit` raise.
        """
        if len(self._pieces) != len(manifest.pieces):
            raise StateInvalid(f"{len(manifest.pieces) - len(self._pieces)} pieces of the state did not come in.")

        def work(cache: PrefixCache) -> Generator[None, None, Generation]:
            generation = resumed(manifest, self._core.loaded, compiler, mailbox, deadline_at)
            self._arrival.slot.sequence.origin = generation.origin
            yield from self._arrival.finish()
            self._done = True
            return generation

        generation: Generation = await self._terms.dock.perform(work)
        self._core.submit(generation)
        return generation


async def adopting(terms: SharingTerms, core: EngineCore, slot_id: int, expected_tokens: int) -> Adopting:
    """Takes and empties the slot for a state of about so many tokens. Raises as `arrive`."""

    def work(cache: PrefixCache) -> Generator[None, None, Arrival]:
        arrival = yield from arrive(cache, slot_id, [0] * expected_tokens, erase_existing=True)
        arrival.tokens = []
        return arrival

    def give_back(arrival: Arrival) -> Callable[[PrefixCache], Generator[None, None, Any]]:
        return lambda cache: arrival.abort(terms.dock.codec)

    return Adopting(core, terms, await terms.dock.take(work, give_back))
