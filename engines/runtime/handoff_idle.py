"""An idle conversation on its way to another engine: its manifest, then piece by piece, one leaving while another enters."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Generator
from dataclasses import replace

from engines.errors import DeadlineExceeded
from engines.rpc_handoff import ADOPT_PATIENCE_S
from engines.runtime.core import EngineCore
from engines.runtime.handoff_way import Way, require_going
from engines.runtime.prefix import PrefixCache
from engines.runtime.state_export import ExportedPiece, ExportedState
from engines.runtime.state_forget import forget_moved
from engines.runtime.state_order import MAX_BLOCK_TOKENS
from engines.runtime.state_sizes import MIN_BLOCK_TOKENS, blocks_bytes, moved_block_tokens
from engines.runtime.state_snapshot import Manifest, StatePiece
from engines.runtime.state_terms import SharingTerms
from engines.runtime.state_transfer import Departure, SlotLook
from engines.wire_handoff import AdoptBody, HandoffAnswer

# Enough pieces that one enters while another leaves; each costs something besides its bytes, most of all where two engines share
# a few cores. By a processor none takes more tokens than are brought in within a slice of an idle engine.
PIECES, LEAST_PIECE_BYTES = 6, 10 << 20
CPU_PIECE_BYTES, CPU_PIECE_TOKENS = 12 << 20, 8192


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
    """One idle conversation's move. It gives up at `until` unless the last of it has gone. `clock` began when the conversation
    was looked for."""

    def __init__(self, terms: SharingTerms, until: float, clock: Clock) -> None:
        self._terms, self._until, self._clock = terms, until, clock

    async def run(self, body: AdoptBody, state: ExportedState, way: Way) -> HandoffAnswer:
        """The conversation is at the target then, and the slot that it had is the caller's to free. Raises what keeps a state
        from leaving, DeadlineExceeded, and what the target refuses with."""
        clock, terms = self._clock, self._terms
        clock.lap("taken")
        await way.adopt(body)
        clock.lap("adopted")
        manifest = _planned_for(state, terms, way)
        await self._sent(state, manifest, way)
        state.left(way.sent_bytes)
        clock.lap("pieces")
        held_bytes = blocks_bytes(terms.layout, manifest.before, MAX_BLOCK_TOKENS)
        return HandoffAnswer(
            kind="idle",
            tokens=manifest.count,
            sent_bytes=way.sent_bytes,
            skipped_bytes=held_bytes,
            total_bytes=held_bytes + manifest.total_bytes,
            seconds=clock.seconds,
            pause_ms=0.0,
            pause_steps=0.0,
            send_s=round(way.send_s, 6),
            way=way.name,
            phases_ms=clock.phases_ms,
        )

    async def _sent(self, state: ExportedState, manifest: Manifest, way: Way) -> None:
        pieces, ids = self._in_time(state.pieces(way.prove, paired=way.on_shelf)), state.departure.ids
        if way.on_shelf:
            largest_bytes = max((room_of(self._terms, piece) for piece in state.manifest.pieces), default=0)
            require_going(await way.send_pieces(manifest, pieces, largest_bytes, _at_once, ids))
        else:
            rest = state.manifest.pieces
            now = asyncio.get_running_loop().create_future()
            now.set_result(None)
            require_going(await way.send_rest(manifest, rest, pieces, ADOPT_PATIENCE_S, now))

    async def _in_time(self, pieces: AsyncIterator[ExportedPiece]) -> AsyncIterator[ExportedPiece]:
        async for exported in pieces:
            if time.monotonic() > self._until:
                exported.buffer.free()
                raise DeadlineExceeded("The move's time was up before the conversation's state had left.")
            yield exported


async def _at_once(_piece: ExportedPiece | None) -> None:
    """Nobody's next token waits."""


def piece_tokens(core: EngineCore, terms: SharingTerms, look: SlotLook) -> int:
    """Tokens of a block; 0 while others run here, when blocks are the engine's own, small ones."""
    if look.others_run:
        return 0
    token_bytes = terms.layout.attention.token_bytes
    wanted_bytes = max(LEAST_PIECE_BYTES, len(look.tokens) * token_bytes // PIECES)
    count = moved_block_tokens(core.config, terms.layout)
    if not (core.config.gpu_layers or core.config.kv_block_tokens):
        while 2 * count <= CPU_PIECE_TOKENS and 2 * count * token_bytes <= CPU_PIECE_BYTES:
            count *= 2
    while count > MIN_BLOCK_TOKENS and count * token_bytes > wanted_bytes and not core.config.kv_block_tokens:
        count //= 2
    return count


def _planned_for(state: ExportedState, terms: SharingTerms, way: Way) -> Manifest:
    """The manifest as it is sent, of what the target does not hold, which is all that `state` then gives; in blocks as they suit
    it."""
    manifest, held_tokens = state.manifest, way.held_tokens
    count = manifest.count
    size = max((piece.tokens for piece in manifest.pieces if piece.kind == "block"), default=MAX_BLOCK_TOKENS)
    if not held_tokens and not (way.others_run and size > terms.block_tokens):
        return manifest
    size = min(size, terms.block_tokens) if way.others_run else size
    sent = [(at, min(at + size, count)) for at in range(held_tokens, count, size)]
    blocks = [StatePiece("block", start, end, terms.layout.block_bytes(end - start)) for start, end in sent]
    others = [piece for piece in manifest.pieces if piece.kind != "block"]
    state.manifest = replace(
        manifest, tokens=manifest.tokens[held_tokens:], pieces=(*blocks, *others), before=held_tokens
    )
    return state.manifest


def room_of(terms: SharingTerms, piece: StatePiece) -> int:
    """The bytes of the buffer that it is exported into."""
    return terms.dock.codec.capacity_bytes(piece.tokens) if piece.kind == "block" else piece.size_bytes


def emptied(cache: PrefixCache, departure: Departure) -> Generator[None, None, None]:
    """Gives back a slot whose conversation is elsewhere now, and frees it."""
    yield from departure.end()
    slot, tokens = departure.slot, departure.look.tokens
    if slot.idle and slot.sequence.tokens == tokens:
        origin = slot.sequence.origin
        slot.sequence.clear()
        cache.host.unlink(slot.index)
        forget_moved(cache, tokens, origin)
