"""The source's side of a handoff: finds what is held of a session and takes it to another engine, running or idle.

The control plane grants a number (fence) for each move and asks for it once; asking again with the same number joins the move
or tells what came of it. Until the target has everything, whatever fails leaves the conversation here and running.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Coroutine, Generator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from engines.api_constraint import ConstraintSpec
from engines.errors import (
    DeadlineExceeded,
    EngineError,
    EngineStopping,
    HandoffStale,
    RpcRefused,
    SessionNotHeld,
    SlotBusy,
    StateError,
    StateTooLarge,
    TargetRefused,
)
from engines.rpc_handoff import HandoffClient
from engines.rpc_serving import TOO_MANY_CONNECTIONS
from engines.runtime.arena import ArenaFull
from engines.runtime.core import EngineCore
from engines.runtime.errands import Work
from engines.runtime.generation import Generation
from engines.runtime.handoff_idle import Clock, IdleMove, emptied, piece_tokens
from engines.runtime.handoff_live import LiveMove
from engines.runtime.handoff_way import Way
from engines.runtime.prefix import PrefixCache
from engines.runtime.prefix_marks import Tokens, marks_of
from engines.runtime.slots import Slot
from engines.runtime.state_desk import StateDesk
from engines.runtime.state_export import ExportedState
from engines.runtime.state_terms import SharingTerms
from engines.runtime.state_transfer import Departure, depart
from engines.wire_handoff import FORM, AdoptBody, HandoffAnswer, HandoffBody
from engines.wire_json import write_json

log = logging.getLogger("hydra.engine.handoff")

# Of those under way so many send, or look for what they would; the others wait as long as they have time.
MOST_AT_ONCE, MOST_UNDER_WAY = 4, 128
MOST_KNOWN = 256
MAX_DEADLINE_S = 600.0
# How often is looked what is held, and at most how long is waited between two tries at a target that is full.
LOOK_EVERY_S, FULL_PAUSE_S = 0.02, 0.5
# A request that is asked for by its id may be on its way here; one that was refused never comes.
APPEARS_S = 5.0
# Connections to targets are used again within this time.
KEPT_CLIENTS, KEPT_S = 4, 60.0
# Room for what the generation writes while its blocks leave.
EXPECTED_MORE_TOKENS = 256
# ADOPT has room for so long a form besides its marks.
MAX_TOLD_FORM_BYTES = 32 << 10


@dataclass(frozen=True)
class Held:
    """What this engine has of a session: a generation that runs, a request on its way, an idle slot, or nothing."""

    generation: Generation | None
    is_pending: bool
    state: ExportedState | None = None
    """An idle slot's, which is taken: whoever has it leaves it as a block."""
    raw_logits: bool = False
    tenant: str = ""
    tokens: Tokens = ()


class _Move:
    """The last move of a session, and what came of it: a task that failed would keep all that its frames hold."""

    def __init__(self, fence: int, moved: Coroutine[Any, Any, HandoffAnswer]) -> None:
        self.fence = fence
        self._task: asyncio.Task[HandoffAnswer] | None = asyncio.ensure_future(moved)
        self._outcome: HandoffAnswer | EngineError | None = None
        self._task.add_done_callback(self._settle)

    @property
    def runs(self) -> bool:
        return self._task is not None

    async def outcome(self) -> HandoffAnswer:
        """Raises what the move failed with."""
        if self._task is not None:
            return await asyncio.shield(self._task)
        if isinstance(self._outcome, HandoffAnswer):
            return self._outcome
        assert self._outcome is not None
        raise _without_frames(self._outcome)

    def _settle(self, task: asyncio.Task[HandoffAnswer]) -> None:
        self._task = None
        if task.cancelled():
            self._outcome = EngineStopping("The engine is shutting down.")
        elif (error := task.exception()) is None:
            self._outcome = task.result()
        elif isinstance(error, EngineError):
            self._outcome = _without_frames(error)
        else:
            self._outcome = StateError(f"The move failed: {error!r}.")


