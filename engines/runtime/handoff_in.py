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
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from engines.errors import (
    EngineError,
    EngineStopping,
    HandoffStale,
    HandoffUnknown,
    SlotBusy,
    StateInvalid,
    StateTooLarge,
)
from engines.rpc_exchange import Exchange
from engines.runtime.fingerprint import Fingerprint
from engines.runtime.generation import Generation, Piece
from engines.runtime.handoff_choices import Making, gone_on, making_of, unmade
from engines.runtime.handoff_entry import (
    GOING,
    OPEN,
    OVER,
    Adopted,
    free_slot,
    read_head,
    read_piece,
    require_expected,
    require_form,
)
from engines.runtime.handoff_rest import take_rest
from engines.runtime.handoff_shelf import Shelves, SourceShelves
from engines.runtime.origin import Origin
from engines.runtime.prefix import PrefixCache
from engines.runtime.preparation import Preparation
from engines.runtime.state_adopt import Adopting, adopting
from engines.runtime.state_desk import StateDesk
from engines.runtime.state_dock import Dock
from engines.runtime.state_forms import checksum_of
from engines.runtime.state_snapshot import Manifest, StatePiece
from engines.runtime.state_together import rehearse_together
from engines.runtime.state_transfer import Delivery
from engines.wire_handoff import FORM, AdoptAnswer, AdoptBody, AdoptedAnswer, AskBody, BlockHead
from engines.wire_json import read_json

log = logging.getLogger("hydra.engine.handoff")

MOST_OPEN = 8
MOST_KNOWN = 256
MOST_FENCES = 4096
MAX_HEAD_BYTES = 4 << 20
# Between two exchanges of a move; a source in its stop goes on by itself sooner.
SILENCE_S = 10.0
CLAIM_S = 15.0


