"""The source's side of a handoff: finds what is held of a session and takes it to another engine, running or idle.

The control plane grants a number (fence) for each move and asks for it once; asking again with the same number joins the move
or tells what came of it. Until the target has everything, whatever fails leaves the conversation here and running.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Generator
from dataclasses import dataclass

from engines.errors import (
    DeadlineExceeded,
    EngineError,
    EngineUnreachable,
    GenerationStays,
    HandoffStale,
    ProtocolBroken,
    RpcRefused,
    SessionNotHeld,
    SlotBusy,
    StateError,
)
from engines.rpc_handoff import HEAD_LENGTH, HandoffClient
from engines.rpc_stream import Buffer
from engines.runtime.core import EngineCore
from engines.runtime.generation import Generation, Piece
from engines.runtime.prefix import PrefixCache
from engines.runtime.slots import Slot
from engines.runtime.state_desk import StateDesk
from engines.runtime.state_follow import Leaving
from engines.runtime.state_forms import DIGEST_BYTES, digest_of
from engines.runtime.state_snapshot import Manifest
from engines.wire_handoff import AdoptBody, AskBody, BlockHead, HandoffAnswer, HandoffBody

log = logging.getLogger("hydra.engine.handoff")

MOST_AT_ONCE = 4
MOST_KNOWN = 256
MAX_DEADLINE_S = 600.0
LOOK_EVERY_S = 0.02
# A client's reader that has not taken what was written by then holds the stop up for nothing.
TOLD_S = 2.0
REST_PATIENCE_S = 6.0
ASK_PAUSES_S = (0.0, 0.1, 0.3, 0.6, 1.0)
# Room for what the generation writes while its blocks leave.
EXPECTED_MORE_TOKENS = 256


@dataclass(frozen=True)
class Held:
    """What this engine has of a session: a generation that runs, a request on its way, an idle slot, or nothing."""

    generation: Generation | None
    is_pending: bool
    slot_id: int | None
    raw_logits: bool
    tenant: str
    tokens: int


class LeavingHandoffs:
    """All moves away from this engine; used on its event loop."""

    def __init__(self, core: EngineCore, desk: StateDesk) -> None:
        self._core, self._desk = core, desk
        self._moves: OrderedDict[str, tuple[int, asyncio.Task[HandoffAnswer]]] = OrderedDict()

    async def move(self, body: HandoffBody) -> HandoffAnswer:
        """Raises HandoffStale, SlotBusy, SessionNotHeld, GenerationStays, DeadlineExceeded, and what keeps a state here or the
        target from taking it. A caller that goes away does not stop a move."""
        fence, task = self._moves.get(body.session, (0, None))
        if task is None or body.fence > fence:
            if task is not None and not task.done():
                raise SlotBusy("Another move of the session is under way.")
            if sum(not other.done() for _, other in self._moves.values()) >= MOST_AT_ONCE:
                raise SlotBusy(f"{MOST_AT_ONCE} moves are under way already.")
            task = asyncio.ensure_future(self._moved(body))
            # Looked at here, should nobody ask any more.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._moves[body.session] = (body.fence, task)
            self._moves.move_to_end(body.session)
            self._forget_old()
        elif body.fence < fence:
            raise HandoffStale(f"Move {body.fence} of the session is older than move {fence}.")
        return await asyncio.shield(task)

    def _forget_old(self) -> None:
        for session, (_, task) in list(self._moves.items()):
            if len(self._moves) <= MOST_KNOWN:
                return
            if task.done():
                del self._moves[session]

    async def _moved(self, body: HandoffBody) -> HandoffAnswer:
        until = time.monotonic() + min(body.deadline_s, MAX_DEADLINE_S)
        async with HandoffClient(body.target_host, body.target_port, secret=body.target_secret) as target:
            while True:
                held = await self._held(body.session)
                try:
                    if held.generation is not None:
                        return await _Live(self._core, self._desk, target, body, held, held.generation, until).run()
                    if held.slot_id is not None and not held.is_pending:
                        return await self._idle(target, body, held, held.slot_id)
                except SlotBusy as error:
                    log.debug("handoff %s: %s", body.handoff, error)
                if held.generation is None and held.slot_id is None and not held.is_pending:
                    raise SessionNotHeld("This engine holds nothing of the session in a slot.")
                if time.monotonic() > until:
                    raise DeadlineExceeded("The move's time was up before the session could leave.")
                await asyncio.sleep(LOOK_EVERY_S)

    async def _held(self, session: str) -> Held:
        def look(cache: PrefixCache) -> Generator[None, None, Held]:
            yield from ()
            mine = [slot for slot in cache.slots if slot.sequence.origin.session == session]
            running = [slot for slot in mine if slot.generation is not None and slot.generation.session == session]
            waiting = any(one.session == session for one in self._core.waiting.in_order(Counter()))
            decoding = next((slot for slot in running if slot.decoding), None)
            if decoding is not None:
                return _held(decoding, decoding.generation, is_pending=False)
            idle = [slot for slot in mine if slot.idle and len(slot.sequence)]
            best = max(idle, key=lambda slot: slot.used_at, default=None)
            if best is None:
                return Held(None, bool(running) or waiting, None, False, "", 0)
            return _held(best, None, is_pending=bool(running) or waiting)

        held: Held = await self._core.perform(look)
        return held

    # --- an idle conversation -------------------------------------------------------------------

    async def _idle(self, target: HandoffClient, body: HandoffBody, held: Held, slot_id: int) -> HandoffAnswer:
        began_at = time.monotonic()
        terms = await self._desk.terms()
        await target.adopt(_adopt_body(body, held, terms.fingerprint, None, held.tokens))
        async with await self._desk.export(slot_id) as state:
            tokens = list(state.manifest.tokens)
            await target.adopt_rest(body.handoff, aiter(state), state.total_bytes, MAX_DEADLINE_S)
        await self._core.perform(lambda cache: _emptied(cache, slot_id, tokens))
        seconds = time.monotonic() - began_at
        return HandoffAnswer("idle", len(tokens), state.total_bytes, 0, state.total_bytes, round(seconds, 6), 0.0, 0.0)


class _Live:
    """One running generation on its way."""

    def __init__(
        self,
        core: EngineCore,
        desk: StateDesk,
        target: HandoffClient,
        body: HandoffBody,
        held: Held,
        generation: Generation,
        until: float,
    ) -> None:
        self._core, self._desk, self._target, self._body = core, desk, target, body
        self._held, self._generation, self._until = held, generation, until
        self._sent_bytes = 0

    async def run(self) -> HandoffAnswer:
        generation, body = self._generation, self._body
        if not generation.followed:
            raise GenerationStays(
                "Nobody would follow the running request: it has several choices, images, log probabilities, or a form of"
                " answer whose stream cannot be continued elsewhere."
            )
        began_at, began_tokens = time.monotonic(), generation.new_tokens
        terms = await self._desk.terms()
        expected = min(
            len(generation.tokens) + EXPECTED_MORE_TOKENS, len(generation.prompt) + generation.max_new_tokens
        )
        await self._target.adopt(_adopt_body(body, self._held, terms.fingerprint, generation.request_id, expected))
        try:
            # The site may open the other end now, so that the stop is not longer than the state's way.
            generation.mailbox.put(Piece(generation.choice, moving=body.handoff))
            async with Leaving(self._core, terms, generation, body.fence) as leaving:
                await self._follow(leaving)
                steps = generation.new_tokens - began_tokens
                step_s = (time.monotonic() - began_at) / max(1, steps)
                stopped_at = time.monotonic()
                manifest = await leaving.stop()
                await self._told()
                await self._send_rest(leaving, manifest)
                pause_s = time.monotonic() - stopped_at
                generation.handoff = body.handoff
                await leaving.commit(body.fence)
        except BaseException:
            await self._drop()
            raise
        return HandoffAnswer(
            kind="live",
            tokens=len(manifest.tokens),
            sent_bytes=self._sent_bytes,
            skipped_bytes=0,
            total_bytes=manifest.total_bytes,
            seconds=round(time.monotonic() - began_at, 6),
            pause_ms=round(pause_s * 1000, 3),
            pause_steps=round(pause_s / step_s, 3) if step_s else 0.0,
            request_id=generation.request_id,
        )

    async def _follow(self, leaving: Leaving) -> None:
        """Sends what is full, until less than a block is missing."""
        tokens = self._generation.tokens
        async for exported in leaving.finished_blocks(digest_of):
            with exported.buffer:
                piece = exported.piece
                head = BlockHead(
                    piece.start,
                    piece.end,
                    exported.data.nbytes,
                    exported.proof.hex(),
                    tuple(tokens[piece.start : piece.end]),
                )
                await self._target.adopt_block(self._body.handoff, head, memoryview(exported.data.data))
            self._sent_bytes += piece.size_bytes
            if time.monotonic() > self._until:
                raise DeadlineExceeded("The move's time was up before the generation's blocks had left.")

    async def _told(self) -> None:
        """Returns once all text that was made here has gone out."""

        def nothing(_cache: PrefixCache) -> Generator[None, None, None]:
            yield from ()

        # What the stop's step had to say is handed to the event loop before an errand of a later turn is.
        await self._core.perform(nothing)
        told = asyncio.Event()
        self._generation.mailbox.put(Piece(self._generation.choice, moving=self._body.handoff, told=told))
        try:
            async with asyncio.timeout(TOLD_S):
                await told.wait()
        except TimeoutError as error:
            raise StateError("The answer's reader is too slow to follow now.") from error

    async def _send_rest(self, leaving: Leaving, manifest: Manifest) -> None:
        """Returns when the target goes on. Raises when it surely does not, or cannot be asked any more."""
        head = manifest.to_json(leaving.sent_tokens)
        rest = [piece for piece in manifest.pieces if piece.kind != "block" or piece.start >= leaving.sent_tokens]
        rest_bytes = sum(piece.size_bytes for piece in rest)
        total_bytes = HEAD_LENGTH.size + len(head) + rest_bytes + DIGEST_BYTES * len(rest)

        async def payload() -> AsyncIterator[Buffer]:
            yield HEAD_LENGTH.pack(len(head)) + head
            async for exported in leaving.rest(digest_of):
                with exported.buffer:
                    yield exported.proof
                    yield memoryview(exported.data.data)

        try:
            await self._target.adopt_rest(self._body.handoff, payload(), total_bytes, REST_PATIENCE_S)
        except (EngineUnreachable, ProtocolBroken) as error:
            if not await self._goes_on_there():
                raise
            log.warning("handoff %s: the answer was lost (%s), but the target goes on", self._body.handoff, error)
        self._sent_bytes += rest_bytes

    async def _goes_on_there(self) -> bool:
        """Asks a target whose answer was lost. One that cannot be reached has its stream read by nobody."""
        for pause_s in ASK_PAUSES_S:
            await asyncio.sleep(pause_s)
            try:
                answer = await self._target.adopt_ask(AskBody(self._body.handoff, self._body.fence, drop=True))
            except RpcRefused:
                return False
            except (EngineUnreachable, ProtocolBroken) as error:
                log.debug("handoff %s: the target does not answer: %s", self._body.handoff, error)
                continue
            return answer.state == "going"
        return False

    async def _drop(self) -> None:
        try:
            await self._target.adopt_ask(AskBody(self._body.handoff, self._body.fence, drop=True))
        except EngineError as error:
            log.debug("handoff %s: the target could not be told to drop it: %s", self._body.handoff, error)


def _held(slot: Slot, generation: Generation | None, *, is_pending: bool) -> Held:
    return Held(
        generation, is_pending, slot.index, slot.has_raw_logits, slot.sequence.origin.tenant, len(slot.sequence)
    )


def _adopt_body(
    body: HandoffBody, held: Held, fingerprint: str, request_id: str | None, expected_tokens: int
) -> AdoptBody:
    return AdoptBody(
        handoff=body.handoff,
        fence=body.fence,
        session=body.session,
        tenant=held.tenant,
        fingerprint=fingerprint,
        expected_tokens=expected_tokens,
        idle=request_id is None,
        raw_logits=held.raw_logits,
        request_id=request_id,
    )


def _emptied(cache: PrefixCache, slot_id: int, tokens: list[int]) -> Generator[None, None, None]:
    """Frees a slot whose conversation is elsewhere now, unless something new has begun in it."""
    yield from ()
    slot = cache.slots[slot_id]
    if slot.idle and slot.sequence.tokens == tokens:
        slot.sequence.clear()
