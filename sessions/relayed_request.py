"""One request's way to an engine: where it stands, what its engine is told of it, and whom it goes to when that one cannot."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import aiohttp

from engines import services as engines
from engines.client import READ_SILENCE_S, EngineClient
from engines.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineError,
    EngineUnreachable,
    GenerationMoved,
    HandoffUnknown,
)
from engines.services import EngineEndpoint
from sessions.dispatch import Dispatched, Dispatcher, Wishes
from sessions.engine_call import EngineCall
from sessions.errors import EngineRefused, RequestInProgress
from sessions.follow import FOLLOWED, FOLLOWS_HEADER, Follower
from sessions.identity import Identity
from sessions.lease_desk import LeaseDesk
from sessions.leases import Lease
from sessions.per_loop import PerLoop
from sessions.split import Split
from sessions.stream_journal import JOURNAL_HEADER
from sessions.turn import TurnRecord, written
from sessions.turn_plan import planned

MAX_REFUSAL_BYTES = 1 << 20
# Another engine may well answer what this one cannot now.
TRY_ANOTHER = frozenset({429, 502, 503})
MOST_TRIES = 3
MOST_MOVES = 16
# Who asks, in an engine's request: nobody but the site sends these, and what a client sends under these names stays here.
SESSION_HEADER, TENANT_HEADER, RESUME_HEADER = "X-Hydra-Session", "X-Hydra-Tenant", "X-Hydra-Resume-From"
BUDGET_HEADER = "X-Hydra-Budget-S"
MAX_STORES = 4
# A client that asks again elsewhere rather waits than is refused, but not longer than proxies bear silence; then it is told to
# ask later.
DUPLICATE_PATIENCE_S, DUPLICATE_LOOK_S = 20.0, 0.5
# An engine ends a request itself when its time is up, between two steps. One that does not has frozen.
GRACE_S = 5.0

logger = logging.getLogger(__name__)
dispatcher = PerLoop(Dispatcher)
lease_desk = PerLoop(LeaseDesk)


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
    split: Split | None = None
    _stands: bool = False
    _tries: int = 0

    @property
    def route(self) -> str:
        return "solo" if self.split is not None and self.split.fell_back else self.sent.mode

    @property
    def left_s(self) -> float:
        """What is left of the request's time. Raises DeadlineExceeded when that is over."""
        left_s = self.wishes.budget_s - (time.monotonic() - self.arrived_s)
        if left_s <= 0:
            raise time_up()
        return left_s

    @property
    def patience_s(self) -> float:
        """How long the site still waits for the engine, which is to end the request by itself before that."""
        return max(0.0, self.wishes.budget_s + GRACE_S - (time.monotonic() - self.arrived_s))

    @asynccontextmanager
    async def in_time(self) -> AsyncIterator[None]:
        """Bounds what is done within by that. Raises DeadlineExceeded."""
        try:
            async with asyncio.timeout(self.patience_s) as patience:
                yield
        except TimeoutError as error:
            if not patience.expired():
                raise
            raise time_up() from error

    async def take_place(self) -> int | None:
        """Lease a place on the chosen engine, or on the one where the session runs. Raises PoolBusy or RequestInProgress.

        Returns the engine that a person wants the session on, as the lease told.
        """
        board, sent = dispatcher().board, self.sent
        self._tries += 1
        # At once, so that whoever is routed meanwhile sees it there.
        board.enter(sent.endpoint, sent.missing_tokens)
        try:
            with dispatcher().order.place(sent.endpoint.engine_id) as place:
                lease = await self._leased()
                await place.turn()
        except BaseException:
            board.leave(sent.endpoint)
            raise
        if lease is not None and lease.engine_id not in (None, sent.endpoint.engine_id):
            board.leave(sent.endpoint)
            self.sent = sent.on(lease.engine_id)
            board.enter(self.sent.endpoint, self.sent.missing_tokens)
        self._stands = True
        self.record.sent_to(self.sent.endpoint)
        expected_tokens = self.sent.routed.explanation.prompt_tokens
        dispatcher().places.note(self.sent.session, self.sent.endpoint.engine_id, expected_tokens)
        return lease.wanted_engine_id if lease is not None else None

    async def take_first_place(self, failed: list[EngineEndpoint]) -> None:
        """The same, where the session is wanted: a warm turn learns that with its lease, and is chosen for once more."""
        wanted_id = await self._take_turn(failed)
        if wanted_id is not None and wanted_id != self.sent.seen_wanted_engine_id:
            await self._meet(wanted_id, failed)
        self.record.placed()

    async def _take_turn(self, failed: list[EngineEndpoint]) -> int | None:
        """As `take_place`; the same request (see Idempotency-Key) that another replica has is waited for a little."""
        until_s = time.monotonic() + min(DUPLICATE_PATIENCE_S, self.left_s)
        while True:
            try:
                return await self.take_place()
            except RequestInProgress:
                if time.monotonic() + DUPLICATE_LOOK_S > until_s:
                    raise
            await asyncio.sleep(DUPLICATE_LOOK_S)
            # The pool has gone on meanwhile.
            self.sent = await dispatcher().choose(self.call, self.identity, self.wishes, failed)
            self.record.planned_anew(**planned(self.sent))

    async def _meet(self, wanted_id: int, failed: list[EngineEndpoint]) -> None:
        """Go where the session is wanted; where that cannot be, the place that it has is kept."""
        board, here = dispatcher().board, replace(self.sent, seen_wanted_engine_id=wanted_id)
        # Its own entry would count against the engine that it stands at.
        self._leave_board()
        try:
            sent = await self._wanted(wanted_id, failed) or here
        except EngineError as nobody:
            logger.info("a wish cannot be met: %s", nobody)
            sent = here
        if sent.endpoint.engine_id == here.endpoint.engine_id:
            # Whatever stood against it, the wish is over.
            self.sent = here
            board.enter(here.endpoint, here.missing_tokens)
            self._stands = True
        else:
            self.sent = sent
            self._tries -= 1
            await self.take_place()
        self.record.planned_anew(**planned(self.sent))

    async def _wanted(self, wanted_id: int, failed: list[EngineEndpoint]) -> Dispatched | None:
        """The request chosen for once more; None where the engine on which it is wanted takes none. Raises as `choose` does."""
        serving = [one for one in await dispatcher().ready.of(self.call.model) if one not in failed]
        if all(one.engine_id != wanted_id for one in serving):
            return None
        return await dispatcher().choose(self.call, self.identity, self.wishes, failed, wanted_id)

    async def _leased(self) -> Lease | None:
        """None for what needs none."""
        if not self.call.dialect.is_turn:
            return None
        sent = self.sent
        lease = await lease_desk().acquire(self.request_id, sent.session, sent.ranked, sent.limits, self.idempotency)
        if lease.outcome == "duplicate":
            raise RequestInProgress("A request with this Idempotency-Key is being answered.")
        if lease.engine_id is None:
            raise dispatcher().busy(sent.endpoint.model_name)
        return lease

    def begin_split(self) -> None:
        """Where two engines are to share the request: it goes to the first, and the second is told to take it over."""
        sent = self.sent
        if sent.decode is not None and self.call.dialect.is_turn:
            engines = (sent.endpoint, sent.decode)
            self.split = Split(self.request_id, sent.session, engines, lease_desk(), dispatcher().board)
            self.split.begin(sent.decode_limit, self.record.begun)
            self.record.split = self.split

    def follower(self, created: Callable[[], int] = lambda: 0) -> Follower:
        """`created` as in `Follower`."""
        return Follower(self.call, self.request_id, self.headers, created)

    def headers(self) -> dict[str, str]:
        """Who asks, how long it may take, and how the answer can be followed."""
        dialect, sent = self.call.dialect, self.sent
        headers: dict[str, str] = {}
        if dialect.is_turn:
            headers[TENANT_HEADER] = self.identity.owner.tenant
            if sent.session:
                headers[SESSION_HEADER] = sent.session
            headers[BUDGET_HEADER] = f"{self.left_s:.3f}"
            if sent.stores:
                headers[RESUME_HEADER] = ",".join(sent.stores[:MAX_STORES])
            if dialect.path in FOLLOWED:
                headers[FOLLOWS_HEADER] = "1"
            if self.call.stream:
                headers[JOURNAL_HEADER] = "1"
        return headers

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
        self._leave_board()
        if self.split is not None:
            self.split.abandon(f"{self.sent.endpoint.name} did not go on with it")

    def leave(self) -> None:
        """The engine is done with it."""
        self._leave_board()
        if self.split is not None:
            self.split.release()
        lease_desk().release(self.request_id)
        told = self.record.tokens
        dispatcher().learn(self.identity, self.call, self.sent, *told)
        self._compare()

    def _compare(self) -> None:
        """Have learned what the first token really took, where the engine that was chosen did all of it."""
        explanation, answered = self.sent.routed.explanation, self.record.answered()
        chosen, engine = explanation.chosen, self.sent.endpoint
        if answered is not None and chosen is not None and chosen.engine_id == engine.engine_id and self._tries == 1:
            dispatcher().board.answered(engine, chosen, explanation.prompt_tokens, answered)

    def _leave_board(self) -> None:
        if self._stands:
            self._stands = False
            dispatcher().board.leave(self.sent.endpoint)

    async def choose_another(self, refusal: EngineError, failed: list[EngineEndpoint]) -> bool:
        """Whether there is another engine for it; then `sent` names that."""
        refusing = failed[-1]
        try:
            if refusal.code == ContextLengthExceeded.code:
                # Nor do those take it whose context is no longer.
                serving = await dispatcher().ready.of(self.call.model)
                failed += [one for one in serving if one.context_tokens <= refusing.context_tokens]
            self.sent = await dispatcher().choose(self.call, self.identity, self.wishes, failed)
        except EngineError as nobody:
            logger.info("nobody else serves this: %s", nobody)
            return False
        logger.info("engine %s cannot take the request (%s), trying another", refusing.name, refusal.code)
        return True


