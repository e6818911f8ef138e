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
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Literal, TypeVar

import aiohttp

from engines.errors import DeadlineExceeded, EngineError, EngineUnreachable, ModelLoading
from engines.services import EngineEndpoint
from sessions.choices import ChatSource, TurnState
from sessions.dispatch import NO_WISHES, Dispatched, Wishes
from sessions.engine_call import EngineCall
from sessions.failover import Failover
from sessions.follow import Follower
from sessions.identity import Identity
from sessions.relayed_request import RelayedRequest, bounded, dispatcher, send, time_up
from sessions.request_timeline import tell_refused
from sessions.services import TurnStart
from sessions.split import Split
from sessions.stream_journal import StreamJournal
from sessions.turn import TurnRecord
from sessions.turn_plan import planned

MAX_FRAME_BYTES = 16 << 20
MAX_ANSWER_BYTES = 64 << 20
# Reading the facts of more than this would hold every other stream of the process up for too long.
READ_INLINE_BYTES = 64 << 10
EVENT_STREAM = "text/event-stream"
# While the site waits for whoever goes on with an answer: as often as while a model is loaded.
PING_S = 2.0
COMMENT_PING = b": ping\n\n"

T = TypeVar("T")

logger = logging.getLogger(__name__)


class EngineAnswer:
    """An engine's answer in the middle of coming. Read it by `raw()`, by iterating, or by `read()`, once; then `aclose()`.

    `aclose()` before the end cancels the request at the engine's next step. Whatever happens, the turn's end is written and the
    place on the engine is given back.
    """

    def __init__(
        self, response: aiohttp.ClientResponse, request: RelayedRequest, journal: StreamJournal | None = None
    ) -> None:
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
        self._is_late = False
        self._ending = asyncio.get_running_loop().call_later(request.patience_s, self._end_reading)
        self._journal = journal or StreamJournal()
        self._follower = self._new_follower()
        self._journal.on_move = lambda frame: self._follower.heard(frame)
        self._failover = Failover(request, self._journal)

    def _new_follower(self) -> Follower:
        return self._request.follower(lambda: self._journal.created)

    @property
    def split(self) -> Split | None:
        """The two engines that share it; also where one of them did it all in the end."""
        return self._request.split

    @property
    def route(self) -> str:
        """The form in which it is answered, as far as that is known by now."""
        split = self._request.split
        if split is not None and self._record.is_finished and self.engine != split.decode:
            return "solo"  # what became of the move will be known in a moment
        return self._request.route

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

    @property
    def journal(self) -> StreamJournal:
        """What another replica would need to go on with the stream."""
        return self._journal

    def hand_over(self) -> None:
        """Another replica goes on with it; `aclose` is still to come."""
        self._record.hand_over()

    def lost_frame(self, error: EngineError) -> bytes:
        """The frame that tells a client, in the answer's own dialect, that the stream breaks here."""
        return self._record.lost_frame(error)

    async def raw(self) -> AsyncIterator[bytes]:
        """The answer's SSE frames as the engine wrote them, always whole.

        Where the generation moves to another engine, or the engine is lost and another one can go on, the frames go on from
        there, after pings for as long as that takes; where nobody can, an error frame is the last.
        """
        while True:
            lost: Exception | None = None
            try:
                async for frames in self._frames():
                    self._record.saw(frames)
                    yield frames
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                lost = error
            if not self._is_late and (self._follower.moved or (lost is not None and self._follower.expects)):
                async with _beside(self._go_along(), f"continuation-{self.request_id}") as going_along:
                    while not await _is_done(going_along):
                        yield COMMENT_PING
                try:
                    going_along.result()
                    continue
                except EngineError as error:
                    lost = lost or error
            if self._journal.is_closed or not (lost or self._journal.is_cut):
                break
            if self._is_late:
                yield self._broken(time_up())
                return
            async with _beside(self._failover.go_on(self._lost_engine), f"failover-{self.request_id}") as failing_over:
                while not await _is_done(failing_over):
                    yield COMMENT_PING
            if failing_over.exception() is not None:
                yield self._died(lost, failing_over.exception())
                return
            self._take(failing_over.result())
        self._record.end(*self._outcome())

    def _outcome(self) -> tuple[TurnState, str]:
        """The engine ends an answer it has to give up with an error frame of its own, and then without a finish."""
        return (TurnState.DONE, "") if self._record.is_finished else (TurnState.FAILED, "engine_error")

    async def _frames(self) -> AsyncIterator[bytes]:
        """One engine's whole frames, without those that are between it and the site."""
        pending = b""
        async for data in self._response.content.iter_any():
            pending += data
            end = pending.rfind(b"\n\n") + 2
            if end >= 2:
                frames, pending = pending[:end], pending[end:]
                frames = self._journal.shown(frames)
                if self._journal.has_gap:
                    # What it writes leads nowhere.
                    self._response.close()
                    raise aiohttp.ClientPayloadError("some of the answer was lost on its move")
                if frames:
                    yield frames
            elif len(pending) > MAX_FRAME_BYTES:
                raise aiohttp.ClientPayloadError("a frame without an end")
        if not self._journal.is_cut and (held := self._journal.held()):
            yield held

    async def _go_along(self) -> None:
        """Read on at the engine that the generation moved to. Raises an EngineError where it did not get there."""
        async with self._request.in_time():
            arrived = await self._follower.arrived()
        self._response.close()
        self._response, self.engine = arrived.response, arrived.endpoint
        self._request.moved_to(arrived.endpoint)
        await self._journal.goes_along()

    @property
    def _lost_engine(self) -> EngineEndpoint | None:
        """Who did not do its part, where the answer is broken off. The engine that a request has moved away from did."""
        if self._journal.has_gap:
            return None
        return self._follower.lost if self._follower.moved else self._request.sent.endpoint

    def _take(self, response: aiohttp.ClientResponse) -> None:
        """Read on at the engine that takes a lost one's place."""
        self._follower.close()
        self._follower = self._new_follower()
        self._journal.goes_on()
        self._response.close()
        self._response, self.engine, self.sent = response, self._request.sent.endpoint, self._request.sent

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        """The answer's chunks as values, without comments and without the closing [DONE]."""
        async for frames in self.raw():
            for frame in frames.split(b"\n\n"):
                if frame.startswith(b"data: {"):
                    yield json.loads(frame[6:])

    async def read(self) -> bytes:
        """The whole answer of a request that does not stream. Raises EngineUnreachable when the engine dies over it."""
        try:
            body = await bounded(self._response, MAX_ANSWER_BYTES)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            gone = EngineUnreachable("The engine went away before it had answered.")
            failure: EngineError = time_up() if self._is_late else gone
            self._record.end(TurnState.FAILED, failure.code)
            failure.request_id = str(self.request_id)
            raise failure from error
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
        self._ending.cancel()
        self._follower.close()
        self._request.leave()
        self._record.end(TurnState.DONE if self._record.is_finished else TurnState.CANCELLED)
        if self._response.content.at_eof():
            self._response.release()
        else:
            # Not release(): that would read on. A closed connection is what tells the engine to stop.
            self._response.close()

    def _died(self, lost: Exception | None, nobody: BaseException | None) -> bytes:
        """The end of a stream that nobody goes on with."""
        logger.warning("engine %s was lost in the middle of an answer (%r), and %r", self.engine.name, lost, nobody)
        if isinstance(nobody, DeadlineExceeded):
            return self._broken(nobody)
        error = EngineUnreachable("The engine went away in the middle of the answer.", hint="Send the request again.")
        self._record.end(TurnState.FAILED, error.code)
        return self._journal.held() or self._record.lost_frame(error)

    def _broken(self, error: EngineError) -> bytes:
        """What is left to be shown of a stream that its engine did not end, and why it ends."""
        self._record.end(TurnState.FAILED, error.code)
        return self._journal.held() + self._record.lost_frame(error)

    def _end_reading(self) -> None:
        """The request's time is up and its engine has not ended it: whoever reads waits no longer."""
        logger.warning("engine %s has not ended request %s in time", self.engine.name, self.request_id)
        self._is_late = True
        self._response.content.set_exception(TimeoutError("The request's time is up."))


