"""Where the pieces of a prefix's state are taken from when it is saved: the context, or a state in host memory.

Nothing is held meanwhile. The context's sequences go on, and what is wanted is looked for at each piece: whichever sequence
holds these tokens will do. A prefix that nobody holds any more ends the save (PrefixGone).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engines.errors import StateError
from engines.runtime.cells import Sequence
from engines.runtime.host_cache import HostEntry
from engines.runtime.origin import Origin
from engines.runtime.prefix import PrefixCache
from engines.runtime.state_dock import to_its_end
from engines.runtime.state_draft import DraftLook
from engines.runtime.state_export import planned_drafts
from engines.runtime.state_layout import Bytes
from engines.runtime.state_snapshot import StatePiece
from engines.runtime.state_terms import SharingTerms
from engines.runtime.state_transfer import DRAFT_KINDS
from engines.runtime.state_whole import WholeState
from engines.store.client import Writing

# So long before the room's end no piece is begun: it must be written within.
WRITE_MARGIN_S = 2.0


class PrefixGone(StateError):
    """Never seen by a client: the tokens were cut off or overwritten before they were saved."""

    code = "prefix_gone"


@dataclass(frozen=True)
class Prefix:
    """Tokens whose state is to be saved, and whose they are. `shared`: they are a system prompt and belong to no session.

    `beyond` are the tokens of a conversation that begins with them: its last piece is then saved whole, with more rows than
    these tokens have, and serves the conversation's other snapshots too.
    """

    tokens: list[int]
    origin: Origin
    shared: bool = False
    beyond: list[int] | None = None

    @property
    def rows(self) -> list[int]:
        return self.tokens if self.beyond is None else self.beyond

    @property
    def session(self) -> str:
        return "" if self.shared else self.origin.session


class PieceMaker(Protocol):
    """One prefix's pieces."""

    async def rest(self) -> tuple[StatePiece, ...]:
        """What there is beside attention rows: the last part of the state, and what a draft head holds."""

    async def fill(self, piece: StatePiece, writing: Writing) -> None:
        """Writes the piece into the room. Raises PrefixGone, LeaseLost, StateError."""


def held_by(cache: PrefixCache, prefix: Prefix, length: int) -> Iterator[Sequence]:
    """Sequences that begin with the first `length` tokens."""
    wanted = prefix.rows[:length]
    for sequence in (lender.sequence for lender in cache.lenders):
        mine = sequence.origin.tenant == prefix.origin.tenant and not sequence.spans
        if mine and len(sequence) >= length and sequence.tokens[:length] == wanted:
            yield sequence


def exact_holder(cache: PrefixCache, prefix: Prefix) -> Sequence | None:
    """A sequence whose state is just this prefix's now: between two steps a running one's is too."""
    length = len(prefix.tokens)
    return next((sequence for sequence in held_by(cache, prefix, length) if len(sequence) == length), None)


def part_in_host(cache: PrefixCache, prefix: Prefix) -> Bytes | None:
    """The recurrent state behind just this prefix, where a checkpoint gave its place up."""
    if cache.host.layout is None:
        return None
    mine = (e for e in cache.host if e.origin.tenant == prefix.origin.tenant and e.tokens == prefix.tokens)
    return next((entry.state.part for entry in mine if entry.state.part is not None), None)


