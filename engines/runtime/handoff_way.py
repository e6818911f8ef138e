"""The way of one move's pieces to its target: places on a shelf that both engines map, or bytes on the connection."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from engines.errors import EngineError, GenerationStays, HandoffStale, ProtocolBroken, StateError
from engines.rpc_handoff import ADOPT_PATIENCE_S, HEAD_LENGTH, HandoffClient
from engines.rpc_stream import Buffer as Bytes
from engines.runtime.arena import Buffer
from engines.runtime.handoff_shelf import Offering
from engines.runtime.state_dock import to_its_end
from engines.runtime.state_export import ExportedPiece
from engines.runtime.state_forms import DIGEST_BYTES, Proof, checksum_of, digest_of
from engines.runtime.state_snapshot import Manifest, StatePiece
from engines.runtime.state_terms import SharingTerms
from engines.wire_handoff import (
    FORM,
    NO_PLACE,
    PLACE_BYTES,
    PLACE_OFFSET,
    PLACE_PROOF_BYTES,
    PLACES,
    AdoptBody,
    AdoptedAnswer,
    AskBody,
    BlockHead,
)

log = logging.getLogger("hydra.engine.handoff")

# Longer than a target that does not answer any more may still read what was placed for it.
UNANSWERED_S = 15.0
# On the shelf behind one exchange: a processor's caches still hold most of it when the target reads it. A card reads memory, so
# that there the shelf's room is the only bound: an exchange for each piece of 42 MB took as long as the pieces did.
PLACED_BYTES = 24 << 20


class Way:
    """Begins with `adopt`. Leaving its block by an error ends the move at the target, also where a generation goes on there
    already: by then it goes on at its source. Once `is_there` the target keeps it, whatever else fails."""

    def __init__(self, target: HandoffClient, terms: SharingTerms, handoff: str, fence: int) -> None:
        self.target = target
        self.on_shelf = self.others_run = False
        self.is_there = False
        self.held_tokens = 0
        self.sent_bytes = 0
        self.send_s = 0.0
        self._terms, self._handoff, self._fence = terms, handoff, fence
        # Places of pieces that have not entered; of all that were sent the first `_entered` have.
        self._placed: deque[Buffer] = deque()
        self._entered = 0
        self._sent_cuts = 0
        # Whatever ends the move early lets a generation that runs go on at its source.
        self._runs = False

    async def __aenter__(self) -> Way:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        heard = error is None or self.is_there or await self._drop()
        if heard:
            self._free(len(self._placed) + self._entered)
        else:
            # What is overwritten while it is read could pass the target's checks and be something else behind them.
            asyncio.get_running_loop().call_later(UNANSWERED_S, self._free, len(self._placed) + self._entered)

    async def _drop(self) -> bool:
        """True when nothing is read from the shelf any more."""
        try:
            await self.target.adopt_ask(AskBody(self._handoff, self._fence, drop=True, resumed=self._runs))
        except EngineError as error:
            log.debug("handoff %s: the target could not be told to drop it: %s", self._handoff, error)
            return False
        return True

    async def adopt(self, body: AdoptBody) -> None:
        """Raises GenerationStays where the target is of another version, and what it refuses with."""
        self._runs = not body.idle
        with Offering(self._terms.dock.arena) as offer:
            answer = await self.target.adopt(replace(body, shelf=offer))
        if answer.form != FORM:
            raise GenerationStays(
                f"The target runs another version: it takes moves of form {answer.form}, this engine makes form {FORM}."
            )
        self.on_shelf, self.held_tokens, self.others_run = answer.on_shelf, answer.held_tokens, answer.others_run

    @property
    def prove(self) -> Proof:
        """What makes the pieces' proofs: who shares memory trusts each other, bytes on a line may be anybody's."""
        return checksum_of if self.on_shelf else digest_of

    @property
    def name(self) -> str:
        return "shelf" if self.on_shelf else "stream"

    @property
    def copies_by_card(self) -> bool:
        """Whether pieces lie in page-locked memory, which cards read and write beside the processors."""
        return self._terms.dock.arena.pinned

    async def alive(self) -> None:
        """Tells the target that there will be more."""
        answer = await self.target.adopt_ask(AskBody(self._handoff, self._fence))
        if answer.state == "over":
            raise HandoffStale("The target has given the move up.")

    async def send(self, exported: ExportedPiece, tokens: Sequence[int] = ()) -> AdoptedAnswer:
        """One block of `tokens`, or a checkpoint, while the manifest has not gone yet; its buffer is freed when it may be."""
        began_at, piece, data = time.monotonic(), exported.piece, exported.data
        place = _offset(exported) if self.on_shelf else None
        proof = exported.proof.hex()
        head = BlockHead(piece.start, piece.end, data.nbytes, proof, tuple(tokens), place, piece.kind)
        if self.on_shelf:
            self._placed.append(exported.buffer)
            answer = await self.target.adopt_block(self._handoff, head)
            self._free(answer.entered)
        else:
            with exported.buffer:
                answer = await self.target.adopt_block(self._handoff, head, memoryview(data.data))
        self._sent_cuts += piece.kind == "checkpoint"
        self.sent_bytes += data.nbytes
        self.send_s += time.monotonic() - began_at
        return answer

    async def send_pieces(
        self,
        manifest: Manifest,
        pieces: AsyncIterator[ExportedPiece],
        largest_bytes: int,
        before_last: Callable[[ExportedPiece | None], Awaitable[None]],
        ids: NDArray[np.int32] | None = None,
    ) -> AdoptedAnswer:
        """On a shelf: the manifest and the places of all that has not gone, each as soon as its piece is there, in exchanges
        between which room is made. `before_last` is asked before each piece, and before the manifest where nothing (None)
        follows it; the first leave their engine while the manifest is written down. `ids`: all tokens, where they are at hand as
        an array. Returns the last exchange's answer."""
        began_at, first = time.monotonic(), asyncio.ensure_future(anext(pieces, None))
        placing = _Placing(self, pieces, first, len(manifest.pieces) - self._sent_cuts, largest_bytes, before_last)
        try:
            # The core's thread is at the first pieces then.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            if not placing.left:
                await before_last(None)
            head = _headed(manifest, ids)
            while True:
                places = placing.announced
                total_bytes = len(head) + places * PLACE_BYTES
                async with aclosing(placing.payload(head, places)) as payload:
                    answer = await self.target.adopt_rest(self._handoff, payload, total_bytes, ADOPT_PATIENCE_S)
                self._free(answer.entered)
                if not placing.left:
                    break
                await self.make_room(largest_bytes)
                head = HEAD_LENGTH.pack(0)
        finally:
            await placing.drop_first()
        self.send_s += time.monotonic() - began_at
        return answer

    def place(self, exported: ExportedPiece) -> bytes:
        """Leaves a piece on the shelf until it has entered. Returns what tells the target where; its proof is to follow."""
        self._placed.append(exported.buffer)
        self.sent_bytes += exported.data.nbytes
        return PLACE_OFFSET.pack(_offset(exported))

    def has_room(self, size_bytes: int) -> bool:
        """Whether a place of `size_bytes` can be had at once, or nothing of this way lies on the shelf."""
        place = self._terms.dock.arena.take_now(size_bytes) if self._placed else None
        if place is not None:
            place.free()
        return place is not None or not self._placed

    async def send_rest(
        self,
        manifest: Manifest,
        rest: Sequence[StatePiece],
        exported: AsyncIterator[ExportedPiece],
        patience_s: float,
        before_last: Awaitable[None],
    ) -> AdoptedAnswer:
        """Manifest and `rest` in one exchange, whose last bytes wait for `before_last`."""
        began_at, head = time.monotonic(), _headed(manifest)
        rest_bytes = sum(piece.size_bytes for piece in rest)

        async def payload() -> AsyncGenerator[Bytes, None]:
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
        # A target that refuses leaves the exchange in the middle of a piece, whose buffer must not wait for a collector.
        async with aclosing(payload()) as sent:
            answer = await self.target.adopt_rest(self._handoff, sent, total_bytes, patience_s)
        self.sent_bytes += rest_bytes
        self.send_s += time.monotonic() - began_at
        return answer

    async def make_room(self, size_bytes: int) -> None:
        """Waits until the shelf has a place of `size_bytes`, or nothing of this way lies on it any more."""
        while not self.has_room(size_bytes):
            await self._entering()

    async def awaited(self) -> None:
        """Returns when whoever continues the stream waits at the target for its first piece, or does not come."""
        self._note(await self.target.adopt_ask(AskBody(self._handoff, self._fence, reader=True)))

    async def rehearse(self, rows: int) -> int:
        """Returns when all that was sent has entered, and the target has tried what its first step will be like, of so many rows
        a choice, where that is of use; or how many tokens more must have been written before it can tell (0: tried)."""
        answer = await self.target.adopt_ask(AskBody(self._handoff, self._fence, rehearse_rows=rows))
        self._note(answer)
        return answer.again_after_tokens

    async def settled(self) -> None:
        """Returns when all that was placed has entered, so that nothing of this way lies on the shelf."""
        while self._placed:
            await self._entering()

    async def _entering(self) -> None:
        """Waits for what is on its way in at the target. Raises HandoffStale when the move has ended there."""
        self._note(await self.target.adopt_ask(AskBody(self._handoff, self._fence, wait=True)))

    def _note(self, answer: AdoptedAnswer) -> None:
        self._free(answer.entered)
        if answer.state == "over":
            raise HandoffStale("The target has given the move up.")

    def _free(self, entered: int) -> None:
        while self._entered < entered and self._placed:
            self._placed.popleft().free()
            self._entered += 1