def time_up() -> DeadlineExceeded:
    return DeadlineExceeded(
        "The request's time was up before an engine had answered.",
        hint="Give it more time with X-Hydra-Timeout, or send it again when the pool is less busy.",
    )


async def send(request: RelayedRequest) -> aiohttp.ClientResponse:
    """The chosen engine's response, or that of the best other one when that one cannot take the request now.

    The place on the engine is the caller's as long as the response is open, and given back when this raises.
    """
    failed: list[EngineEndpoint] = []
    for tries_left in reversed(range(MOST_TRIES)):
        try:
            await request.take_first_place(failed)
        except BaseException:
            request.step_back()
            lease_desk().release(request.request_id)
            raise
        engine = request.sent.endpoint
        request.begin_split()
        try:
            async with request.in_time():
                response = await _post(request)
                if response.status == 200:
                    return response
                refusal: EngineError = await refusal_of(response)
                if refusal.code == GenerationMoved.code and refusal.param:
                    return await _moved_answer(request, refusal.param)
        except _NotContinued as lost:
            # The engine that it moved away from did all it was asked to.
            logger.warning("request %s moved, and nobody goes on with it: %s", request.request_id, lost.error)
            engine = lost.target or engine
            if isinstance(lost.error, EngineUnreachable):
                await written(engines.suspect, engine)
            refusal = EngineUnreachable(
                "The engine that took the request over does not go on with it.", hint="Try again shortly."
            )
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
        is_too_long = refusal.code == ContextLengthExceeded.code
        may_go_on = tries_left and (is_too_long or refusal.http_status in TRY_ANOTHER)
        if may_go_on and not is_too_long and refusal.http_status != 429:
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
    dialect, headers = call.dialect, request.headers()
    request.record.mark("sent_s")
    return await EngineClient(sent.endpoint.base_url, sent.endpoint.secret).call(
        dialect.method,
        dialect.path,
        call.raw,
        request_id=str(request.request_id),
        silence_s=READ_SILENCE_S if call.stream else dialect.answer_timeout_s,
        headers=headers,
    )