def _refused(refusal: RpcRefused) -> TargetRefused:
    """To whoever asked for the move: it is not this engine that refuses."""
    told = TargetRefused(refusal.message, param=refusal.peer_code or refusal.code, hint=refusal.hint)
    told.http_status, told.retry_after_s = refusal.http_status, refusal.retry_after_s
    return told


def _without_frames(error: EngineError) -> EngineError:
    """The same to whoever is told of it."""
    bare = type(error).__new__(type(error), *error.args)
    vars(bare).update(vars(error))
    return bare


class LeavingHandoffs:
    """All moves away from this engine; used on its event loop."""

    def __init__(self, core: EngineCore, desk: StateDesk) -> None:
        self._core, self._desk = core, desk
        self._moves: OrderedDict[str, _Move] = OrderedDict()
        self._places = asyncio.Semaphore(MOST_AT_ONCE)
        self._emptying: set[asyncio.Future[None]] = set()
        self._clients: OrderedDict[tuple[str, int, str], tuple[float, HandoffClient]] = OrderedDict()

    async def move(self, body: HandoffBody) -> HandoffAnswer:
        """Raises HandoffStale, SlotBusy, SessionNotHeld, GenerationStays, DeadlineExceeded, TargetRefused, and what keeps a state
        here. A caller that goes away does not stop a move."""
        move = self._moves.get(body.session)
        if move is None or body.fence > move.fence:
            if move is not None and move.runs:
                raise SlotBusy("Another move of the session is under way.")
            if sum(other.runs for other in self._moves.values()) >= MOST_UNDER_WAY:
                raise SlotBusy(f"{MOST_UNDER_WAY} moves are under way already.")
            move = self._moves[body.session] = _Move(body.fence, self._counted(body))
            self._moves.move_to_end(body.session)
            self._forget_old()
        elif body.fence < move.fence:
            raise HandoffStale(f"Move {body.fence} of the session is older than move {move.fence}.")
        return await move.outcome()

    def _forget_old(self) -> None:
        for session, move in list(self._moves.items()):
            if len(self._moves) <= MOST_KNOWN:
                return
            if not move.runs:
                del self._moves[session]

    async def _counted(self, body: HandoffBody) -> HandoffAnswer:
        try:
            answer = await self._moved(body)
        except BaseException as error:
            self._core.metrics.handoffs.stayed(error)
            raise
        self._core.metrics.handoffs.left(answer)
        return answer

    async def _moved(self, body: HandoffBody) -> HandoffAnswer:
        began_at = time.monotonic()
        until, appears_until = began_at + min(body.deadline_s, MAX_DEADLINE_S), began_at + APPEARS_S
        pause_s, last_said = LOOK_EVERY_S, None
        async with self._client(body) as target:
            while True:
                try:
                    async with self._place(until):
                        clock = Clock()
                        held = await (self._request(body) if body.request_id else self._session(body.session))
                        if held.generation is not None:
                            return await self._live(target, body, held, held.generation, until)
                        if held.state is not None:
                            return await self._idle(target, body, held, held.state, until, clock)
                except SlotBusy as error:
                    log.debug("handoff %s: %s", body.handoff, error)
                except RpcRefused as error:
                    # A target to which many move at once takes one after the other.
                    if error.peer_code not in (SlotBusy.code, TOO_MANY_CONNECTIONS):
                        raise _refused(error) from error
                    log.debug("handoff %s: %s", body.handoff, error)
                    last_said = f"Its target said: {error.message}"
                    pause_s = min(2 * pause_s, FULL_PAUSE_S)
                except SessionNotHeld as error:
                    # An answer that ends on its way leaves a conversation that moves as any idle one does.
                    if body.request_id:
                        raise
                    log.debug("handoff %s: %s", body.handoff, error)
                except ArenaFull as error:
                    raise StateTooLarge(f"The state cannot leave: {error}.") from error
                else:
                    if not held.is_pending and not (body.request_id and time.monotonic() < appears_until):
                        raise SessionNotHeld("This engine holds nothing of the session that could move.")
                if time.monotonic() > until:
                    raise DeadlineExceeded("The move's time was up before the session could leave.", hint=last_said)
                await asyncio.sleep(pause_s)

    @asynccontextmanager
    async def _place(self, until: float) -> AsyncIterator[None]:
        """Among those that send, for the time of the block. Raises DeadlineExceeded."""
        try:
            async with asyncio.timeout(max(0.0, until - time.monotonic())):
                await self._places.acquire()
        except TimeoutError as error:
            raise DeadlineExceeded("The move's time was up before it was its turn.") from error
        try:
            yield
        finally:
            self._places.release()

    @asynccontextmanager
    async def _client(self, body: HandoffBody) -> AsyncIterator[HandoffClient]:
        """A connection to the target, which the next move may use again."""
        key = (body.target_host, body.target_port, body.target_secret)
        kept_at, client = self._clients.pop(key, (0.0, None))
        if client is not None and time.monotonic() - kept_at > KEPT_S:
            await client.close()
            client = None
        client = client or HandoffClient(body.target_host, body.target_port, secret=body.target_secret)
        try:
            yield client
        except BaseException:
            await client.close()
            raise
        if key in self._clients:
            await client.close()
            return
        self._clients[key] = (time.monotonic(), client)
        while len(self._clients) > KEPT_CLIENTS:
            await self._clients.popitem(last=False)[1][1].close()

    async def close(self) -> None:
        while self._clients:
            await self._clients.popitem()[1][1].close()

    # --- what is here ---------------------------------------------------------------------------

    async def _session(self, session: str) -> Held:
        """What is held of it; an idle slot is taken at once if that is all. Raises SlotBusy, StateHasImages, and what keeps all
        states here."""
        terms = await self._desk.terms() if self._core.codec is not None else None

        def look(cache: PrefixCache) -> Generator[None, None, tuple[Held, Departure | None]]:
            running = [slot for slot in cache.busy if slot.generation and slot.generation.session == session]
            decoding = next((slot for slot in running if slot.decoding), None)
            if decoding is not None:
                return _held(decoding, decoding.generation), None
            line = [*self._core.waiting.standing(), *self._core.landing.coming()]
            comes = bool(running) or any(one.session == session for one in line)
            # Whoever takes it out of its slot, or into one, is done some time.
            if comes or any(slot.transfer and slot.sequence.origin.session == session for slot in cache.slots):
                return Held(None, True), None
            if any(place.sequence.origin.session == session for place in cache.aside):
                return Held(None, True), None
            slot = _idle_slot(cache, session)
            if slot is None or not len(slot.sequence):
                # It may lie in host memory. While it comes back others are served, so all is looked at again.
                if (yield from _brought(cache, session, slot)):
                    return (yield from look(cache))
                return Held(None, cache.host.of_session(session) is not None), None
            departure = None if terms is None else (yield from depart(cache, terms.dock.codec, slot.index))
            return _held(slot, None), departure

        if terms is None:
            held: Held = (await self._core.perform(look))[0]
            if held.tokens and held.generation is None:
                await self._desk.terms()  # says why nothing leaves
            return held
        held, departure = await terms.dock.take(look, _given_back)
        if departure is None:
            return held
        tokens_a_piece = piece_tokens(self._core, terms, departure.look)
        return replace(held, state=self._desk.leaving(departure, terms.dock, tokens_a_piece))

    async def _request(self, body: HandoffBody) -> Held:
        """One request of the session, once it is in a slot: one in the line needs none at the target either."""

        def is_it(one: Generation) -> bool:
            return one.request_id == body.request_id and one.session == body.session

        def look(cache: PrefixCache) -> Generator[None, None, Held]:
            yield from ()
            for one in (slot.generation for slot in cache.busy):
                if one is not None and is_it(one):
                    raw_logits = self._core.wants_raw_logits(one)
                    return Held(one, False, None, raw_logits, one.tenant, tuple(one.tokens))
            return Held(None, any(map(is_it, [*self._core.waiting.standing(), *self._core.landing.coming()])))

        held: Held = await self._core.perform(look)
        return held

    # --- the two ways of moving -----------------------------------------------------------------

    async def _live(
        self, target: HandoffClient, body: HandoffBody, held: Held, generation: Generation, until: float
    ) -> HandoffAnswer:
        terms = await self._desk.terms()

        def adopt_of(one: Generation, name: str) -> AdoptBody:
            most = len(one.prompt) + one.max_new_tokens
            expected = min(len(one.tokens) + EXPECTED_MORE_TOKENS, most)
            there = held if one is generation else replace(held, tokens=tuple(one.tokens))
            adopt = _adopt_body(body, there, terms, one.request_id, expected)
            if most < self._core.config.context_tokens:
                adopt = replace(adopt, most_tokens=most)
            if one is generation:
                return adopt
            return replace(adopt, handoff=name, choice=one.choice, of=body.handoff)

        return await LiveMove(self._core, terms, target, body, generation, until, adopt_of).run()

    async def _idle(
        self, target: HandoffClient, body: HandoffBody, held: Held, state: ExportedState, until: float, clock: Clock
    ) -> HandoffAnswer:
        try:
            async with state:
                state.begin()
                terms = await self._desk.terms()
                # One array serves all that is told of the tokens.
                adopt = _adopt_body(body, replace(held, tokens=state.departure.ids), terms, None, len(held.tokens))
                async with Way(target, terms, body.handoff, body.fence) as way:
                    return await IdleMove(terms, until, clock).run(adopt, state, way)
        finally:
            if state.has_left:
                self._empty(lambda cache: emptied(cache, state.departure))

    def _empty(self, work: Work) -> None:
        """Frees what has moved. It is the core's next errand; the conversation need not wait for it."""
        emptying = asyncio.ensure_future(self._core.perform(work))
        self._emptying.add(emptying)
        emptying.add_done_callback(self._emptied)

    def _emptied(self, emptying: asyncio.Future[None]) -> None:
        self._emptying.discard(emptying)
        if not emptying.cancelled() and (error := emptying.exception()) is not None:
            log.warning("what has moved could not be freed here: %s", error)


