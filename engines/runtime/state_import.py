"""A state on its way in, piece by piece: read by the event loop, proved by a thread, taken in by the core's thread."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Protocol

from engines.errors import DeadlineExceeded
from engines.rpc_exchange import MIN_BYTES_PER_S
from engines.runtime.prefix import PrefixCache
from engines.runtime.state_dock import Dock, to_its_end
from engines.runtime.state_forms import DIGEST_BYTES, ChunkReader
from engines.runtime.state_layout import Bytes
from engines.runtime.state_snapshot import StatePiece
from engines.runtime.state_transfer import Arrival, Delivery
from engines.runtime.state_whole import WholeState

# A sender that is silent for so long has gone: the slot must not wait for it.
STALL_S = 30.0


class PieceSource(Protocol):
    """Where pieces come from, in the manifest's order."""

    async def deliver(self, piece: StatePiece) -> Delivery: ...


class StreamPieces:
    """Pieces that are read out of a stream, each behind its digest."""

    def __init__(self, reader: ChunkReader, dock: Dock) -> None:
        self._reader, self._dock = reader, dock

    async def deliver(self, piece: StatePiece) -> Delivery:
        buffer = await self._dock.arena.take(piece.size_bytes)
        try:
            digest = await self._reader.read(DIGEST_BYTES)
            await self._reader.read_into(memoryview(buffer.data.data))
        except BaseException:
            buffer.free()
            raise
        return Delivery(piece, buffer.data, buffer.free, digest)


class WholePieces:
    """Pieces cut out of a whole state in memory."""

    def __init__(self, whole: WholeState, dock: Dock) -> None:
        self._whole, self._dock = whole, dock

    async def deliver(self, piece: StatePiece) -> Delivery:
        return Delivery(piece, await self._dock.in_thread(self._cut, piece), _nothing)

    def _cut(self, piece: StatePiece) -> Bytes:
        return self._whole.block(piece.start, piece.tokens) if piece.kind == "block" else self._whole.part()


def _nothing() -> None:
    """Memory that goes with its last reader."""


async def received(
    dock: Dock,
    arrival: Arrival,
    pieces: tuple[StatePiece, ...],
    source: PieceSource,
    complete: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Takes all pieces in, and gives the slot back with them once `complete`, where it is given, finds nothing wrong behind the
    last one; else that is the caller's (`arrival.finish(codec)`). Returns or raises only after nothing is under way any more; the
    first failure counts."""
    lane = dock.lane()
    under_way: deque[tuple[int, asyncio.Future[None]]] = deque()
    under_way_bytes = 0
    entering: asyncio.Future[None]
    try:
        for piece in pieces:
            while under_way and (
                under_way[0][1].done()
                or not dock.has_room(len(under_way), under_way_bytes + piece.size_bytes, coming_in=True)
            ):
                await to_its_end(under_way[0][1])
                under_way_bytes -= under_way.popleft()[0]
            delivery = await source.deliver(piece)
            # What nothing follows may be proved while it enters: the slot is nobody's before it is finished. Of a recurrent state
            # that was damaged nothing may stay, since the next one of its place begins by multiplying it by zero.
            is_last = piece is pieces[-1] and (piece.kind == "block" or (piece.kind == "part" and dock.codec.wipes))
            arrival.is_doubtful |= delivery.proof is not None and delivery.is_quick
            entering = lane.submit(
                partial(_enter, dock, arrival, delivery, completes=not is_last),
                first=partial(arrival.check, dock.codec, piece, delivery.data),
                beside=delivery.check,
                quick=delivery.is_quick,
                closing=not is_last and arrival.is_usable_with(piece),
            )
            entering.add_done_callback(partial(_free, delivery))
            under_way.append((piece.size_bytes, entering))
            under_way_bytes += piece.size_bytes
        if complete is not None:
            await complete()
            # In the slice of the last piece.
            under_way.append((0, lane.submit(partial(_finish, dock, arrival), closing=True)))
        while under_way:
            await to_its_end(under_way[0][1])
            under_way.popleft()
    finally:
        for _, entering in under_way:
            while not entering.done():
                await asyncio.wait((entering,))
            if not entering.cancelled():
                entering.exception()  # looked at: an earlier one is raised already
        # A future that was done already was not waited for: what is called at its end, which frees a piece, comes next.
        await asyncio.sleep(0)


def _enter(dock: Dock, arrival: Arrival, delivery: Delivery, cache: PrefixCache, *, completes: bool) -> None:
    """On the core's thread."""
    arrival.enter(cache, dock.codec, delivery.piece, delivery.data, completes=completes)


def _finish(dock: Dock, arrival: Arrival, _cache: PrefixCache) -> None:
    """On the core's thread."""
    deque(arrival.finish(dock.codec), maxlen=0)


def _free(delivery: Delivery, _entered: object) -> None:
    delivery.free()


async def with_patience(chunks: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """`chunks`, each of which must come within STALL_S, and all of them no slower than MIN_BYTES_PER_S. Raises
    DeadlineExceeded."""
    coming, spare_s = aiter(chunks), STALL_S
    while True:
        began = time.monotonic()
        try:
            async with asyncio.timeout(min(STALL_S, spare_s)):
                chunk = await anext(coming)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise DeadlineExceeded(
                f"The sender of the state was silent for {STALL_S:.0f} s, or slower than {MIN_BYTES_PER_S} bytes a second."
            ) from None
        # Only waiting counts: what the engine itself takes its time for is not the sender's.
        spare_s = max(0.0, spare_s - (time.monotonic() - began) + len(chunk) / MIN_BYTES_PER_S)
        yield chunk
