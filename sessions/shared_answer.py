"""One answer for several connections that ask the same: retries under one Idempotency-Key, and equal requests of one owner
whose answer does not depend on chance.

The first one's request runs, the others read along from the beginning. With an Idempotency-Key it goes on for a while after
everybody left, so that a client that gave up too early and tries again finds it further on, not at its start. Of this process:
on another replica a request with the key waits until the first one has ended (`sessions.leases`), and is refused if that lasts.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from engines.errors import EngineError, InvalidRequest
from sessions.engine_call import EngineCall
from sessions.identity import Identity
from sessions.per_loop import PerLoop
from sessions.relay import EngineAnswer

MAX_SHARED = 256
MAX_SHARED_BYTES = 64 << 20
# How long a request with a key goes on for nobody, and how long its answer can be had again.
LINGER_S = 30.0
KEPT_S = 60.0

Ask = Callable[[], Awaitable[EngineAnswer]]


@dataclass(eq=False)
class _Shared:
    """A request that runs once. `blocks` are its frames, or its one body; `changed` is set anew for each."""

    body_hash: str
    lasting: bool
    work: asyncio.Task[None] | None = None
    opened: asyncio.Future[EngineAnswer] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    blocks: list[bytes] = field(default_factory=list)
    size_bytes: int = 0
    over: bool = False
    failure: EngineError | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    readers: int = 0
    ending: asyncio.TimerHandle | None = None

    def wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class SharedReader:
    """An answer as one of its readers has it: what `EngineAnswer` offers to whoever passes it on."""

    def __init__(self, shared: _Shared, answer: EngineAnswer, leave: Callable[[], None]) -> None:
        self.answer = answer
        self.is_stream = answer.is_stream
        self.content_type = answer.content_type
        self.request_id = answer.request_id
        self._shared = shared
        self._leave = leave
        self._left = False

    async def raw(self) -> AsyncIterator[bytes]:
        position = 0
        while True:
            changed = self._shared.changed
            while position < len(self._shared.blocks):
                position += 1
                yield self._shared.blocks[position - 1]
            if self._shared.over:
                return
            await changed.wait()

    async def read(self) -> bytes:
        blocks = [block async for block in self.raw()]
        if self._shared.failure is not None:
            raise self._shared.failure
        return b"".join(blocks)

    async def aclose(self) -> None:
        if not self._left:
            self._left = True
            self._leave()


class SharedAnswers:
    """The shared requests of this process. Used on one event loop only."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, ...], _Shared] = {}

    async def join(self, call: EngineCall, identity: Identity, idempotency: str, ask: Ask) -> SharedReader:
        """Read the answer of the same request, or begin it. Raises what `ask` does, and InvalidRequest for a key that was used
        for another request."""
        body_hash = hashlib.sha256(call.raw).hexdigest()
        key = (identity.owner.scope, identity.key_hash, call.dialect.path, idempotency or body_hash)
        if idempotency:
            key = (identity.owner.scope, idempotency)
        shared = self._running.get(key)
        if shared is None:
            self._make_room()
            shared = self._running[key] = _Shared(body_hash, lasting=bool(idempotency))
            shared.work = asyncio.create_task(self._run(key, shared, ask), name="shared-answer")
        elif shared.body_hash != body_hash:
            raise InvalidRequest("This Idempotency-Key was sent with another request.", param="Idempotency-Key")
        shared.readers += 1
        if shared.ending is not None:
            shared.ending.cancel()
            shared.ending = None
        try:
            answer = await asyncio.shield(shared.opened)
        except BaseException:
            self._leave(key, shared)
            raise
        return SharedReader(shared, answer, lambda: self._leave(key, shared))

    async def _run(self, key: tuple[str, ...], shared: _Shared, ask: Ask) -> None:
        answer: EngineAnswer | None = None
        try:
            answer = await ask()
            shared.opened.set_result(answer)
            if answer.is_stream:
                async for block in answer.raw():
                    self._add(shared, block)
            else:
                self._add(shared, await answer.read())
        except EngineError as error:
            shared.failure = error
            self._forget(key, shared)
            if not shared.opened.done():
                shared.opened.set_exception(error)
                # Whoever waits for it raises it; if nobody does any more, it was nobody's.
                shared.opened.exception()
        finally:
            shared.over = True
            if not shared.opened.done():
                shared.opened.cancel()
            shared.wake()
            if answer is not None:
                await answer.aclose()
            if shared.lasting and shared.failure is None:
                asyncio.get_running_loop().call_later(KEPT_S, self._forget, key, shared)
            else:
                self._forget(key, shared)

    def _add(self, shared: _Shared, block: bytes) -> None:
        shared.blocks.append(block)
        shared.size_bytes += len(block)
        shared.wake()

    def _leave(self, key: tuple[str, ...], shared: _Shared) -> None:
        shared.readers -= 1
        if shared.readers or shared.over:
            return
        if shared.lasting:
            shared.ending = asyncio.get_running_loop().call_later(LINGER_S, self._stop, key, shared)
        else:
            self._stop(key, shared)

    def _stop(self, key: tuple[str, ...], shared: _Shared) -> None:
        self._forget(key, shared)
        if shared.work is not None and not shared.readers:
            shared.work.cancel()

    def _forget(self, key: tuple[str, ...], shared: _Shared) -> None:
        if self._running.get(key) is shared:
            del self._running[key]

    def _make_room(self) -> None:
        """Answers that have ended go first; the oldest of those that run can be joined no longer."""
        held = sum(shared.size_bytes for shared in self._running.values())
        while self._running and (len(self._running) >= MAX_SHARED or held > MAX_SHARED_BYTES):
            key = next((key for key, shared in self._running.items() if shared.over), next(iter(self._running)))
            held -= self._running.pop(key).size_bytes


shared_answers = PerLoop(SharedAnswers)


def may_share(call: EngineCall, idempotency: str) -> bool:
    """Whether an equal request of the same owner may have the same answer."""
    return call.is_conversation and bool(idempotency or call.hints.deterministic)


def lease_name(identity: Identity, idempotency: str) -> str:
    """What other replicas know the request by; "" without a key."""
    return hashlib.sha256(f"{identity.owner.scope}\n{idempotency}".encode()).hexdigest() if idempotency else ""
