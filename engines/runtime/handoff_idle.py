"""An idle conversation on its way to another engine: its manifest, then piece by piece, one leaving while another enters."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Generator, Sequence
from dataclasses import replace

from engines.errors import DeadlineExceeded, SlotBusy
from engines.rpc_handoff import ADOPT_PATIENCE_S
from engines.runtime.core import EngineCore
from engines.runtime.errands import Work
from engines.runtime.handoff_way import Way, require_going
from engines.runtime.prefix import PrefixCache
from engines.runtime.state_desk import StateDesk
from engines.runtime.state_export import ExportedPiece, ExportedState
from engines.runtime.state_forget import forget_moved
from engines.runtime.state_order import MAX_BLOCK_TOKENS
from engines.runtime.state_sizes import MIN_BLOCK_TOKENS, moved_block_tokens
from engines.runtime.state_snapshot import Manifest, StatePiece
from engines.runtime.state_terms import SharingTerms
from engines.wire_handoff import AdoptBody, HandoffAnswer

# Enough pieces that one enters while another leaves; each costs something besides its bytes.
PIECES, LEAST_PIECE_BYTES = 6, 5 << 20


class Clock:
    """What a move spent its time on."""

    def __init__(self) -> None:
        self._began_at = self._at = time.monotonic()
        self.phases_ms: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.phases_ms[name] = round(1000 * (now - self._at), 3)
        self._at = now

    @property
    def seconds(self) -> float:
        return round(time.monotonic() - self._began_at, 6)


class IdleMove:
    """One idle conversation's move. It gives up at `until` unless the last of it has gone."""

    def __init__(self, core: EngineCore, desk: StateDesk, way: Way, terms: SharingTerms, until: float) -> None:
        self._core, self._desk, self._way, self._terms, self._until = core, desk, way, terms, until

    async def run(
        self, body: AdoptBody, slot_id: int, tokens: Sequence[int], *, busy: bool
    ) -> tuple[HandoffAnswer, Work]:
        """The conversation of `tokens` is at the target then; the errand frees the slot that it had. `busy`: others run here, so
        pieces stay small. Raises SlotBusy where the slot has another one by now, as `StateDesk.export`, DeadlineExceeded, and
        what the target refuses with."""
        clock, way, terms = Clock(), self._way, self._terms
        adopting = asyncio.ensure_future(way.adopt(body))
        try:
            tokens_a_piece = 0 if busy else _piece_tokens(self._core, terms, body.expected_tokens)
            exporting = await self._desk.export(slot_id, block_tokens=tokens_a_piece, in_pieces=True)
        except BaseException:
            await asyncio.wait((adopting,))
            adopting.cancelled() or adopting.exception()  # looked at: the export's failure is what counts
            raise
        async with exporting as state:
            clock.lap("taken")
            await adopting
            clock.lap("adopted")
            if tuple(state.manifest.tokens) != tuple(tokens):
                raise SlotBusy("The slot has another conversation meanwhile.")
            manifest = _without_held(state, terms, way.held_tokens)
            await self._sent(state, manifest)
            state.left(way.sent_bytes)
            clock.lap("pieces")
        skipped = sum(piece.size_bytes for piece in manifest.pieces if _is_held(piece, way.held_tokens))
        answer = HandoffAnswer(
            kind="idle",
            tokens=len(manifest.tokens),
            sent_bytes=way.sent_bytes,
            skipped_bytes=skipped,
            total_bytes=manifest.total_bytes,
            seconds=clock.seconds,
            pause_ms=0.0,
            pause_steps=0.0,
            send_s=round(way.send_s, 6),
            way=way.name,
            phases_ms=clock.phases_ms,
        )
        moved = list(manifest.tokens)
        return answer, lambda cache: _emptied(cache, slot_id, moved)

    async def _sent(self, state: ExportedState, manifest: Manifest) -> None:
        terms, way = self._terms, self._way
        pieces = self._in_time(state.pieces(way.prove))
        if way.on_shelf:
            largest_bytes = max((room_of(terms, piece) for piece in state.manifest.pieces), default=0)
            require_going(await way.send_pieces(manifest, way.held_tokens, pieces, largest_bytes, _at_once))
        else:
            rest = state.manifest.pieces
            now = asyncio.get_running_loop().create_future()
            now.set_result(None)
            require_going(await way.send_rest(manifest, way.held_tokens, rest, pieces, ADOPT_PATIENCE_S, now))

    async def _in_time(self, pieces: AsyncIterator[ExportedPiece]) -> AsyncIterator[ExportedPiece]:
        async for exported in pieces:
            if time.monotonic() > self._until:
                exported.buffer.free()
                raise DeadlineExceeded("The move's time was up before the conversation's state had left.")
            yield exported


async def _at_once(_piece: ExportedPiece | None) -> None:
    """Nobody's next token waits."""


def _piece_tokens(core: EngineCore, terms: SharingTerms, tokens: int) -> int:
    token_bytes = terms.layout.attention.token_bytes
    wanted_bytes = max(LEAST_PIECE_BYTES, tokens * token_bytes // PIECES)
    count = moved_block_tokens(core.config, terms.layout)
    while count > MIN_BLOCK_TOKENS and count * token_bytes > wanted_bytes and not core.config.kv_block_tokens:
        count //= 2
    return count


def _is_held(piece: StatePiece, held_tokens: int) -> bool:
    return piece.kind == "block" and piece.end <= held_tokens


def _without_held(state: ExportedState, terms: SharingTerms, held_tokens: int) -> Manifest:
    """The manifest as it is sent; `state` then gives only what the target does not hold."""
    manifest = state.manifest
    if not held_tokens:
        return manifest
    count = len(manifest.tokens)
    size = max((piece.tokens for piece in manifest.pieces if piece.kind == "block"), default=MAX_BLOCK_TOKENS)
    held = [(at, min(at + MAX_BLOCK_TOKENS, held_tokens)) for at in range(0, held_tokens, MAX_BLOCK_TOKENS)]
    sent = [(at, min(at + size, count)) for at in range(held_tokens, count, size)]
    blocks = [StatePiece("block", start, end, terms.layout.block_bytes(end - start)) for start, end in [*held, *sent]]
    others = [piece for piece in manifest.pieces if piece.kind != "block"]
    state.manifest = replace(manifest, pieces=(*blocks[len(held) :], *others))
    return replace(manifest, pieces=(*blocks, *others))


def room_of(terms: SharingTerms, piece: StatePiece) -> int:
    """The bytes of the buffer that it is exported into."""
    return terms.dock.codec.capacity_bytes(piece.tokens) if piece.kind == "block" else piece.size_bytes


def _emptied(cache: PrefixCache, slot_id: int, tokens: list[int]) -> Generator[None, None, None]:
    """Frees a slot whose conversation is elsewhere now, unless something new has begun in it."""
    yield from ()
    slot = cache.slots[slot_id]
    if slot.idle and slot.sequence.tokens == tokens:
        origin = slot.sequence.origin
        slot.sequence.clear()
        cache.host.unlink(slot_id)
        forget_moved(cache, tokens, origin)