def _idle_slot(cache: PrefixCache, session: str) -> Slot | None:
    """That of a conversation between its turns, also where it was put away."""
    idle = [slot for slot in cache.slots if slot.idle and cache.of_session(slot, session)]
    return max(idle, key=lambda slot: slot.used_at, default=None)


def _brought(cache: PrefixCache, session: str, slot: Slot | None) -> Generator[None, None, bool]:
    """Whether the conversation came back from host memory, into its slot if it has one; there may be no room for it."""
    if slot is None:
        return (yield from cache.bring_in(session)) is not None
    yield from cache.bring_back(slot)
    return len(slot.sequence) > 0


def _held(slot: Slot, generation: Generation | None) -> Held:
    origin, tokens = slot.sequence.origin, tuple(slot.sequence.tokens)
    return Held(generation, False, None, slot.has_raw_logits, origin.tenant, tokens)


def _given_back(taken: tuple[Held, Departure | None]) -> Work:
    def work(_cache: PrefixCache) -> Generator[None, None, None]:
        if taken[1] is not None:
            yield from taken[1].end()

    return work


def _adopt_body(
    body: HandoffBody, held: Held, terms: SharingTerms, request_id: str | None, expected_tokens: int
) -> AdoptBody:
    return AdoptBody(
        handoff=body.handoff,
        fence=body.fence,
        session=body.session,
        tenant=held.tenant,
        fingerprint=terms.fingerprint,
        expected_tokens=expected_tokens,
        idle=request_id is None,
        raw_logits=held.raw_logits,
        request_id=request_id,
        # At least one token is computed where the conversation goes on.
        marks=marks_of(held.tokens[:-1], terms.block_tokens),
        choice=0 if held.generation is None else held.generation.choice,
        constraint=None if held.generation is None else _told_form(held.generation),
        form=FORM,
    )


def _told_form(generation: Generation) -> ConstraintSpec | None:
    """The form that the target may make ready before the stop. A long one it makes then, as it comes with the manifest."""
    spec = generation.constraint.spec if generation.constraint else None
    return spec if spec is not None and len(write_json(spec)) <= MAX_TOLD_FORM_BYTES else None