class _NotContinued(Exception):
    """A request moved, and its answer is not to be had where it went."""

    def __init__(self, target: EngineEndpoint | None, error: EngineError) -> None:
        super().__init__(str(error))
        self.target, self.error = target, error


async def _moved_answer(request: RelayedRequest, handoff: str) -> aiohttp.ClientResponse:
    """An answer in one piece whose generation moved before it was done, from the engine where it ends."""
    for _ in range(MOST_MOVES):
        follower = request.follower()
        try:
            follower.moved = True
            follower.expect(handoff)
            arrived = await follower.arrived()
        except GenerationMoved as moved:
            handoff = moved.param or ""
            continue
        except (EngineUnreachable, HandoffUnknown) as error:
            raise _NotContinued(follower.target, error) from error
        finally:
            follower.close()
        request.moved_to(arrived.endpoint)
        return arrived.response
    raise EngineUnreachable("The request moved on and on.")


async def refusal_of(response: aiohttp.ClientResponse) -> EngineRefused:
    """What an engine answered instead of 200. Raises EngineUnreachable when it went away over it."""
    try:
        body = await bounded(response, MAX_REFUSAL_BYTES)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise EngineUnreachable("The engine went away before it had answered.") from error
    finally:
        response.close()
    return EngineRefused.of(response.status, body, response.headers.get("Retry-After"))


async def bounded(response: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
    """The whole body. Raises ClientPayloadError for a longer one."""
    body = bytearray()
    async for data in response.content.iter_any():
        body += data
        if len(body) > limit_bytes:
            raise aiohttp.ClientPayloadError(f"an answer of more than {limit_bytes} bytes")
    return bytes(body)
