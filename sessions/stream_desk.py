"""Where kept streams are begun, found, stopped and forgotten. One desk for each site process; see `sessions.kept_stream`."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from engines.errors import EngineError, InvalidRequest
from sessions.dialects import STREAMED
from sessions.dispatch import NO_WISHES, Wishes
from sessions.engine_call import EngineCall
from sessions.errors import StreamStopped, StreamUnknown, TooManyStreams
from sessions.identity import Identity, Owner
from sessions.kept_stream import KeptStream
from sessions.per_loop import PerLoop
from sessions.relay import EngineAnswer, ask_engine, resume
from sessions.stream_journal import StreamJournal
from sessions.stream_shelf import Ended, Shelved, StreamShelf, Taken

MAX_NAME_CHARS = 256
# All streams are weighed against their bound each time they have grown by this part of it.
WEIGH_SHARE = 64

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StreamBounds:
    """`keep_s`: how long an ended stream can still be read; `unread_s`: how long one goes on for nobody."""

    total_bytes: int = 128 << 20
    streams_per_owner: int = 32
    streams: int = 512
    keep_s: float = 600.0
    unread_s: float = 600.0


class StreamDesk:
    """The kept streams of this process, each under its request's id and the conversation's, within its owner's scope."""

    def __init__(self, bounds: StreamBounds = StreamBounds()) -> None:
        self._bounds = bounds
        self._streams: dict[uuid.UUID, KeptStream] = {}
        self._tasks: dict[uuid.UUID, asyncio.Task[None]] = {}
        self._shelf = StreamShelf()
        self._taking = asyncio.Lock()
        self._unweighed_bytes = 0

    async def begin(
        self,
        call: EngineCall,
        identity: Identity,
        conversation_id: str,
        wishes: Wishes = NO_WISHES,
        idempotency: str = "",
    ) -> KeptStream:
        """Have a request answered into a kept stream, and return that once the engine has taken it.

        Another stream of the same conversation is stopped first, one at another replica soon after: a new turn is the old one's
        end. A retry under an `idempotency` name reads the first one's stream. Raises TooManyStreams, InvalidRequest for a name
        that was used for another request, or what `ask_engine` raises. Giving up waiting does not end the request: only `stop`
        does, or nobody reading it for long.
        """
        scope, began_s = identity.owner.scope, time.monotonic()
        body_hash = hashlib.sha256(call.raw).hexdigest()
        first = self._same(scope, idempotency, body_hash)
        if first is not None:
            await asyncio.shield(first.opened)
            return first
        # Again and again: while one was being stopped another turn of the conversation may have begun.
        while conversation_id and (former := self._named(scope, conversation_id)) is not None and not former.is_over:
            await self.stop(former)
        self._admit(scope)
        stream = KeptStream(uuid.uuid4(), scope, conversation_id, call.dialect.path)
        stream.idempotency, stream.body_hash = idempotency, body_hash
        about = Shelved(
            str(stream.request_id),
            identity.key_hash,
            conversation_id,
            call.dialect.path,
            round(stream.created_at, 3),
            wishes.budget_s,
            wishes.background,
            idempotency,
            body_hash,
            wishes.ends_session,
        )
        ask = partial(ask_engine, call, identity, request_id=stream.request_id, wishes=wishes, since_s=began_s)
        self._open(stream, about, call.raw, partial(ask, idempotency=idempotency), began_s)
        await asyncio.shield(stream.opened)
        return stream

    def _same(self, scope: str, idempotency: str, body_hash: str) -> KeptStream | None:
        """The stream that a request of this name began and that has not broken off."""
        for stream in self.of_owner(scope) if idempotency else ():
            if stream.idempotency == idempotency and stream.state in ("opening", "running", "done"):
                if stream.body_hash != body_hash:
                    raise InvalidRequest("This Idempotency-Key was sent with another request.", param="Idempotency-Key")
                return stream
        return None

    async def found(self, owner: Owner, name: str) -> KeptStream:
        """As `find`; a stream that another replica reads is read here from now on. Raises StreamUnknown, and as `resume`."""
        try:
            stream = self.find(owner.scope, name)
        except StreamUnknown:
            # One at a time: a client that asks twice must not take it twice. But none waits for another's engine.
            async with self._taking:
                try:
                    stream = self.find(owner.scope, name)
                except StreamUnknown:
                    taken = await self._take(owner.scope, name[:MAX_NAME_CHARS])
                    if taken is None:
                        raise
                    stream = self._rewritten(owner, taken)
        if stream.is_rewritten:
            await asyncio.shield(stream.opened)
        return stream

    async def _take(self, scope: str, name: str) -> Taken | None:
        """None where no replica has one of this name. Raises TooManyStreams before the other one gives it up: what is taken must
        find a place here."""
        try:
            self._ended_to_drop(scope)
        except TooManyStreams:
            if not await self._shelf.has(scope, name):
                return None
            raise
        return await self._shelf.take(scope, name)

    def _rewritten(self, owner: Owner, taken: Taken) -> KeptStream:
        about, request_id = taken.about, uuid.UUID(taken.about.request_id)
        call = STREAMED[about.path].read(taken.body)
        journal = StreamJournal(taken.journal)
        self._admit(owner.scope)
        stream = KeptStream(request_id, owner.scope, about.conversation_id, about.path, is_rewritten=True)
        stream.created_at = about.created_at
        stream.idempotency, stream.body_hash = about.idempotency, about.body_hash
        identity = Identity(owner, about.key_hash)
        wishes = Wishes(background=about.background, budget_s=about.budget_s, ends_session=about.ends_session)
        ask = partial(
            resume, call, identity, request_id, journal, taken.age_s, wishes=wishes, idempotency=about.idempotency
        )
        self._open(stream, about, taken.body, ask, time.monotonic() - taken.age_s, taken.number)
        return stream

    def _open(
        self,
        stream: KeptStream,
        about: Shelved,
        body: bytes,
        ask: Callable[[], Awaitable[EngineAnswer]],
        arrived_at: float,
        number: int = 0,
    ) -> None:
        """Have `ask`'s answer read into the stream, which tells when the engine has taken the request. That came to the site at
        `arrived_at` (monotonic)."""
        self._streams[stream.request_id] = stream

        async def asked() -> EngineAnswer:
            answer = await ask()
            lost = partial(self._lost, stream)
            self._shelf.keep(stream.request_id, stream.scope, about, body, answer.journal, lost, arrived_at, number)
            return answer

        task = asyncio.create_task(self._fill(stream, asked), name=f"stream-{stream.request_id}")
        self._tasks[stream.request_id] = task
        task.add_done_callback(lambda ended: self._settle(stream, ended))

    def _lost(self, stream: KeptStream, was_stopped: bool) -> None:
        """Another replica reads it now, or has stopped it."""
        if was_stopped:
            logger.info("stream %s was stopped at another replica", stream.request_id)
            stream.end("stopped")
        else:
            logger.info("stream %s was taken over by another replica", stream.request_id)
            stream.end("taken")
            if stream.answer is not None:
                stream.answer.hand_over()
        task = self._tasks.get(stream.request_id)
        if task is not None:
            task.cancel()

    def find(self, scope: str, name: str) -> KeptStream:
        """The owner's stream with this request id, else the last one of this conversation. Raises StreamUnknown."""
        try:
            stream = self._streams.get(uuid.UUID(name))
        except ValueError:
            stream = None
        if stream is None or stream.scope != scope:
            stream = self._named(scope, name)
        if stream is None or stream.state == "taken":
            raise StreamUnknown(f"There is no stream {name[:128]!r}.")
        return stream

    def of_owner(self, scope: str) -> list[KeptStream]:
        """The owner's streams, the newest first."""
        return [stream for stream in reversed(self._streams.values()) if stream.scope == scope]

    async def stop_named(self, owner: Owner, name: str) -> KeptStream | Ended:
        """End the owner's stream of this name, wherever it is read: it needs no place here for that. Raises StreamUnknown."""
        try:
            stream = self.find(owner.scope, name)
        except StreamUnknown:
            elsewhere = await self._shelf.stop(owner.scope, name[:MAX_NAME_CHARS])
            if elsewhere is None:
                raise
            return elsewhere
        await self.stop(stream)
        return stream

    async def stop(self, stream: KeptStream) -> None:
        """End the request at its engine; what came so far is kept as long as any ended stream. Safe to call again."""
        is_running = not stream.is_over
        await self._ended(stream)
        if is_running:
            await self._shelf.forget(stream.scope, stream.request_id, was_taken=stream.is_rewritten)

    async def _ended(self, stream: KeptStream) -> None:
        stream.end("stopped")
        task = self._tasks.get(stream.request_id)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def close(self) -> None:
        """End all streams; for a site that is about to stop. Another replica can go on with them."""
        for stream in list(self._streams.values()):
            await self._ended(stream)
        await self._shelf.close()

    async def _fill(self, stream: KeptStream, ask: Callable[[], Awaitable[EngineAnswer]]) -> None:
        """Read the answer into the stream to its end, to `stop`, or until nobody has read it for long."""
        try:
            answer = await ask()
            try:
                stream.begin(answer)
                async for frames in answer.raw():
                    before_bytes = stream.size_bytes
                    stream.add(frames)
                    self._make_room(max(0, stream.size_bytes - before_bytes))
                    if not stream.readers and time.monotonic() - stream.unread_since_s > self._bounds.unread_s:
                        logger.info("stream %s is stopped: nobody reads it", stream.request_id)
                        stream.end("stopped")
                        return
                stream.end("done" if answer.is_finished else "failed")
            finally:
                self._shelf.end(stream.request_id)
                await answer.aclose()
        except EngineError as error:
            self._streams.pop(stream.request_id, None)
            stream.fail(error)

    def _settle(self, stream: KeptStream, task: asyncio.Task[None]) -> None:
        """However filling ended, nobody waits for more, and the stream is forgotten in time."""
        del self._tasks[stream.request_id]
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("stream %s broke", stream.request_id, exc_info=error)
        stream.fail(error or StreamStopped("The stream was stopped before the engine had answered."))
        asyncio.get_running_loop().call_later(self._bounds.keep_s, self._forget, stream)

    def _forget(self, stream: KeptStream) -> None:
        """Unless a later one has its id: what went to another replica may have come back."""
        if self._streams.get(stream.request_id) is stream:
            del self._streams[stream.request_id]

    def _named(self, scope: str, conversation_id: str) -> KeptStream | None:
        return next((stream for stream in self.of_owner(scope) if stream.conversation_id == conversation_id), None)

    def _admit(self, scope: str) -> None:
        """Make place for one more stream, by forgetting the oldest ended one. Raises TooManyStreams."""
        for stream in self._ended_to_drop(scope):
            self._streams.pop(stream.request_id, None)

    def _ended_to_drop(self, scope: str) -> list[KeptStream]:
        """Ended streams that one more would push out. Raises TooManyStreams where none has ended."""
        found = []
        for bound, streams in (
            (self._bounds.streams_per_owner, self.of_owner(scope)),
            (self._bounds.streams, list(reversed(self._streams.values()))),
        ):
            if len(streams) < bound:
                continue
            ended = [stream for stream in streams if stream.is_over]
            if not ended:
                raise TooManyStreams(f"{len(streams)} resumable streams are running; that is the bound.")
            found.append(ended[-1])
        return found

    def _make_room(self, added_bytes: int) -> None:
        """Keep all streams together within their bound: ended ones go first, the oldest first, then the longest loses events."""
        # Looking at all of them for each frame of each would grow with their square.
        self._unweighed_bytes += added_bytes
        if self._unweighed_bytes < self._bounds.total_bytes // WEIGH_SHARE:
            return
        self._unweighed_bytes = 0
        while sum(stream.size_bytes for stream in self._streams.values()) > self._bounds.total_bytes:
            ended = next((stream for stream in self._streams.values() if stream.is_over), None)
            if ended is not None:
                del self._streams[ended.request_id]
            else:
                max(self._streams.values(), key=lambda stream: stream.size_bytes).drop_oldest()


stream_desk = PerLoop(StreamDesk)
