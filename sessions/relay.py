"""One request on its way through the site: find an engine, pass its answer on, write down how it went.

One way for every API (`sessions.dialects`) and for the playground. Bytes are passed as they come; only frames that tell how
the answer went are read here.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import aiohttp

from engines import services as engines
from engines.client import READ_SILENCE_S, EngineClient
from engines.errors import DeadlineExceeded, EngineError, EngineUnreachable, GenerationMoved
from engines.services import EngineEndpoint
from sessions.choices import ChatSource, TurnState
from sessions.dispatch import NO_WISHES, Dispatched, Dispatcher, Wishes
from sessions.engine_call import EngineCall
from sessions.errors import EngineRefused, RequestInProgress
from sessions.follow import FOLLOWED, FOLLOWS_HEADER, MARK, Follower
from sessions.identity import Identity
from sessions.lease_desk import LeaseDesk
from sessions.per_loop import PerLoop
from sessions.services import TurnStart
from sessions.turn import TurnRecord, written

MAX_FRAME_BYTES = 16 << 20
MAX_ANSWER_BYTES = 64 << 20
MAX_REFUSAL_BYTES = 1 << 20
# Reading the facts of more than this would hold every other stream of the process up for too long.
READ_INLINE_BYTES = 64 << 10
EVENT_STREAM = "text/event-stream"
# Another engine may well answer what this one cannot now.
_TRY_ANOTHER = frozenset({429, 502, 503})
MOST_TRIES = 3
MOST_MOVES = 16
# Who asks, in an engine's request: nobody but the site sends these, and what a client sends under these names stays here.
SESSION_HEADER, TENANT_HEADER, RESUME_HEADER = "X-Hydra-Session", "X-Hydra-Tenant", "X-Hydra-Resume-From"
BUDGET_HEADER = "X-Hydra-Budget-S"
MAX_STORES = 4

logger = logging.getLogger(__name__)
dispatcher = PerLoop(Dispatcher)
lease_desk = PerLoop(LeaseDesk)


class EngineAnswer:
    """An engine's answer in the middle of coming. Read it by `raw()`, by iterating, or by `read()`, once; then `aclose()`.

    `aclose()` before the end cancels the request at the engine's next step. Whatever happens, the turn's end is written and the
    place on the engine is given back.
    """

    def __init__(self, response: aiohttp.ClientResponse, request: RelayedRequest) -> None:
        self.engine = request.sent.endpoint
        self.request_id = request.request_id
        self.model_name = self.engine.model_name
        self.content_type = response.content_type
        self.sent = request.sent
        self.session = request.identity.key_hash if request.call.dialect.is_turn else ""
        self._request = request
        self._response = response
        self._record = request.record
        self._closed = False
        self._follower = request.follower()

    @property
    def is_stream(self) -> bool:
        return self.content_type == EVENT_STREAM

    @property
    def is_finished(self) -> bool:
        """Whether the engine said how the answer ended."""
        return self._record.is_finished

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed: as the engine told, or as the router expects while it has not."""
        plan = self.sent.routed.plan
        expected = plan.cached_tokens if plan is not None else 0
        return self._record.cached_tokens if self._record.is_finished else expected

    def lost_frame(self, error: EngineError) -> bytes:
        """The frame that tells a client, in the answer's own dialect, that the stream breaks here."""
        return self._record.lost_frame(error)

    async def raw(self) -> AsyncIterator[bytes]:
        """The answer's SSE frames as the engine wrote them, always whole; an engine that dies has an error frame for its last.

        Where the generation moves to another engine the frames go on from there.
        """
        while True:
            lost: Exception | None = None
            try:
                async for frames in self._frames():
                    self._record.saw(frames)
                    yield frames
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                lost = error
            if not self._follower.moved and (lost is None or not self._follower.expects):
                break
            try:
                await self._go_along()
            except EngineError as error:
                lost = lost or error
                break
        if lost is not None:
            yield self._died(lost)
            return
        if self._record.is_finished:
            self._record.end(TurnState.DONE)
        else:
            # The engine ends an answer it has to give up with an error frame of its own, and then without a finish.
            self._record.end(TurnState.FAILED, "engine_error")

    async def _frames(self) -> AsyncIterator[bytes]:
        """One engine's whole frames, without those that are between it and the site."""
        pending = b""
        async for data in self._response.content.iter_any():
            pending += data
            end = pending.rfind(b"\n\n") + 2
            if end >= 2:
                frames, pending = pending[:end], pending[end:]
                if MARK in frames:
                    frames = self._follower.without_moves(frames)
                if frames:
                    yield frames
            elif len(pending) > MAX_FRAME_BYTES:
                raise aiohttp.ClientPayloadError("a frame without an end")

    async def _go_along(self) -> None:
        """Read on at the engine that the generation moved to. Raises an EngineError where it did not get there."""
        arrived = await self._follower.arrived()
        self._response.close()
        self._response, self.engine = arrived.response, arrived.endpoint
        self._request.moved_to(arrived.endpoint)

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        """The answer's chunks as values, without comments and without the closing [DONE]."""
        async for frames in self.raw():
            for frame in frames.split(b"\n\n"):
                if frame.startswith(b"data: {"):
                    yield json.loads(frame[6:])

    async def read(self) -> bytes:
        """The whole answer of a request that does not stream. Raises EngineUnreachable when the engine dies over it."""
        try:
            body = await _bounded(self._response, MAX_ANSWER_BYTES)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._record.end(TurnState.FAILED, EngineUnreachable.code)
            raise EngineUnreachable("The engine went away before it had answered.") from error
        if len(body) > READ_INLINE_BYTES:
            await asyncio.to_thread(self._record.saw_answer, body)
        else:
            self._record.saw_answer(body)
        self._record.end(TurnState.DONE)
        return body

    async def aclose(self) -> None:
        """Let the engine go. Safe to call again, and after the end."""
        if self._closed:
            return
        self._closed = True
        self._follower.close()
        self._request.leave()
        self._record.end(TurnState.DONE if self._record.is_finished else TurnState.CANCELLED)
        if self._response.content.at_eof():
            self._response.release()
        else:
            # Not release(): that would read on. A closed connection is what tells the engine to stop.
            self._response.close()

    def _died(self, error: Exception) -> bytes:
        logger.warning(
            "engine %s was lost in the middle of an answer: %s: %s", self.engine.name, type(error).__name__, error
        )
        lost = EngineUnreachable("The engine went away in the middle of the answer.", hint="Send the request again.")
        self._record.end(TurnState.FAILED, lost.code)
        return self._record.lost_frame(lost)


