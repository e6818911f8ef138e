"""The target's side of a handoff: what comes in by ADOPT, ADOPT_BLOCK and ADOPT_REST, and who reads the answer from then on.

Blocks enter a slot while the source still decodes; with the last byte of ADOPT_REST the generation goes on here. Its pieces
wait for the one reader that continues the client's stream; without one in CLAIM_S it is ended. A source that falls silent
leaves nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Generator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

from engines.errors import (
    HandoffStale,
    HandoffUnknown,
    InvalidRequest,
    NoCellsFree,
    SlotBusy,
    StateInvalid,
    StateTooLarge,
)
from engines.rpc_exchange import Exchange
from engines.rpc_handoff import HEAD_LENGTH
from engines.runtime.fingerprint import Fingerprint
from engines.runtime.generation import Generation, Mailbox
from engines.runtime.handoff_shelf import Shelf, Shelves
from engines.runtime.origin import Origin
from engines.runtime.prefix import PrefixCache, Source
from engines.runtime.preparation import Preparation
from engines.runtime.state_adopt import Adopting, adopting
from engines.runtime.state_desk import StateDesk
from engines.runtime.state_forms import DIGEST_BYTES, checksum_of, digest_of
from engines.runtime.state_snapshot import MAX_MANIFEST_BYTES, Manifest, StatePiece
from engines.runtime.state_transfer import Delivery
from engines.wire_handoff import AdoptAnswer, AdoptBody, AdoptedAnswer, AskBody, BlockHead, ShelfOffer
from engines.wire_json import read_json

log = logging.getLogger("hydra.engine.handoff")

MOST_OPEN = 8
MOST_KNOWN = 256
MOST_FENCES = 4096
MAX_HEAD_BYTES = 4 << 20
# Between two exchanges of a move; a source in its stop goes on by itself sooner.
SILENCE_S = 10.0
CLAIM_S = 15.0
SLOT_TRIES = 3
OPEN, GOING, OVER = "open", "going", "over"


@dataclass(eq=False)
class Adopted:
    """One move towards this engine."""

    body: AdoptBody
    slot_id: int
    desk: ArrivingHandoffs
    adopting: Adopting
    shelf: Shelf | None = None
    manifest: Manifest | None = None
    awaited: list[StatePiece] = field(default_factory=list)
    """Once the manifest is here: the pieces that are still to come."""
    state: str = OPEN
    tokens: int = 0
    generation: Generation | None = None
    claimed: bool = False
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    timer: asyncio.TimerHandle | None = None
    leaving: asyncio.Task[None] | None = None
    at_work: asyncio.Lock = field(default_factory=asyncio.Lock)

    def reading(self, generations: Sequence[Generation]) -> AbstractAsyncContextManager[Generation]:
        """As `ArrivingHandoffs.reading`."""
        return self.desk.reading(self, generations)

    def settle(self, state: str) -> None:
        self.state = state
        self.settled.set()
        if self.leaving is not None and self.leaving is not asyncio.current_task():
            self.leaving.cancel()

    def answer(self) -> AdoptedAnswer:
        return AdoptedAnswer(self.state, self.tokens, self.adopting.entered)

    def unwatch(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class ArrivingHandoffs:
    """All moves towards this engine; used on its event loop."""

    def __init__(self, preparation: Preparation, desk: StateDesk) -> None:
        self._preparation, self._desk = preparation, desk
        self._known: OrderedDict[str, Adopted] = OrderedDict()
        self._fences: OrderedDict[str, int] = OrderedDict()
        self._ending: set[asyncio.Task[None]] = set()
        config = preparation.config
        self._shelves = Shelves(cuda_device=max(config.main_gpu, 0) if config.gpu_layers else None)
        self._mapping = asyncio.Lock()

    # --- what the source asks -------------------------------------------------------------------

    async def begin(self, body: AdoptBody, source_gone: asyncio.Event) -> AdoptAnswer:
        """ADOPT, over a connection whose end `source_gone` tells.

        Raises HandoffStale, SlotBusy (too many moves at once), NoCellsFree (no idle slot), StateIncompatible.
        """
        seen, former = self._fences.get(body.session, 0), self._known.get(body.handoff)
        if body.fence < seen or (body.fence == seen and (former is None or former.state == GOING)):
            raise HandoffStale(f"Move {body.fence} of the session is older than one that was seen here.")
        terms = await self._desk.terms()
        Fingerprint.parse(terms.fingerprint).require(Fingerprint.parse(body.fingerprint))
        self._make_room()
        self._fences[body.session] = body.fence
        self._fences.move_to_end(body.session)
        while len(self._fences) > MOST_FENCES:
            self._fences.popitem(last=False)
        for older in [one for one in self._known.values() if one.body.session == body.session and one.state == OPEN]:
            await self._abort(older)
        entry = await self._entry(body, await self._shelf(body.shelf))
        self._known[body.handoff] = entry
        self._watch(entry, SILENCE_S)
        entry.leaving = asyncio.ensure_future(self._left_alone(entry, source_gone))
        return AdoptAnswer(entry.slot_id, entry.shelf is not None, entry.adopting.held_tokens)

    async def _shelf(self, offer: ShelfOffer | None) -> Shelf | None:
        if offer is None:
            return None
        async with self._mapping:
            return await asyncio.to_thread(self._shelves.take, offer)

    async def _left_alone(self, entry: Adopted, source_gone: asyncio.Event) -> None:
        """Ends a move whose source has gone, unless it brought all before."""
        await source_gone.wait()
        if entry.state == OPEN and not entry.at_work.locked():
            log.info("handoff %s: its source has gone", entry.body.handoff)
            await self._abort(entry)

    def _make_room(self) -> None:
        if sum(entry.state == OPEN for entry in self._known.values()) >= MOST_OPEN:
            raise SlotBusy(f"{MOST_OPEN} moves come in already.")
        settled = [name for name, entry in self._known.items() if entry.state != OPEN]
        for name in settled[: max(0, len(self._known) - MOST_KNOWN + 1)]:
            del self._known[name]

    async def _entry(self, body: AdoptBody, shelf: Shelf | None) -> Adopted:
        core = self._preparation.core
        if body.expected_tokens > core.config.context_tokens:
            raise StateTooLarge(f"The state has {body.expected_tokens} tokens; the context holds fewer.")
        for tries_left in reversed(range(SLOT_TRIES)):
            slot_id: int | None = await core.perform(lambda cache: _free_slot(cache, body.raw_logits))
            if slot_id is None:
                raise NoCellsFree("Every slot of the engine works.")
            origin = Origin(body.tenant, body.session)
            terms = await self._desk.terms()
            try:
                taken = await adopting(terms, core, slot_id, body.expected_tokens, origin=origin, marks=body.marks)
            except SlotBusy:
                if not tries_left:
                    raise
                continue
            return Adopted(body, slot_id, self, taken, shelf, tokens=taken.held_tokens)
        raise AssertionError("unreachable: the last try returns or raises")

    async def block(self, exchange: Exchange) -> AdoptedAnswer:
        """ADOPT_BLOCK: a finished block of a generation that still runs elsewhere; behind the manifest any piece of it."""
        entry = self._open(exchange.head.key_text)
        async with self._working(entry):
            head = read_json(BlockHead, await _read_head(exchange, MAX_HEAD_BYTES), "a block's head")
            piece = StatePiece(head.kind, head.start, head.end, head.size_bytes)
            _require_expected(entry, head, piece)
            delivery = await self._came(entry, exchange, head, piece)
            await entry.adopting.begin(delivery, head.tokens)
            entry.tokens = max(entry.tokens, head.end)
            if entry.awaited:
                entry.awaited.pop(0)
            if entry.manifest is not None and not entry.awaited:
                await self._go_on(entry, entry.adopting, entry.manifest)
        return entry.answer()

    async def _came(self, entry: Adopted, exchange: Exchange, head: BlockHead, piece: StatePiece) -> Delivery:
        try:
            proof = bytes.fromhex(head.proof)
        except ValueError as error:
            raise StateInvalid("A block's proof is not hexadecimal.") from error
        if head.offset is None:
            if head.size_bytes != exchange.unread_bytes:
                raise StateInvalid("A block's head does not fit its bytes.")
            return await self._delivery(exchange, piece, proof)
        if entry.shelf is None:
            raise StateInvalid("A piece is said to lie on a shelf that was not taken.")
        data = entry.shelf.piece(head.offset, head.size_bytes)
        return Delivery(piece, data, _nothing, proof, checksum_of)

    async def rest(self, exchange: Exchange) -> AdoptedAnswer:
        """ADOPT_REST: the manifest, and all that is missing unless it follows by ADOPT_BLOCK. Behind the last the generation
        goes on."""
        entry = self._open(exchange.head.key_text)
        async with self._working(entry):
            await self._take_rest(entry, entry.adopting, exchange)
        if entry.state == GOING:
            log.info("handoff %s: %d tokens are here", entry.body.handoff, entry.tokens)
        return entry.answer()

    async def _take_rest(self, entry: Adopted, taken: Adopting, exchange: Exchange) -> None:
        if entry.manifest is not None:
            raise InvalidRequest("The manifest of the state came before.")
        manifest = Manifest.from_json(await _read_head(exchange, MAX_MANIFEST_BYTES), taken.tokens)
        running = manifest.generation
        if entry.body.idle != (running is None) or (
            running and (running.request_id, running.session) != (entry.body.request_id, entry.body.session)
        ):
            raise StateInvalid("The state is not of the generation that was announced.")
        awaited = await taken.complete(manifest)
        if not exchange.unread_bytes:
            # Its pieces follow one by one.
            entry.manifest, entry.awaited = manifest, awaited
        else:
            for piece in awaited:
                proof = bytearray(DIGEST_BYTES)
                await exchange.read_into(memoryview(proof))
                await taken.begin(await self._delivery(exchange, piece, bytes(proof)))
        if exchange.unread_bytes:
            raise StateInvalid("More bytes follow the end of the state.")
        if not entry.awaited:
            await self._go_on(entry, taken, manifest)

    async def _go_on(self, entry: Adopted, taken: Adopting, manifest: Manifest) -> None:
        """All is here. From now on the source may not know whether it was heard, and asks."""
        entry.tokens, running = len(manifest.tokens), manifest.generation
        if running is None:
            await taken.finish(manifest)
            entry.settle(GOING)
            return
        deadline_at = time.monotonic() + self._preparation.config.request_deadline_s
        generation = await taken.go_on(manifest, self._preparation.compiler, Mailbox(), deadline_at)
        generation.followed = True
        generation.continued = sent_text(generation, running.sent_bytes, self._preparation)
        entry.generation = generation
        entry.settle(GOING)
        self._watch(entry, CLAIM_S)

    async def _delivery(self, exchange: Exchange, piece: StatePiece, proof: bytes) -> Delivery:
        dock = (await self._desk.terms()).dock
        if not 0 < piece.size_bytes <= exchange.unread_bytes:
            raise StateInvalid(f"A piece is said to have {piece.size_bytes} bytes; {exchange.unread_bytes} are left.")
        if piece.size_bytes > dock.arena.size_bytes:
            raise StateTooLarge(f"A piece has {piece.size_bytes} bytes; here one may have {dock.arena.size_bytes}.")
        buffer = await dock.arena.take(piece.size_bytes)
        try:
            await exchange.read_into(memoryview(buffer.data.data))
        except BaseException:
            buffer.free()
            raise
        return Delivery(piece, buffer.data, buffer.free, proof, digest_of)

    async def ask(self, body: AskBody) -> AdoptedAnswer:
        """ADOPT_ASK. Raises HandoffUnknown, HandoffStale."""
        entry = self._known.get(body.handoff)
        if entry is None:
            raise HandoffUnknown("There is no such handoff here.")
        if entry.body.fence != body.fence:
            raise HandoffStale("The handoff was granted under another number.")
        if body.drop and entry.state == OPEN:
            await self._abort(entry)
        elif entry.state == OPEN and not entry.at_work.locked():
            # Its source has nothing to send yet, but is there.
            async with self._working(entry):
                if body.wait:
                    await entry.adopting.settled()
        return entry.answer()

    # --- one move -------------------------------------------------------------------------------

    def _open(self, handoff: str) -> Adopted:
        entry = self._known.get(handoff)
        if entry is None:
            raise HandoffUnknown("There is no such handoff here.")
        if entry.state != OPEN or self._fences.get(entry.body.session, 0) > entry.body.fence:
            raise HandoffStale("The handoff is over; nothing more of it is taken.")
        return entry

    @asynccontextmanager
    async def _working(self, entry: Adopted) -> AsyncIterator[None]:
        """One exchange of the move; any failure ends it."""
        if entry.at_work.locked():
            raise SlotBusy("Another part of the same handoff comes in.")
        async with entry.at_work:
            entry.unwatch()
            try:
                yield
            except BaseException:
                await self._abort(entry)
                raise
        if entry.state == OPEN:
            self._watch(entry, SILENCE_S)

    async def _abort(self, entry: Adopted) -> None:
        entry.unwatch()
        if entry.state == OVER:
            return
        if entry.generation is not None:
            self._preparation.core.cancel(entry.generation)
        entry.settle(OVER)
        entry.shelf = None
        await entry.adopting.__aexit__(None, None, None)

    def _watch(self, entry: Adopted, limit_s: float) -> None:
        entry.unwatch()
        entry.timer = asyncio.get_running_loop().call_later(limit_s, self._too_late, entry)

    def _too_late(self, entry: Adopted) -> None:
        entry.timer = None
        if entry.claimed or entry.at_work.locked():
            return
        log.warning("handoff %s: nobody went on with it", entry.body.handoff)
        task = asyncio.ensure_future(self._abort(entry))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    # --- who reads the answer -------------------------------------------------------------------

    def expected(self, handoff: str, request_id: str) -> Adopted:
        """The move that brings this request here. Raises HandoffUnknown."""
        entry = self._known.get(handoff)
        if entry is None or entry.body.idle or entry.body.request_id != request_id or entry.claimed:
            raise HandoffUnknown("No running request of that id comes here by such a handoff.")
        return entry

    @asynccontextmanager
    async def reading(self, entry: Adopted, generations: Sequence[Generation]) -> AsyncIterator[Generation]:
        """Waits until the generation goes on here; ends it when the block is left. Raises HandoffUnknown when it never does."""
        await entry.settled.wait()
        generation = entry.generation
        if entry.state != GOING or entry.claimed or generation is None or len(generations) != 1:
            raise HandoffUnknown("The request did not come here.")
        entry.claimed = True
        entry.unwatch()
        try:
            yield generation
        finally:
            self._preparation.core.cancel(generation)


async def _read_head(exchange: Exchange, most_bytes: int) -> bytes:
    length = bytearray(HEAD_LENGTH.size)
    await exchange.read_into(memoryview(length))
    (count,) = HEAD_LENGTH.unpack(length)
    if count > min(most_bytes, exchange.unread_bytes):
        raise StateInvalid(f"The payload's head is said to have {count} bytes.")
    head = bytearray(count)
    await exchange.read_into(memoryview(head))
    return bytes(head)


def _require_expected(entry: Adopted, head: BlockHead, piece: StatePiece) -> None:
    """Raises StateInvalid for a piece that cannot come now."""
    if entry.manifest is not None:
        if head.tokens or not entry.awaited or piece != entry.awaited[0]:
            raise StateInvalid("A piece is not the next one of the manifest.")
    elif head.kind != "block" or not 0 < piece.tokens == len(head.tokens):
        raise StateInvalid("A block's head does not fit its tokens.")


def _nothing() -> None:
    """Memory that its owner takes back."""


def _free_slot(cache: PrefixCache, raw_logits: bool) -> Generator[None, None, int | None]:
    yield from ()
    slot = cache.best_slot(Source(), raw_logits=raw_logits)
    if slot is None:
        slot = cache.best_slot(Source(), raw_logits=not raw_logits)
    return None if slot is None else slot.index


def sent_text(generation: Generation, sent_bytes: int, preparation: Preparation) -> str:
    """The text of its answer that was sent before it came here."""
    pieces = preparation.llama.vocabulary.pieces
    text = b"".join(pieces[token] for token in generation.tokens[len(generation.prompt) :])
    return text[:sent_bytes].decode("utf-8", "replace")
