"""The way of one move's pieces to its target: places on a shelf that both engines map, or bytes on the connection."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from types import TracebackType

from engines.errors import EngineError
from engines.rpc_handoff import ADOPT_PATIENCE_S, HEAD_LENGTH, HandoffClient
from engines.rpc_stream import Buffer as Bytes
from engines.runtime.arena import Buffer
from engines.runtime.handoff_shelf import Offering
from engines.runtime.state_export import ExportedPiece
from engines.runtime.state_forms import DIGEST_BYTES, Proof, checksum_of, digest_of
from engines.runtime.state_snapshot import Manifest, StatePiece
from engines.runtime.state_terms import SharingTerms
from engines.wire_handoff import AdoptBody, AdoptedAnswer, AskBody, BlockHead

log = logging.getLogger("hydra.engine.handoff")

# Longer than a target that does not answer any more may still read what was placed for it.
UNANSWERED_S = 15.0


class Way:
    """Begins with `adopt`. Leaving its block by an error ends the move at the target, unless it goes on there already."""

    def __init__(self, target: HandoffClient, terms: SharingTerms, handoff: str, fence: int) -> None:
        self.target = target
        self.on_shelf = False
        self.held_tokens = 0
        self.sent_bytes = 0
        self.send_s = 0.0
        self._terms, self._handoff, self._fence = terms, handoff, fence
        # Places of pieces that have not entered; of all that were sent the first `_entered` have.
        self._placed: deque[Buffer] = deque()
        self._entered = 0

    async def __aenter__(self) -> Way:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        heard = error is None or await self._drop()
        if heard:
            self._free(len(self._placed) + self._entered)
        else:
            # What is overwritten while it is read could pass the target's checks and be something else behind them.
            asyncio.get_running_loop().call_later(UNANSWERED_S, self._free, len(self._placed) + self._entered)

    async def _drop(self) -> bool:
        """True when nothing is read from the shelf any more."""
        try:
            await self.target.adopt_ask(AskBody(self._handoff, self._fence, drop=True))
        except EngineError as error:
            log.debug("handoff %s: the target could not be told to drop it: %s", self._handoff, error)
            return False
        return True

    async def adopt(self, body: AdoptBody) -> None:
        """Raises what the target refuses with."""
        with Offering(self._terms.dock.arena) as offer:
            answer = await self.target.adopt(replace(body, shelf=offer))
        self.on_shelf, self.held_tokens = answer.on_shelf, answer.held_tokens

    @property
    def prove(self) -> Proof:
        """What makes the pieces' proofs: who shares memory trusts each other, bytes on a line may be anybody's."""
        return checksum_of if self.on_shelf else digest_of

    @property
    def name(self) -> str:
        return "shelf" if self.on_shelf else "stream"

    async def alive(self) -> None:
        """Tells the target that there will be more."""
        await self.target.adopt_ask(AskBody(self._handoff, self._fence))

    async def send(self, exported: ExportedPiece, tokens: Sequence[int] = ()) -> AdoptedAnswer:
        """One piece, whose buffer is freed when it may be. `tokens` are a block's where the manifest has not gone yet."""
        began_at, piece, data = time.monotonic(), exported.piece, exported.data
        offset = exported.buffer.offset + data.ctypes.data - exported.buffer.data.ctypes.data
        place = offset if self.on_shelf else None
        proof = exported.proof.hex()
        head = BlockHead(piece.start, piece.end, data.nbytes, proof, tuple(tokens), piece.kind, place)
        if self.on_shelf:
            self._placed.append(exported.buffer)
            answer = await self.target.adopt_block(self._handoff, head)
            self._free(answer.entered)
        else:
            with exported.buffer:
                answer = await self.target.adopt_block(self._handoff, head, memoryview(data.data))
        self.sent_bytes += data.nbytes
        self.send_s += time.monotonic() - began_at
        return answer

    async def send_pieces(
        self,
        manifest: Manifest,
        known_tokens: int,
        pieces: AsyncIterator[ExportedPiece],
        largest_bytes: int,
        before_last: Callable[[ExportedPiece | None], Awaitable[None]],
    ) -> None:
        """The manifest, and one by one all that has not gone. `before_last` is asked before each, and before the manifest where
        nothing (None) follows it; the first leave their engine while the target reads what will come."""
        first = asyncio.ensure_future(anext(pieces, None))
        exported: ExportedPiece | None = None
        try:
            if not largest_bytes:
                await before_last(None)
            await self.send_manifest(manifest, known_tokens)
        except BaseException:
            await asyncio.wait((first,))
            if not first.cancelled() and first.exception() is None and (exported := first.result()) is not None:
                exported.buffer.free()
            raise
        exported = await first
        while exported is not None:
            try:
                await before_last(exported)
            except BaseException:
                exported.buffer.free()
                raise
            await self.send(exported)
            await self.make_room(largest_bytes)
            exported = await anext(pieces, None)

    async def send_manifest(self, manifest: Manifest, known_tokens: int) -> AdoptedAnswer:
        """What the state consists of; its pieces, as far as they have not gone, follow one by one."""
        head = _headed(manifest, known_tokens)
        return await self.target.adopt_rest(self._handoff, _parts(head), len(head), ADOPT_PATIENCE_S)

    async def send_rest(
        self,
        manifest: Manifest,
        known_tokens: int,
        rest: Sequence[StatePiece],
        exported: AsyncIterator[ExportedPiece],
        patience_s: float,
        before_last: asyncio.Future[None],
    ) -> None:
        """Manifest and `rest` in one exchange, whose last bytes wait for `before_last`."""
        began_at, head = time.monotonic(), _headed(manifest, known_tokens)
        rest_bytes = sum(piece.size_bytes for piece in rest)

        async def payload() -> AsyncIterator[Bytes]:
            if not rest:
                await before_last
            yield head
            async for one in exported:
                with one.buffer:
                    yield one.proof
                    if one.piece == rest[-1]:
                        await before_last
                    yield memoryview(one.data.data)

        total_bytes = len(head) + rest_bytes + DIGEST_BYTES * len(rest)
        await self.target.adopt_rest(self._handoff, payload(), total_bytes, patience_s)
        self.sent_bytes += rest_bytes
        self.send_s += time.monotonic() - began_at

    async def make_room(self, size_bytes: int) -> None:
        """Waits until the shelf has a place of `size_bytes`, or nothing of this way lies on it any more."""
        arena = self._terms.dock.arena
        while self._placed:
            if place := arena.take_now(size_bytes):
                place.free()
                return
            answer = await self.target.adopt_ask(AskBody(self._handoff, self._fence, wait=True))
            self._free(answer.entered)

    async def settled(self) -> None:
        """Returns when all that was placed has entered, so that nothing of this way lies on the shelf."""
        while self._placed:
            answer = await self.target.adopt_ask(AskBody(self._handoff, self._fence, wait=True))
            self._free(answer.entered)

    def _free(self, entered: int) -> None:
        while self._entered < entered and self._placed:
            self._placed.popleft().free()
            self._entered += 1


def _headed(manifest: Manifest, known_tokens: int) -> bytes:
    raw = manifest.to_json(known_tokens)
    return HEAD_LENGTH.pack(len(raw)) + raw


async def _parts(*parts: Bytes) -> AsyncIterator[Bytes]:
    for part in parts:
        yield part