@dataclass
class RelayedRequest:
    """One request and where it stands; whoever holds it calls `leave` once, however it ends."""

    call: EngineCall
    identity: Identity
    request_id: uuid.UUID
    sent: Dispatched
    record: TurnRecord
    wishes: Wishes
    arrived_s: float
    idempotency: str = ""

    @property
    def left_s(self) -> float:
        """What is left of the request's time. Raises DeadlineExceeded when that is over."""
        left_s = self.wishes.budget_s - (time.monotonic() - self.arrived_s)
        if left_s <= 0:
            raise DeadlineExceeded("The request's time was up before an engine had answered.")
        return left_s

    async def take_place(self) -> None:
        """Lease a place on the chosen engine, or on the one where the session runs. Raises PoolBusy or RequestInProgress."""
        board, sent = dispatcher().board, self.sent
        # At once, so that whoever is routed meanwhile sees it there.
        board.enter(sent.endpoint, sent.missing_tokens)
        try:
            lease = await self._leased()
        except BaseException:
            board.leave(sent.endpoint)
            raise
        if lease is not None and lease != sent.endpoint.engine_id:
            board.leave(sent.endpoint)
            self.sent = sent.on(lease)
            board.enter(self.sent.endpoint, self.sent.missing_tokens)
        self.record.sent_to(self.sent.endpoint)
        expected_tokens = self.sent.routed.explanation.prompt_tokens
        dispatcher().places.note(self.sent.session, self.sent.endpoint.engine_id, expected_tokens)

    async def _leased(self) -> int | None:
        """The engine that a place was leased on; None for what needs none."""
        if not self.call.dialect.is_turn:
            return None
        sent = self.sent
        lease = await lease_desk().acquire(self.request_id, sent.session, sent.ranked, sent.limits, self.idempotency)
        if lease.outcome == "duplicate":
            raise RequestInProgress("A request with this Idempotency-Key is being answered.")
        if lease.engine_id is None:
            raise dispatcher().busy(sent.endpoint.model_name)
        return lease.engine_id

    def follower(self) -> Follower:
        return Follower(self.call, self.request_id, lambda: _headers(self))

    def moved_to(self, endpoint: EngineEndpoint) -> None:
        """The generation goes on there; its lease's row was moved with it."""
        board, tokens = dispatcher().board, self.sent.missing_tokens
        board.leave(self.sent.endpoint)
        self.sent = replace(self.sent, endpoint=endpoint)
        board.enter(endpoint, tokens)
        self.record.sent_to(endpoint)
        dispatcher().places.note(self.sent.session, endpoint.engine_id, self.sent.routed.explanation.prompt_tokens)

    def step_back(self) -> None:
        """The engine did not take it. Its lease is kept: it moves to the next one, so that nobody comes in between."""
        dispatcher().board.leave(self.sent.endpoint)

    def leave(self) -> None:
        """The engine is done with it."""
        self.step_back()
        lease_desk().release(self.request_id)
        told = self.record.tokens
        dispatcher().learn(self.identity, self.call, self.sent, *told)

    async def choose_another(self, refusal: EngineError, failed: list[EngineEndpoint]) -> bool:
        """Whether there is another engine for it; then `sent` names that."""
        try:
            self.sent = await dispatcher().choose(self.call, self.identity, self.wishes, failed)
        except EngineError as nobody:
            logger.info("nobody else serves this: %s", nobody)
            return False
        logger.info("engine %s cannot take the request (%s), trying another", failed[-1].name, refusal.code)
        return True