class ContextPieces:
    """Out of the context, a slice of the core's thread each; only a checkpoint's state may have gone to host memory."""

    def __init__(self, terms: SharingTerms, prefix: Prefix) -> None:
        self._terms = terms
        self._prefix = prefix
        self._drafts: DraftLook | None = None

    async def rest(self) -> tuple[StatePiece, ...]:
        codec, prefix, count = self._terms.dock.codec, self._prefix, len(self._prefix.tokens)

        def look(cache: PrefixCache) -> Generator[None, None, tuple[int, DraftLook | None]]:
            yield from ()
            holder = exact_holder(cache, prefix)
            if holder is None:
                part = part_in_host(cache, prefix)
                if codec.layout.has_part and part is None:
                    raise PrefixGone("The prefix's last state is not there any more.")
                return 0 if part is None else part.nbytes, None
            drafts = codec.drafts.look(holder.draft, len(holder)) if codec.drafts else None
            return codec.part_bytes(holder) if codec.layout.has_part else 0, drafts

        part_bytes, drafts = await self._terms.dock.perform(look)
        pieces = [StatePiece("part", 0, count, part_bytes)] if part_bytes else []
        # A head's rows are few bytes; only where a conversation ends will anybody go on just there.
        if drafts is not None and codec.drafts is not None and prefix.beyond is None and not prefix.shared:
            self._drafts = drafts
            token_bytes = codec.drafts.layout.attention.token_bytes
            pieces += planned_drafts(drafts, codec.drafts, self._terms.block_tokens * token_bytes)
        return tuple(pieces)

    async def fill(self, piece: StatePiece, writing: Writing) -> None:
        dock = self._terms.dock
        room = np.frombuffer(writing.view, dtype=np.uint8)
        wanted = dock.codec.capacity_bytes(piece.tokens) if piece.kind == "block" else piece.size_bytes
        if wanted <= room.nbytes:
            await self._taken(piece, writing, room)
            return
        # llama.cpp also writes rows that then give way, for which the room is too small.
        with await dock.arena.take(wanted) as buffer:
            made = await self._taken(piece, writing, buffer.data)
            await dock.in_thread(_copy, writing, room, made)

    async def _taken(self, piece: StatePiece, writing: Writing, buffer: Bytes) -> Bytes:
        codec, prefix = self._terms.dock.codec, self._prefix
        tokens = prefix.rows[piece.start : piece.end]

        def take(cache: PrefixCache) -> int:
            writing.require_time(WRITE_MARGIN_S)
            if piece.kind == "block":
                holder = next(held_by(cache, prefix, piece.end), None)
            else:
                holder = exact_holder(cache, prefix)
                part = part_in_host(cache, prefix) if holder is None and piece.kind == "part" else None
                if part is not None and part.nbytes == piece.size_bytes:
                    buffer[: part.nbytes] = part
                    return part.nbytes
            if holder is None or (piece.kind in DRAFT_KINDS and not self._drafts_are_there(holder)):
                raise PrefixGone(f"Positions {piece.start} to {piece.end - 1} are not held any more.")
            if piece.kind == "block":
                return codec.take_block(holder, piece.start, piece.end, buffer)
            return (
                self._take_draft(holder, piece, buffer)
                if piece.kind in DRAFT_KINDS
                else codec.take_part(holder, buffer)
            )

        def finish(written: int) -> Bytes:
            writing.require_time()
            if piece.kind == "block":
                return codec.finished_block(buffer[:written], piece.start, tokens)
            if piece.kind == "draft" and codec.drafts is not None:
                return codec.drafts.finished_block(buffer[:written], piece.start, tokens)
            if piece.kind == "hidden":
                return buffer[:written]
            return codec.finished_part(buffer[:written], piece.end)

        made: Bytes = await to_its_end(self._terms.dock.lane().submit(take, then=finish))
        if made.nbytes != piece.size_bytes:
            raise StateError(f"A piece of the state has {made.nbytes} bytes, not {piece.size_bytes}.")
        return made

    def _drafts_are_there(self, holder: Sequence) -> bool:
        drafts = self._terms.dock.codec.drafts
        return drafts is not None and drafts.look(holder.draft, len(holder)) == self._drafts

    def _take_draft(self, holder: Sequence, piece: StatePiece, buffer: Bytes) -> int:
        drafts = self._terms.dock.codec.drafts
        assert drafts is not None
        assert holder.draft is not None
        if piece.kind == "draft":
            return drafts.take_block(holder.index, piece.start, piece.end, buffer)
        hidden = holder.draft.hidden().view(np.uint8).ravel()
        buffer[: hidden.nbytes] = hidden
        return hidden.nbytes


class EntryPieces:
    """Out of a state in host memory, on a thread: the core has no part in it."""

    def __init__(self, terms: SharingTerms, entry: HostEntry) -> None:
        self._terms = terms
        self._entry = entry
        self._whole: WholeState | None = None

    async def rest(self) -> tuple[StatePiece, ...]:
        if not self._terms.layout.has_part:
            return ()
        part: Bytes = await self._terms.dock.in_thread(self._part)
        return (StatePiece("part", 0, len(self._entry.tokens), part.nbytes),)

    async def fill(self, piece: StatePiece, writing: Writing) -> None:
        await self._terms.dock.in_thread(self._write, piece, writing)

    def _part(self) -> Bytes:
        part = self._entry.state.part
        if part is None:
            return self._read().part()
        self._terms.layout.check_part(part, len(self._entry.tokens))
        return part

    def _block(self, start: int, count: int) -> Bytes:
        entry, layout = self._entry, self._terms.layout
        if entry.state.whole is not None:
            return self._read().block(start, count)
        return entry.state.block(layout, entry.tokens, start, count)

    def _read(self) -> WholeState:
        """The one array of a state that was not cut."""
        if self._whole is None:
            whole = self._entry.state.whole
            assert whole is not None
            self._whole = WholeState.checked(self._terms.layout, self._entry.tokens, whole)
        return self._whole

    def _write(self, piece: StatePiece, writing: Writing) -> None:
        made = self._block(piece.start, piece.tokens) if piece.kind == "block" else self._part()
        room = np.frombuffer(writing.view, dtype=np.uint8)
        _copy(writing, room, made)
        self._terms.layout.forget_sequence(room, partial=piece.kind != "block")


def _copy(writing: Writing, room: Bytes, made: Bytes) -> None:
    writing.require_time(WRITE_MARGIN_S)
    if made.nbytes != room.nbytes:
        raise StateError(f"A piece of the state has {made.nbytes} bytes; there is room for {room.nbytes}.")
    room[:] = made
