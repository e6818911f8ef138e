"""A slot's state on its way out, piece by piece: taken by the core's thread, checked and proved by another, sent by the
caller."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from types import TracebackType

from engines.errors import EngineError
from engines.runtime.arena import Arena, Buffer
from engines.runtime.state_dock import Dock, Lane, to_its_end
from engines.runtime.state_draft import DraftCodec, DraftLook
from engines.runtime.state_forms import DIGEST_BYTES, Proof, checksum_of, digest_of, is_quick, stream_head
from engines.runtime.state_layout import Bytes, StateLayout
from engines.runtime.state_metrics import StateMetrics
from engines.runtime.state_order import MAX_BLOCK_TOKENS
from engines.runtime.state_sizes import block_ends
from engines.runtime.state_snapshot import Manifest, StatePiece
from engines.runtime.state_transfer import Departure, SlotLook
from engines.runtime.state_whole import WholeState, v2_head

# In which a state that lies in memory whole is handed on.
SLICE_BYTES = 4 << 20


@dataclass(frozen=True)
class StateMeta:
    """What a slot holds. `n_past` tokens have state; `state_bytes` is the exact length of `export(slot, form)`, 0 if empty.

    `operation` is export or restore while `is_transferring`, else empty. `fingerprint` is what a receiving engine must share;
    it and `model_sha256` are empty until the model's file was read once.
    """

    slot_id: int
    n_past: int
    state_bytes: int
    is_processing: bool
    is_transferring: bool
    operation: str
    model_name: str
    model_sha256: str
    fingerprint: str
    form: str = "stream"


def planned(
    look: SlotLook,
    layout: StateLayout,
    block_tokens: int,
    *,
    checkpoints: bool,
    last_tokens: int = 0,
    drafts: DraftCodec | None = None,
    start: int = 0,
) -> tuple[StatePiece, ...]:
    """The pieces of a slot's state in the order in which they travel, its blocks as by `block_ends` from `start` on."""
    count = len(look.tokens)
    pieces = []
    for end in block_ends(start, count, block_tokens, last_tokens):
        pieces.append(StatePiece("block", start, end, layout.block_bytes(end - start)))
        start = end
    if layout.has_part:
        pieces.append(StatePiece("part", 0, count, look.part_bytes))
    if checkpoints:
        pieces += [StatePiece("checkpoint", 0, cut, size_bytes) for cut, size_bytes in look.checkpoints]
    if drafts is not None and look.draft is not None:
        pieces += planned_drafts(look.draft, drafts, block_tokens * layout.attention.token_bytes)
    return tuple(pieces)