async def ask_engine(
    call: EngineCall,
    identity: Identity,
    source: Literal["api", "playground"] = "api",
    *,
    request_id: uuid.UUID | None = None,
    wishes: Wishes = NO_WISHES,
    idempotency: str = "",
) -> EngineAnswer:
    """Send a request to the engine that the router chooses, and return its answer as it begins to come.

    Raises ModelNotFound, NoEngineReady, EngineUnreachable, PoolBusy, RequestInProgress, or EngineRefused with what the engine
    answered.
    """
    arrived_s = time.monotonic()
    request_id = request_id or uuid.uuid4()
    sent = await dispatcher().choose(call, identity, wishes)
    # Written before the engine is asked: an answer in one piece begins to come only when it is done.
    record = TurnRecord(_start(call, identity, source, request_id, sent, wishes), arrived_s, call.dialect)
    record.mark("routed_s")
    request = RelayedRequest(call, identity, request_id, sent, record, wishes, arrived_s, idempotency)
    try:
        response = await _send(request)
    except EngineError as error:
        record.end(TurnState.FAILED, error.code)
        raise
    except Exception:
        record.end(TurnState.FAILED, "internal_error")
        raise
    except BaseException:
        record.end(TurnState.CANCELLED)
        raise
    record.mark("answered_s")
    return EngineAnswer(response, request)


def _start(
    call: EngineCall, identity: Identity, source: str, request_id: uuid.UUID, sent: Dispatched, wishes: Wishes
) -> TurnStart:
    plan = sent.routed.plan
    return TurnStart(
        request_id,
        identity,
        ChatSource(source),
        call.hints.title,
        sent.endpoint.model_name,
        sent.endpoint.engine_id,
        route=sent.mode,
        is_background=wishes.background or call.hints.background,
        explanation=sent.routed.explanation.to_dict(),
        predicted_first_token_s=plan.first_token_s if plan is not None else None,
        request_bytes=len(call.raw),
    )


