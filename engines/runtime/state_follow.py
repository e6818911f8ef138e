"""A running generation on its way to another engine: its finished blocks leave while it goes on, the rest behind a stop.

The source keeps the generation until `commit_together` (state_together.py): whatever fails before, it goes on there as if nothing
had been. The stop is fenced by a number that whoever moves the generation was granted, and it does not last: without a word in
STOP_LIMIT_S the generation goes on, and a commit that comes later is refused. Once the last of it is about to leave (`hold`) no
clock decides any more, since the target may go on with it; once it is known to (`is_there`) nothing lets the generation go on
here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType

from engines.errors import EngineStopping, SlotBusy, StateError, StateHasImages
from engines.runtime.arena import Buffer
from engines.runtime.checkpoint_pieces import held_cuts
from engines.runtime.core import EngineCore
from engines.runtime.generation import Generation, Piece
from engines.runtime.handoff_marks import Marks
from engines.runtime.prefix import PrefixCache
from engines.runtime.slots import Slot
from engines.runtime.state_codec import StateCodec
from engines.runtime.state_dock import Lane, to_its_end
from engines.runtime.state_export import ExportedPiece, planned
from engines.runtime.state_forget import forget_moved
from engines.runtime.state_forms import Proof, checksum_of, is_quick
from engines.runtime.state_layout import Bytes
from engines.runtime.state_order import MAX_CHECKPOINTS
from engines.runtime.state_snapshot import VERSION, Manifest, StatePiece, captured, require_tellable
from engines.runtime.state_terms import SharingTerms
from engines.runtime.state_transfer import Departure, slot_look

log = logging.getLogger("hydra.engine.state")

STOP_LIMIT_S = 10.0
# Pieces behind the stop that leave the context while one before them is sent.
REST_AHEAD = 3


@dataclass(frozen=True, eq=False)
class _Coming:
    """A piece on its way out of the context."""

    piece: StatePiece
    buffer: Buffer
    future: asyncio.Future[tuple[Bytes, bytes]]
    prove_later: Callable[[Bytes], asyncio.Future[bytes]] | None = None

    async def done(self) -> ExportedPiece:
        try:
            data, proof = await to_its_end(self.future)
        except BaseException:
            self.buffer.free()
            raise
        return ExportedPiece(self.piece, self.buffer, data, proof, self.prove_later(data) if self.prove_later else None)

    async def dropped(self) -> None:
        await asyncio.wait((self.future,))
        if not self.future.cancelled():
            self.future.exception()  # looked at: nobody wants the piece any more
        self.buffer.free()


class Leaving:
    """`async with` it on the source. Leaving the block without a commit lets the generation go on here, unless `is_there`: the
    target is known to go on with it."""

    def __init__(self, core: EngineCore, terms: SharingTerms, generation: Generation, fence: int) -> None:
        self.is_there = self._is_told = False
        # Made at the stop.
        self.marks: Marks | None = None
        # Blocks that the other engine has: it held them, or they left before the stop.
        self._gone: list[StatePiece] = []
        # Checkpoints that left before the stop.
        self._cuts: list[StatePiece] = []
        self._core, self.terms, self.generation, self.fence = core, terms, generation, fence
        self._departure: Departure | None = None
        self._manifest: Manifest | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._resuming: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Leaving:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._resume()
        if self._resuming is not None:
            await asyncio.wait((self._resuming,))

    # --- while it goes on -----------------------------------------------------------------------

    @property
    def sent_tokens(self) -> int:
        """The rows of the first so many tokens are at the other engine."""
        return self._gone[-1].end if self._gone else 0

    @property
    def sent_bytes(self) -> int:
        """Of these rows' blocks."""
        return sum(piece.size_bytes for piece in self._gone)

    def skip(self, tokens: int) -> None:
        """The other engine holds so many first tokens."""
        layout, count = self.terms.layout, self.terms.block_tokens
        ends = [(start, min(start + count, tokens)) for start in range(0, tokens, count)]
        self._gone = [StatePiece("block", start, end, layout.block_bytes(end - start)) for start, end in ends]

    async def unsent_tokens(self) -> int:
        """Tokens whose rows are still to be sent; 0 while the generation is in no slot, as when it had to give way."""

        def look(cache: PrefixCache) -> Generator[None, None, int]:
            yield from ()
            slot = self._slot(cache)
            return len(slot.sequence) - self.sent_tokens if slot else 0

        return int(await self.terms.dock.perform(look))

    async def is_under_way(self) -> bool:
        """Whether it runs, waits or has its prompt brought in; False once it has ended."""

        def look(cache: PrefixCache) -> Generator[None, None, bool]:
            yield from ()
            return self._slot(cache) is not None or self._core.stands_in_line(self.generation)

        return bool(await self.terms.dock.perform(look))

    async def finished_blocks(self, prove: Proof = checksum_of) -> AsyncIterator[ExportedPiece]:
        """The blocks that are full by now and have not left yet, also while the prompt is computed; the caller must free their
        buffers."""
        count, lane = self.terms.block_tokens, self.terms.dock.lane()
        while await self.unsent_tokens() >= count:
            yield await self._next_block(lane, count, prove)

    async def begun_block(self, prove: Proof = checksum_of) -> ExportedPiece | None:
        """What there is by now of the block that is not full yet, so that the stop leaves hardly any rows. As `finished_blocks`,
        behind which this is asked for."""
        count = min(await self.unsent_tokens(), self.terms.block_tokens)
        return await self._next_block(self.terms.dock.lane(), count, prove) if count > 0 else None

    async def _next_block(self, lane: Lane, count: int, prove: Proof) -> ExportedPiece:
        start = self.sent_tokens
        piece = StatePiece("block", start, start + count, self.terms.layout.block_bytes(count))
        exported = await self._exported(lane, piece, prove)
        self._gone.append(piece)
        return exported

    async def unsent_cuts(self) -> list[StatePiece]:
        """Its checkpoints that have not left, the shortest first: a recurrent state cannot go back without them. While its prompt
        makes more of them only the first, since of the others some will give way."""
        if self.terms.layout.recurrent is None:
            return []

        def look(cache: PrefixCache) -> Generator[None, None, list[StatePiece]]:
            yield from ()
            slot = self._slot(cache)
            if slot is None:
                return []
            found = held_cuts(cache, self.terms.dock.codec, slot.sequence)
            if any(cut > len(slot.sequence) for cut in self.generation.cuts):
                found = found[:1]
            return [StatePiece("checkpoint", 0, one.length, one.size_bytes) for one in found]

        gone = {piece.end for piece in self._cuts}
        found: list[StatePiece] = await self.terms.dock.perform(look)
        return [piece for piece in found if piece.end not in gone][: MAX_CHECKPOINTS - len(gone)]

    async def cut(self, piece: StatePiece, prove: Proof = checksum_of) -> ExportedPiece | None:
        """One of `unsent_cuts`, whose buffer the caller must free; None where it has given way."""
        dock, codec = self.terms.dock, self.terms.dock.codec
        buffer = await dock.arena.take(piece.size_bytes)

        def take(cache: PrefixCache) -> Bytes | None:
            slot = self._slot(cache)
            for one in () if slot is None else held_cuts(cache, codec, slot.sequence):
                if (one.length, one.size_bytes) == (piece.end, piece.size_bytes):
                    return buffer.data[: one.take(codec, buffer.data)]
            return None

        def finished(taken: Bytes | None) -> tuple[Bytes, bytes] | None:
            if taken is None:
                return None
            part = codec.finished_part(taken, piece.end)
            return part, prove(memoryview(part.data))

        try:
            done = await to_its_end(dock.lane().submit(take, then=finished, quick=is_quick(prove)))
        except BaseException:
            buffer.free()
            raise
        if done is None:
            buffer.free()
            return None
        self._cuts.append(piece)
        return ExportedPiece(piece, buffer, *done)

    async def _exported(self, lane: Lane, piece: StatePiece, prove: Proof) -> ExportedPiece:
        coming = self._begun(lane, piece, prove, await self.terms.dock.arena.take(self._room_of(piece)))
        return await coming.done()

    def _room_of(self, piece: StatePiece) -> int:
        return self.terms.dock.codec.capacity_bytes(piece.tokens) if piece.kind == "block" else piece.size_bytes

    def _begun(self, lane: Lane, piece: StatePiece, prove: Proof, buffer: Buffer, *, late: bool = False) -> _Coming:
        codec, is_late = self.terms.dock.codec, late and piece.kind == "part"
        then = _unproved if is_late else prove
        future = lane.submit(
            lambda cache: self._take(cache, codec, piece, buffer.data),
            then=lambda taken: self._finished(codec, piece, then, taken),
            quick=is_quick(prove),
        )
        return _Coming(piece, buffer, future, partial(self._proof, prove) if is_late else None)

    def _proof(self, prove: Proof, data: Bytes) -> asyncio.Future[bytes]:
        return asyncio.ensure_future(self.terms.dock.in_thread(prove, memoryview(data.data)))

    def _take(self, cache: PrefixCache, codec: StateCodec, piece: StatePiece, buffer: Bytes) -> Bytes:
        if self._departure is not None:
            self.mark(f"{piece.kind}_taken")
            return self._departure.take(codec, piece, buffer)
        slot = self._slot(cache)
        if slot is None or len(slot.sequence) < piece.end:
            # It has ended or gave way; whoever moves the session looks again what is held of it.
            raise SlotBusy("The generation lost its slot while its state left.")
        return buffer[: codec.take_block(slot.sequence, piece.start, piece.end, buffer)]

    def _finished(self, codec: StateCodec, piece: StatePiece, prove: Proof, taken: Bytes) -> tuple[Bytes, bytes]:
        if self._departure is not None:
            self.mark(f"{piece.kind}_copied")
            finished = self._departure.finished(codec, piece, prove, taken)
            self.mark(f"{piece.kind}_proved")
            return finished
        block = codec.finished_block(taken, piece.start, self.generation.tokens[piece.start : piece.end])
        return block, prove(memoryview(block.data))

    def mark(self, name: str) -> None:
        """Notes the time of something in the pause."""
        if self.marks is not None:
            self.marks.note(name)

    def _slot(self, cache: PrefixCache) -> Slot | None:
        """Where it runs; None when it has ended, or waits for a slot again."""
        return next((slot for slot in cache.slots if slot.generation is self.generation), None)

    # --- the stop -------------------------------------------------------------------------------

    def watched(self, manifest: Manifest) -> None:
        """Behind `stopped`: from here on its time runs."""
        self._manifest = manifest
        self._watch = asyncio.get_running_loop().call_later(STOP_LIMIT_S, self._stopped_too_long)

    def stopped(self, cache: PrefixCache) -> Generator[None, None, Manifest]:
        """Takes the generation out of its slot, on the core's thread. Raises SlotBusy, and StateError for what cannot travel."""
        yield from ()
        terms, generation, slot = self.terms, self.generation, self._slot(cache)
        if slot is None or not slot.decoding or slot.transfer:
            raise SlotBusy(
                "The generation has ended, waits for a slot or computes its prompt; it moves while it writes."
            )
        if generation.spans:
            raise StateHasImages("The conversation shows images, whose state stays here.")
        self.marks = Marks()
        self._core.write_text()
        require_tellable(generation.siblings or (generation,))
        look, sent = slot_look(cache, terms.dock.codec, slot, holds_still=True), self.sent_tokens
        cuts = tuple((piece.end, piece.size_bytes) for piece in sorted(self._cuts, key=lambda piece: piece.end))
        there = replace(look, checkpoints=cuts)
        drafts = terms.dock.codec.drafts
        # The longer the conversation the more the target knows of it: what is left to be told is not longer for that.
        pieces = planned(there, terms.layout, terms.block_tokens, checkpoints=True, drafts=drafts, start=sent)
        slot.generation, slot.transfer = None, "export"
        self._departure = Departure(slot, look, {})
        return Manifest(
            terms.fingerprint, terms.model_name, terms.model_sha256, tuple(look.tokens[sent:]), pieces,
            generation.tokens[-1], captured(generation), VERSION, before=sent,
        )  # fmt: skip

    def hold(self) -> None:
        """The last of it is about to leave: from here on only who knows how the target took it may let the generation go on here.
        Raises StateError when it does already."""
        if self._watch is None or self._resuming is not None:
            raise StateError("The generation was stopped for too long and goes on here.")
        self.unwatch()

    @property
    def unsent_pieces(self) -> list[StatePiece]:
        """Those of the stop's manifest that did not leave before it."""
        return [piece for piece in self._manifest.pieces if piece.kind != "checkpoint"] if self._manifest else []

    async def rest(self, prove: Proof = checksum_of, *, late: bool = False) -> AsyncGenerator[ExportedPiece, None]:
        """The pieces of the stop's manifest that `finished_blocks` did not give; the caller must free their buffers, and close
        this (`aclosing`): some more are on their way out where there is room for them. `late`: the last part, which is large, may
        be given before its proof is made."""
        if self._manifest is None:
            raise StateError("The generation has not been stopped.")
        lane, arena = self.terms.dock.lane(), self.terms.dock.arena
        left, coming = deque(self.unsent_pieces), deque[_Coming]()
        try:
            while left or coming:
                while left and len(coming) < REST_AHEAD:
                    room = self._room_of(left[0])
                    buffer = arena.take_now(room) if coming else await arena.take(room)
                    if buffer is None:
                        break
                    coming.append(self._begun(lane, left.popleft(), prove, buffer, late=late))
                yield await coming.popleft().done()
        finally:
            for one in coming:
                await one.dropped()

    # --- one of two ends --------------------------------------------------------------------------

    def ended(self, cache: PrefixCache) -> Generator[None, None, None]:
        """The generation has moved, and its slot is free."""
        yield from ()
        if self._departure is None:
            return
        slot, self._departure = self._departure.slot, None
        slot.transfer = ""
        tokens, origin = slot.sequence.tokens, slot.sequence.origin
        slot.sequence.clear()
        forget_moved(cache, tokens, origin)
        self._core.end_moved(self.generation, is_told=self._is_told)

    def tell_moved(self) -> None:
        """Whoever reads the answer here hears at once that it goes on elsewhere, and reads on there: the core's thread may have
        others' steps to take before it comes to free the slot. On the event loop, of a generation that stands in none."""
        if not self._is_told:
            self._is_told, generation = True, self.generation
            stats = generation.stats(time.monotonic())
            ids = generation.unposted()
            generation.mailbox.put(Piece(generation.choice, finish_reason="moved", stats=stats, token_ids=ids))

    def require_stopped(self) -> None:
        """Raises StateError."""
        if self._departure is None:
            raise StateError("The generation was not stopped, or goes on here again.")

    async def _resume(self) -> None:
        self.unwatch()
        try:
            await self.terms.dock.perform(self.ended if self.is_there else self.resumed)
        except EngineStopping as error:
            self.end_with_engine(error)

    def end_with_engine(self, error: EngineStopping) -> None:
        """It stands in no slot and no line, so nobody else would end it."""
        if self._departure is None:
            return
        self._departure = None
        generation, stats = self.generation, self.generation.stats(time.monotonic())
        if self.is_there:
            self.tell_moved()
        else:
            generation.mailbox.put(Piece(generation.choice, error=error, stats=stats))

    def resumed(self, cache: PrefixCache) -> Generator[None, None, None]:
        """The generation goes on here, if it was stopped."""
        yield from ()
        if self._departure is not None:
            slot, self._departure = self._departure.slot, None
            slot.transfer = ""
            slot.begin(self.generation)

    def _stopped_too_long(self) -> None:
        log.warning("a generation was stopped for a move that did not end in %.0f s; it goes on here", STOP_LIMIT_S)
        self._watch = None
        self._resuming = asyncio.ensure_future(self._resume())

    def unwatch(self) -> None:
        """No clock ends the stop any more."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None


def _unproved(_data: memoryview) -> bytes:
    return b""