def planned_drafts(look: DraftLook, drafts: DraftCodec, block_bytes: int) -> list[StatePiece]:
    """A draft context's rows are few bytes a token, so that its blocks have more tokens."""
    block_tokens = min(max(1, block_bytes // drafts.layout.attention.token_bytes), MAX_BLOCK_TOKENS)
    pieces = []
    for start in range(look.start, look.end, block_tokens):
        end = min(start + block_tokens, look.end)
        pieces.append(StatePiece("draft", start, end, drafts.layout.block_bytes(end - start)))
    pieces.append(StatePiece("hidden", look.first, look.last, (look.last - look.first) * drafts.row_bytes))
    return pieces


def total_bytes(manifest: Manifest, layout: StateLayout, form: str) -> int:
    """The exact length of a state in that form."""
    if form == "stream":
        return len(stream_head(manifest)) + manifest.total_bytes + DIGEST_BYTES * len(manifest.pieces)
    part_bytes = sum(piece.size_bytes for piece in manifest.pieces if piece.kind == "part")
    whole = layout.whole_bytes(len(manifest.tokens), part_bytes) if manifest.tokens else 0
    return whole + (len(v2_head(list(manifest.tokens))) if form == "v2" else 0)


@dataclass(frozen=True, eq=False)
class ExportedPiece:
    """One piece, its bytes in the buffer that must be freed, and their digest, empty as long as it is being made."""

    piece: StatePiece
    buffer: Buffer
    data: Bytes
    proof: bytes
    proving: asyncio.Future[bytes] | None = None


@dataclass(frozen=True, eq=False)
class _Leaving:
    """A piece on its way into `buffer`."""

    piece: StatePiece
    buffer: Buffer
    coming: asyncio.Future[tuple[Bytes, bytes]]

    async def dropped(self) -> None:
        """Waits until nobody uses the buffer, and frees it."""
        await asyncio.wait((self.coming,))
        if not self.coming.cancelled():
            self.coming.exception()  # looked at: nobody asks for this piece any more
        self.buffer.free()


class ExportedState:
    """A state on its way out. `async with` it: leaving the block gives the slot back, also after a broken connection.

    Iterating yields buffers that stay valid until the next one is asked for; together they are `total_bytes` long. It may be
    iterated again from the start: the slot holds still, so the bytes are the same.
    """

    def __init__(
        self, meta: StateMeta, manifest: Manifest, dock: Dock, departure: Departure, metrics: StateMetrics
    ) -> None:
        self.meta = meta
        self.manifest = manifest
        self.total_bytes = meta.state_bytes
        self._dock = dock
        self.departure = departure
        self._metrics = metrics
        self._under_way: deque[_Leaving] = deque()
        self._under_way_bytes = 0
        self._early: _Leaving | None = None
        self._began_at = time.monotonic()
        self._sent_bytes = 0
        self.has_left = False
        # That of the piece which was begun before anybody asked for some.
        self._lane: Lane | None = None

    @property
    def arena(self) -> Arena:
        """Where the pieces' buffers lie, for other processes of this host."""
        return self._dock.arena

    async def __aenter__(self) -> ExportedState:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._drop_pieces()
        if not self.has_left:
            await self._dock.perform(lambda cache: self.departure.end())
        complete = error is None and self._sent_bytes >= self.total_bytes
        outcome = "ok" if complete else error.code if isinstance(error, EngineError) else "broken_off"
        self._metrics.transfers.labels("export", outcome).inc()
        self._metrics.bytes.labels("export").inc(self._sent_bytes)
        if complete:
            self._metrics.seconds.labels("export").observe(time.monotonic() - self._began_at)

    async def __aiter__(self) -> AsyncIterator[memoryview]:
        buffers = self._stream() if self.meta.form == "stream" else self._whole()
        async for buffer in buffers:
            self._sent_bytes += len(buffer)
            yield buffer

    async def pieces(self, prove: Proof = digest_of, *, paired: bool = False) -> AsyncIterator[ExportedPiece]:
        """Each piece; the caller must free its buffer. `paired`: another engine of this machine takes them in meanwhile."""
        lane, waiting = self._lane, deque(self.manifest.pieces)
        if lane is not None and paired and prove is checksum_of and self._under_way[0].piece == waiting[0]:
            waiting.popleft()
        else:
            await self._drop_pieces()
            lane = self._dock.lane(paired=paired)
        self._lane = None
        self._begin_early(lane, prove)
        while True:
            while waiting and self._has_room(waiting[0]) and await self._begin(lane, waiting[0], prove):
                waiting.popleft()
            if not self._under_way:
                if not waiting:
                    return
                await self._drop_early()  # it held what the next block needs
                continue
            leaving = self._under_way[0]
            data, proof = await to_its_end(leaving.coming)
            self._drop_first()
            yield ExportedPiece(leaving.piece, leaving.buffer, data, proof)

    def begin(self) -> None:
        """The first piece leaves, if there is room for it, before it is known whether it is wanted: for `pieces` of a pair, by
        checksum."""
        first = self.manifest.pieces[0]
        if self._dock.codec.queues or self._under_way or self.arena.path is None:
            return
        buffer = self.arena.take_now(self._room_of(first))
        if buffer is not None:
            self._lane = self._dock.lane(paired=True)
            self._go(self._leaving(self._lane, first, buffer, checksum_of))

    def left(self, sent_bytes: int) -> None:
        """All that was wanted of `pieces` has gone, as its metrics tell then; the slot is the caller's to give back."""
        self._sent_bytes, self.total_bytes = sent_bytes, sent_bytes
        self.has_left = True

    def _has_room(self, piece: StatePiece) -> bool:
        return self._dock.has_room(len(self._under_way), self._under_way_bytes + piece.size_bytes)

    def _begin_early(self, lane: Lane, prove: Proof) -> None:
        """A card copies the last part, which is large, before the blocks: it is proved while they are copied."""
        part = next((piece for piece in self.manifest.pieces[1:] if piece.kind == "part"), None)
        if part is not None and self._dock.codec.queues:
            buffer = self._dock.arena.take_now(part.size_bytes)
            self._early = self._leaving(lane, part, buffer, prove) if buffer else None

    async def _begin(self, lane: Lane, piece: StatePiece, prove: Proof) -> bool:
        """False when there is no buffer for it. Waits for one only where none is held, or transfers could wait in a ring."""
        if self._early is not None and self._early.piece is piece:
            self._go(self._early)
            self._early = None
            return True
        arena, wanted = self._dock.arena, self._room_of(piece)
        holds = self._under_way or self._early is not None
        buffer = arena.take_now(wanted) if holds else await arena.take(wanted)
        if buffer is None:
            return False
        self._go(self._leaving(lane, piece, buffer, prove))
        return True

    def _go(self, leaving: _Leaving) -> None:
        self._under_way.append(leaving)
        self._under_way_bytes += leaving.piece.size_bytes

    def _drop_first(self) -> _Leaving:
        leaving = self._under_way.popleft()
        self._under_way_bytes -= leaving.piece.size_bytes
        return leaving

    def _room_of(self, piece: StatePiece) -> int:
        return self._dock.codec.capacity_bytes(piece.tokens) if piece.kind == "block" else piece.size_bytes

    def _leaving(self, lane: Lane, piece: StatePiece, buffer: Buffer, prove: Proof) -> _Leaving:
        codec, departure = self._dock.codec, self.departure
        coming = lane.submit(
            lambda cache: departure.take(codec, piece, buffer.data),
            then=partial(departure.finished, codec, piece, prove),
            quick=is_quick(prove),
        )
        return _Leaving(piece, buffer, coming)

    async def _stream(self) -> AsyncIterator[memoryview]:
        yield memoryview(stream_head(self.manifest))
        async for exported in self.pieces():
            with exported.buffer:
                yield memoryview(exported.proof)
                yield memoryview(exported.data.data)

    async def _whole(self) -> AsyncIterator[memoryview]:
        tokens = list(self.manifest.tokens)
        whole = WholeState.blank(self._dock.codec.layout, tokens, self.departure.look.part_bytes)
        async for exported in self.pieces():
            piece = exported.piece
            with exported.buffer:
                if piece.kind == "block":
                    await self._dock.in_thread(whole.put_block, piece.start, piece.tokens, exported.data)
                else:
                    whole.put_part(exported.data)
        if self.meta.form == "v2":
            yield memoryview(v2_head(tokens))
        view = memoryview(whole.data.data)
        for at in range(0, len(view), SLICE_BYTES):
            yield view[at : at + SLICE_BYTES]

    async def _drop_pieces(self) -> None:
        """Waits for what is under way, whose buffers are in use until then."""
        while self._under_way:
            await self._drop_first().dropped()
        await self._drop_early()

    async def _drop_early(self) -> None:
        if self._early is not None:
            early, self._early = self._early, None
            await early.dropped()