@asynccontextmanager
async def _beside(work: Coroutine[Any, Any, T], name: str) -> AsyncIterator[asyncio.Task[T]]:
    """Have it done while the client is kept in touch; a client that leaves meanwhile ends it, and what it has opened."""
    task = asyncio.create_task(work, name=name)
    try:
        yield task
    except BaseException:
        task.cancel()
        task.add_done_callback(_let_go)
        raise


async def _is_done(task: asyncio.Task[Any]) -> bool:
    """Once it is, or after PING_S."""
    return bool((await asyncio.wait((task,), timeout=PING_S))[0])


def _let_go(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and task.exception() is None and task.result() is not None:
        task.result().close()


async def ask_engine(
    call: EngineCall,
    identity: Identity,
    source: Literal["api", "playground"] = "api",
    *,
    request_id: uuid.UUID | None = None,
    wishes: Wishes = NO_WISHES,
    idempotency: str = "",
    may_wait: bool = False,
    headers_sent_s: float | None = None,
    since_s: float | None = None,
) -> EngineAnswer:
    """Send a request to the engine that the router chooses, and return its answer as it begins to come.

    With `may_wait` ModelLoading is no end of the request, which is asked again; its event is then still to come.
    `headers_sent_s` (monotonic) is when the headers of such a stream left, `since_s` when its budget of time began, if not now;
    the turn's own times are from now on. Raises ModelNotFound, NoEngineReady,
    EngineUnreachable, PoolBusy, RequestInProgress, or EngineRefused with what the engine answered.
    """
    arrived_s = time.monotonic()
    request_id = request_id or uuid.uuid4()
    try:
        sent = await dispatcher().choose(call, identity, wishes)
    except Exception as error:
        if not (may_wait and isinstance(error, ModelLoading)):
            is_background = wishes.background or call.hints.background
            told = {"arrived_s": arrived_s, "is_background": is_background, "headers_sent_s": headers_sent_s}
            tell_refused(call, identity, request_id, error, **told)
        raise
    # Written before the engine is asked: an answer in one piece begins to come only when it is done.
    start = _start(call, identity, source, request_id, sent, wishes)
    record = TurnRecord(start, arrived_s, call.dialect, headers_sent_s)
    record.mark("routed_s")
    began_s = arrived_s if since_s is None else since_s
    request = RelayedRequest(call, identity, request_id, sent, record, wishes, began_s, idempotency)
    try:
        response = await send(request)
    except EngineError as error:
        error.request_id = str(request_id)
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


async def resume(
    call: EngineCall,
    identity: Identity,
    request_id: uuid.UUID,
    journal: StreamJournal,
    elapsed_s: float,
    *,
    wishes: Wishes = NO_WISHES,
    idempotency: str = "",
) -> EngineAnswer:
    """The answer to a request that another replica had, from its first event on; it came there `elapsed_s` ago.

    Raises as `ask_engine` does.
    """
    arrived_s = time.monotonic() - elapsed_s
    try:
        sent = await dispatcher().choose(call, identity, wishes)
    except Exception as error:
        tell_refused(call, identity, request_id, error, arrived_s=arrived_s, is_background=call.hints.background)
        raise
    start = _start(call, identity, "api", request_id, sent, wishes, resumed=True)
    record = TurnRecord(start, arrived_s, call.dialect)
    request = RelayedRequest(call, identity, request_id, sent, record, wishes, arrived_s, idempotency)
    try:
        async with request.in_time():
            response = await Failover(request, journal).placed(from_event=0)
    except BaseException as error:
        request.leave()
        record.end(TurnState.FAILED, error.code if isinstance(error, EngineError) else "internal_error")
        raise
    return EngineAnswer(response, request, journal)


def _start(
    call: EngineCall,
    identity: Identity,
    source: str,
    request_id: uuid.UUID,
    sent: Dispatched,
    wishes: Wishes,
    *,
    resumed: bool = False,
) -> TurnStart:
    return TurnStart(
        request_id,
        identity,
        ChatSource(source),
        call.hints.title,
        is_background=wishes.background or call.hints.background,
        request_bytes=len(call.raw),
        resumed=resumed,
        ends_session=wishes.ends_session,
        **planned(sent),
    )