class ArrivingHandoffs:
    """All moves towards this engine; used on its event loop."""

    def __init__(self, preparation: Preparation, desk: StateDesk) -> None:
        self._preparation, self._desk = preparation, desk
        self._known: OrderedDict[str, Adopted] = OrderedDict()
        self._fences: OrderedDict[str, int] = OrderedDict()
        self._ending: set[asyncio.Task[None]] = set()
        config = preparation.config
        device = max(config.main_gpu, 0) if config.gpu_layers else None
        self._shelves = SourceShelves(Shelves(cuda_device=device))
        self._metrics = preparation.core.metrics.handoffs
        # Moves that are no entries yet.
        self._beginning = 0

    # --- what the source asks -------------------------------------------------------------------

    async def begin(self, body: AdoptBody, source_gone: asyncio.Event) -> AdoptAnswer:
        """ADOPT, over a connection whose end `source_gone` tells.

        Raises HandoffStale, GenerationStays (a source of another version), SlotBusy (too many moves at once), NoCellsFree (no
        idle slot), StateIncompatible, and what a form is refused with.
        """
        first = self._open(body.of) if body.of else None
        if first is None:
            self._require_newest(body)
        elif (first.body.fence, first.body.session, first.first) != (body.fence, body.session, None):
            raise HandoffStale("The move that this one is a part of was granted under another number.")
        require_form(body)
        terms = await self._desk.terms()
        Fingerprint.parse(terms.fingerprint).require(Fingerprint.parse(body.fingerprint))
        if first is not None:
            return await self._begun(body, source_gone, first)
        self._beginning += 1
        try:
            await self._fenced(body)
            return await self._begun(body, source_gone, None)
        finally:
            self._beginning -= 1

    async def _begun(self, body: AdoptBody, source_gone: asyncio.Event, first: Adopted | None) -> AdoptAnswer:
        shelf = await self._shelves.take(body.shelf)
        if (form := body.constraint) is not None and first is None:
            # It takes a while, and the source's stop must not wait for it.
            await self._preparation.run(lambda: self._preparation.compiler.compile(form))
        entry = await self._entry(body, first)
        if self._fences.get(body.session, 0) > body.fence:
            await self._dropped(entry)
            raise HandoffStale("A later move of the session was granted meanwhile.")
        entry.shelf = shelf
        if first is not None:
            first.parts.append(entry)
        self._known[body.handoff] = entry
        self._watch(entry, SILENCE_S)
        entry.leaving = asyncio.ensure_future(self._left_alone(entry, source_gone))
        taken = entry.adopting
        return AdoptAnswer(entry.slot_id, entry.shelf is not None, taken.held_tokens, FORM, taken.others_run)

    async def _fenced(self, body: AdoptBody) -> None:
        """Nothing of an older move of the session is taken from here on. Raises HandoffStale, SlotBusy."""
        self._require_newest(body)
        self._make_room()
        self._fences[body.session] = body.fence
        self._fences.move_to_end(body.session)
        while len(self._fences) > MOST_FENCES:
            self._fences.popitem(last=False)
        for older in [one for one in self._known.values() if one.body.session == body.session and one.state == OPEN]:
            await self._abort(older)

    def _require_newest(self, body: AdoptBody) -> None:
        seen, former = self._fences.get(body.session, 0), self._known.get(body.handoff)
        if body.fence < seen or (body.fence == seen and (former is None or former.state == GOING)):
            raise HandoffStale(f"Move {body.fence} of the session is older than one that was seen here.")

    async def _left_alone(self, entry: Adopted, source_gone: asyncio.Event) -> None:
        """Ends a move whose source has gone, unless it brought all before."""
        await source_gone.wait()
        if entry.state == OPEN and not entry.is_at_work:
            log.info("handoff %s: its source has gone", entry.body.handoff)
            await self._abort(entry)

    def _make_room(self) -> None:
        coming = sum(entry.state == OPEN and entry.first is None for entry in self._known.values())
        if coming + self._beginning > MOST_OPEN:
            raise SlotBusy(f"{MOST_OPEN} moves come in already.")
        settled = [name for name, entry in self._known.items() if entry.state != OPEN]
        for name in settled[: max(0, len(self._known) - MOST_KNOWN + 1)]:
            del self._known[name]

    async def _entry(self, body: AdoptBody, first: Adopted | None) -> Adopted:
        core = self._preparation.core
        if body.expected_tokens > core.config.context_tokens:
            raise StateTooLarge(f"The state has {body.expected_tokens} tokens; the context holds fewer.")
        if body.most_tokens > core.config.context_tokens:
            # Its answer would end here before it is as long as was asked for.
            raise StateTooLarge(f"The request may take {body.most_tokens} tokens; the context holds fewer.")
        terms, origin = await self._desk.terms(), Origin(body.tenant, body.session)
        sibling = None if first is None else first.adopting

        def slot_of(cache: PrefixCache) -> int:
            return free_slot(cache, body)

        taken = await adopting(
            terms, core, slot_of, body.expected_tokens, origin=origin, marks=body.marks, sibling=sibling
        )
        return Adopted(body, taken.slot_id, self, taken, tokens=taken.held_tokens, first=first)

    async def block(self, exchange: Exchange) -> AdoptedAnswer:
        """ADOPT_BLOCK: a finished block of a generation that still runs elsewhere, or a checkpoint of it."""
        entry = self._open(exchange.head.key_text)
        async with self._working(entry):
            head = read_json(BlockHead, await read_head(exchange, MAX_HEAD_BYTES), "a block's head")
            piece = StatePiece(head.kind, head.start, head.end, head.size_bytes)
            require_expected(entry, head, piece)
            delivery = await self._came(entry, exchange, head, piece)
            if piece.kind == "checkpoint":
                await entry.adopting.begin_cut(delivery)
            else:
                await entry.adopting.begin(delivery, head.tokens)
                entry.tokens = max(entry.tokens, head.end)
        return entry.answer()

    async def _came(self, entry: Adopted, exchange: Exchange, head: BlockHead, piece: StatePiece) -> Delivery:
        try:
            proof = bytes.fromhex(head.proof)
        except ValueError as error:
            raise StateInvalid("A block's proof is not hexadecimal.") from error
        if head.offset is None:
            if head.size_bytes != exchange.unread_bytes:
                raise StateInvalid("A block's head does not fit its bytes.")
            return await read_piece(exchange, piece, proof, (await self._desk.terms()).dock.arena)
        if entry.shelf is None:
            raise StateInvalid("A piece is said to lie on a shelf that was not taken.")
        data = entry.shelf.piece(head.offset, head.size_bytes)
        return Delivery(piece, data, entry.shelf.left, proof, checksum_of)

    async def rest(self, exchange: Exchange) -> AdoptedAnswer:
        """ADOPT_REST: the manifest, and what is missing, or a part of that; more may follow. Behind the last piece the generation
        goes on."""
        entry = self._open(exchange.head.key_text)
        async with self._working(entry):
            dock = (await self._desk.terms()).dock

            def begin_making(manifest: Manifest) -> None:
                # While its pieces come. Choices that move together are made when the last one is here.
                running = manifest.generation
                if running is not None and len(running.moves_with) <= 1:
                    entry.making = self._making_of([(entry.adopting, manifest)], dock)

            manifest = await take_rest(entry, exchange, dock.arena, begin_making)
            if manifest is not None:
                await self._go_on(entry, entry.adopting, manifest, dock)
        if entry.state == GOING:
            log.info("handoff %s: %d tokens are here", entry.body.handoff, entry.tokens)
        return entry.answer()

    def _making_of(self, arriving: Sequence[tuple[Adopting, Manifest]], dock: Dock) -> Making:
        deadline_at = time.monotonic() + self._preparation.config.request_deadline_s
        return making_of(arriving, self._preparation, dock, deadline_at)

    async def _go_on(self, entry: Adopted, taken: Adopting, manifest: Manifest, dock: Dock) -> None:
        """All is here. From now on the source may not know whether it was heard, and asks."""
        entry.tokens, running = manifest.count, manifest.generation
        if running is None:
            await taken.finish()
            entry.settle(GOING)
            entry.let_go()
            self._metrics.came(idle=True)
            return
        entry.manifest, entry.is_whole = manifest, True
        first = entry.first or entry
        by_choice = {one.body.choice: one for one in entry.together}
        wanted = running.moves_with or (running.choice,)
        if running.choice != entry.body.choice or not set(wanted) <= set(by_choice):
            raise StateInvalid("The state is not of the choices that were announced.")
        coming = [by_choice[choice] for choice in wanted]
        if not all(one.is_whole for one in coming):
            return
        arrived = [(one.adopting, one.manifest) for one in coming if one.manifest is not None]
        taken.mark("all_came")
        making, entry.making = entry.making or self._making_of(arrived, dock), None
        generations = await gone_on(arrived, making)
        if entry.state != OPEN:
            for generation in generations:
                self._preparation.core.cancel(generation)
            raise HandoffStale("The handoff was ended while it went on.")
        first.generations = generations
        taken.mark("going")
        for one in entry.together:
            one.unwatch()
            one.settle(GOING)
        self._watch(first, CLAIM_S)
        self._metrics.came(idle=False)
        for one in entry.together:
            if one not in coming:
                # It ended meanwhile. Where it is the first part, all choices are read by it.
                await one.adopting.__aexit__(None, None, None)
                one.let_go_of_state()

    async def ask(self, body: AskBody) -> AdoptedAnswer:
        """ADOPT_ASK. Raises HandoffUnknown, HandoffStale."""
        entry = self._known.get(body.handoff)
        if entry is None:
            raise HandoffUnknown("There is no such handoff here.")
        if entry.body.fence != body.fence:
            raise HandoffStale("The handoff was granted under another number.")
        if body.drop and (entry.state == OPEN or (body.resumed and entry.state == GOING)):
            await self._abort(entry, EngineStopping("The request goes on at the engine that it came from."))
        elif entry.state == OPEN and not entry.at_work.locked():
            # Its source has nothing to send yet, but is there.
            async with self._working(entry):
                if body.reader:
                    await entry.reader.ready()
                elif body.rehearse_rows:
                    coming = [one.adopting for one in entry.together]
                    return entry.answer(await rehearse_together(coming, body.rehearse_rows))
                elif body.wait:
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

    async def _abort(self, entry: Adopted, error: EngineError | None = None) -> None:
        """Ends all parts of the move; whoever reads a generation that goes on already is told `error`."""
        if (entry.first or entry).state == OPEN:
            self._metrics.ended(idle=entry.body.idle)
        for one in entry.together:
            one.unwatch()
            if one.state == OVER:
                continue
            for generation in one.generations:
                self._preparation.core.cancel(generation)
            if one.claimed and error is not None and one.generations:
                # Of a reader who has let go of it meanwhile nobody hears it.
                told = one.generations[0]
                told.mailbox.put(Piece(told.choice, error=error, stats=told.stats(time.monotonic())))
            one.settle(OVER)
            await self._dropped(one)

    async def _dropped(self, entry: Adopted) -> None:
        entry.shelf, making, entry.making = None, entry.making, None
        try:
            await entry.adopting.__aexit__(None, None, None)
        finally:
            if making is not None:
                await unmade(making)
        entry.let_go()

    def _watch(self, entry: Adopted, limit_s: float) -> None:
        entry.unwatch()
        entry.timer = asyncio.get_running_loop().call_later(limit_s, self._too_late, entry)

    def _too_late(self, entry: Adopted) -> None:
        entry.timer = None
        if entry.claimed or entry.at_work.locked():
            return
        if entry.is_at_work:
            # Another part comes in, which may take its time.
            self._watch(entry, SILENCE_S)
            return
        log.warning("handoff %s: nobody went on with it", entry.body.handoff)
        task = asyncio.ensure_future(self._abort(entry))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    # --- who reads the answer -------------------------------------------------------------------

    def expected(self, handoff: str, request_id: str) -> Adopted:
        """The move that brings this request here. Raises HandoffUnknown."""
        entry = self._known.get(handoff)
        named = entry is not None and entry.first is None and not entry.body.idle
        if entry is None or not named or entry.body.request_id != request_id or entry.claimed:
            raise HandoffUnknown("No running request of that id comes here by such a handoff.")
        entry.reader.asked()
        return entry

    @asynccontextmanager
    async def reading(self, entry: Adopted, generations: Sequence[Generation]) -> AsyncIterator[list[Generation]]:
        """Waits until the request's generations go on here, as many as it has choices; ends them when the block is left. Raises
        HandoffUnknown when they never do."""
        entry.reader.waits()
        await entry.settled.wait()
        if entry.state != GOING or entry.claimed or len(generations) != len(entry.generations):
            raise HandoffUnknown("The request did not come here.")
        entry.claimed = True
        entry.unwatch()
        try:
            yield entry.generations
        finally:
            for generation in entry.generations:
                self._preparation.core.cancel(generation)
            for one in entry.together:
                one.let_go()