async def _send(request: RelayedRequest) -> aiohttp.ClientResponse:
    """The chosen engine's response, or that of the best other one when that one cannot take the request now.

    The place on the engine is the caller's as long as the response is open, and given back when this raises.
    """
    failed: list[EngineEndpoint] = []
    for tries_left in reversed(range(MOST_TRIES)):
        try:
            await request.take_place()
        except BaseException:
            lease_desk().release(request.request_id)
            raise
        engine = request.sent.endpoint
        try:
            response = await _post(request)
            if response.status == 200:
                return response
            refusal: EngineError = await _refusal(response)
            if refusal.code == GenerationMoved.code and refusal.param:
                return await _moved_answer(request, refusal.param)
        except EngineUnreachable as error:
            # The details name ports and hosts, which are nobody's business outside.
            logger.warning("engine %s: %s", engine.name, error)
            await written(engines.suspect, engine)
            refusal = EngineUnreachable(
                "The engine does not answer; it is being looked after.", hint="Try again shortly."
            )
        except BaseException:
            request.leave()
            raise
        failed.append(engine)
        may_go_on = tries_left and refusal.http_status in _TRY_ANOTHER
        if may_go_on and refusal.http_status != 429:
            # What was known of the pool is too old to go by.
            dispatcher().lost(engine)
        request.step_back()
        try:
            if not (may_go_on and await request.choose_another(refusal, failed)):
                raise refusal
        except BaseException:
            lease_desk().release(request.request_id)
            raise
    raise AssertionError("unreachable: the last try always returns or raises")


async def _post(request: RelayedRequest) -> aiohttp.ClientResponse:
    call, sent = request.call, request.sent
    dialect, headers = call.dialect, _headers(request)
    request.record.mark("sent_s")
    return await EngineClient(sent.endpoint.base_url, sent.endpoint.secret).call(
        dialect.method,
        dialect.path,
        call.raw,
        request_id=str(request.request_id),
        silence_s=READ_SILENCE_S if call.stream else dialect.answer_timeout_s,
        headers=headers,
    )


def _headers(request: RelayedRequest) -> dict[str, str]:
    dialect, sent = request.call.dialect, request.sent
    headers: dict[str, str] = {}
    if dialect.is_turn:
        headers[TENANT_HEADER] = request.identity.owner.tenant
        if sent.session:
            headers[SESSION_HEADER] = sent.session
        headers[BUDGET_HEADER] = f"{request.left_s:.3f}"
        if sent.stores:
            headers[RESUME_HEADER] = ",".join(sent.stores[:MAX_STORES])
        if dialect.path in FOLLOWED:
            headers[FOLLOWS_HEADER] = "1"
    return headers


async def _moved_answer(request: RelayedRequest, handoff: str) -> aiohttp.ClientResponse:
    """An answer in one piece whose generation moved before it was done, from the engine where it ends."""
    for _ in range(MOST_MOVES):
        follower = request.follower()
        try:
            follower.expect(handoff)
            arrived = await follower.arrived()
        except GenerationMoved as moved:
            handoff = moved.param or ""
            continue
        finally:
            follower.close()
        request.moved_to(arrived.endpoint)
        return arrived.response
    raise EngineUnreachable("The request moved on and on.")


async def _refusal(response: aiohttp.ClientResponse) -> EngineRefused:
    try:
        body = await _bounded(response, MAX_REFUSAL_BYTES)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise EngineUnreachable("The engine went away before it had answered.") from error
    finally:
        response.close()
    return EngineRefused.of(response.status, body, response.headers.get("Retry-After"))


async def _bounded(response: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
    body = bytearray()
    async for data in response.content.iter_any():
        body += data
        if len(body) > limit_bytes:
            raise aiohttp.ClientPayloadError(f"an answer of more than {limit_bytes} bytes")
    return bytes(body)