class _Placing:
    """The pieces of one `send_pieces`: `left` of them lie on no shelf yet, the `first` is under way."""

    def __init__(
        self,
        way: Way,
        pieces: AsyncIterator[ExportedPiece],
        first: asyncio.Future[ExportedPiece | None],
        left: int,
        largest_bytes: int,
        before_last: Callable[[ExportedPiece | None], Awaitable[None]],
    ) -> None:
        self.left = left
        self._way, self._pieces, self._largest_bytes, self._before_last = way, pieces, largest_bytes, before_last
        self._first: asyncio.Future[ExportedPiece | None] | None = first

    @property
    def announced(self) -> int:
        """Places in the next exchange."""
        return min(PLACES, self.left)

    async def payload(self, head: bytes, places: int) -> AsyncGenerator[Bytes, None]:
        """One exchange. It ends early, with places that are none, where the shelf is full."""
        yield head
        placed_bytes = 0
        for count in range(places):
            if self._is_enough(placed_bytes) or not self._way.has_room(self._largest_bytes):
                yield (PLACE_OFFSET.pack(NO_PLACE) + bytes(PLACE_PROOF_BYTES)) * (places - count)
                return
            exported = await self._next()
            placed_bytes += exported.data.nbytes
            self.left -= 1
            place, proof = self._way.place(exported), exported.proof
            if exported.proving is not None:
                # It enters while its proof is made on both sides; without that the target does not go on.
                yield place
                place, proof = b"", await to_its_end(exported.proving)
            await self._before_last(exported)
            yield place + proof

    def _is_enough(self, placed_bytes: int) -> bool:
        """Unless an exchange more would bring hardly anything."""
        if self._way.copies_by_card:
            return False
        return placed_bytes >= PLACED_BYTES and self.left * self._largest_bytes > PLACED_BYTES

    async def _next(self) -> ExportedPiece:
        first, self._first = self._first, None
        exported = await (anext(self._pieces, None) if first is None else first)
        if exported is None:
            raise StateError("The state has fewer pieces than its manifest says.")
        return exported

    async def drop_first(self) -> None:
        """Frees the piece that was under way before anybody asked for it, should nobody have."""
        first, self._first = self._first, None
        if first is None:
            return
        await asyncio.wait((first,))
        if not first.cancelled() and first.exception() is None and (exported := first.result()) is not None:
            exported.buffer.free()


def require_going(answer: AdoptedAnswer) -> None:
    """Of the last exchange. Raises ProtocolBroken for a target that says anything else than that the conversation is there."""
    if answer.state != "going":
        raise ProtocolBroken(
            f"The target has all of the conversation and does not go on with it: it is {answer.state}."
        )


def _offset(exported: ExportedPiece) -> int:
    """Where the piece lies in the arena."""
    return exported.buffer.offset + exported.data.ctypes.data - exported.buffer.data.ctypes.data


def _headed(manifest: Manifest, ids: NDArray[np.int32] | None = None) -> bytes:
    """The manifest without its tokens; then these: many numbers, read much faster so."""
    raw = replace(manifest, tokens=()).to_json()
    numbers = np.asarray(manifest.tokens if ids is None else ids[manifest.before :], dtype="<i4").tobytes()
    return HEAD_LENGTH.pack(len(raw)) + raw + HEAD_LENGTH.pack(len(numbers)) + numbers
