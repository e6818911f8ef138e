"""What another replica of the site needs to go on with a kept stream, in Valkey: the request, and the stream's journal.

A shelved stream has one owner, the replica that reads it from its engine. Whoever takes it becomes the owner under the next
number; what the former one still writes is refused, and tells it that the stream is another's now. All of it expires by itself.
Losing Valkey loses nothing else: streams go on where they are, and can be resumed there; their owners write them down again.

What was not answered in time may have been done all the same, or be done later. So everything that is written says what it
stands on, and comes to the same when it is done twice.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

import redis.asyncio
from celery import current_app
from redis.exceptions import RedisError

from pools.events import Outage
from sessions import shelf_scripts as scripts
from sessions.dispatch import REQUEST_BUDGET_S
from sessions.stream_journal import StreamJournal

# A client that lost its site comes back soon; a stream that has ended is kept as long as one in memory.
KEEP_S = 600
FLUSH_S, FIRST_S = 0.1, 0.01
# One that says nothing is looked after as often: another replica may have taken or stopped it.
LOOK_S = 2.0
PATIENCE_S = 2.0
MAX_BODY_BYTES = 4 << 20
# Of all that this process has written and that may still be there. Valkey has 256 MB for all replicas and for tasks and events.
MAX_SHELVED_BYTES = 64 << 20


@dataclass(frozen=True)
class Shelved:
    """Of whom a stream is and how its request was asked; `created_at` in seconds since 1970."""

    request_id: str
    key_hash: str
    conversation_id: str
    path: str
    created_at: float
    budget_s: float = REQUEST_BUDGET_S
    background: bool = False
    idempotency: str = ""
    body_hash: str = ""
    ends_session: bool = False

    @classmethod
    def of_json(cls, text: bytes | str) -> Shelved:
        """What a replica wrote, perhaps one of a newer release that tells more."""
        return cls(**{name: value for name, value in json.loads(text).items() if name in cls.__dataclass_fields__})


@dataclass(frozen=True)
class Taken:
    """A stream that is this replica's from now on, under `number`; its request came `age_s` ago."""

    about: Shelved
    body: bytes
    journal: bytes
    number: int
    age_s: float


@dataclass(frozen=True)
class Ended:
    """A stream that another replica reads, or has read, and its state from now on."""

    about: Shelved
    state: Literal["stopped", "done"]


@dataclass
class _Kept:
    """`is_there`: the request is written down under `number`, and `written_bytes` of the journal; `was_there`: it has been, and
    `charged_bytes` of all were counted; `was_sent`: it may be. `gave_up`: another replica has it, or has stopped it
    (`was_stopped`). `arrived_at`, `written_at`, `stopped_at` on the monotonic clock."""

    scope: str
    about: Shelved
    body: bytes
    journal: StreamJournal
    lost: Callable[[bool], None]
    arrived_at: float
    number: int
    is_there: bool
    was_there: bool = False
    written_bytes: int = 0
    charged_bytes: int = 0
    was_sent: bool = False
    written_at: float = 0.0
    ended: bool = False
    stopped_at: float | None = None
    gave_up: bool = False
    was_stopped: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        keys = _keys(self.scope, self.about.request_id)
        name = self.about.conversation_id
        return (*keys, _name_key(self.scope, name)) if name else keys

    @property
    def has_news(self) -> bool:
        """Also of one that says nothing for a while: nor is it to expire while it runs."""
        is_behind = self.written_bytes < len(self.journal.lines)
        return self.journal.is_kept and (is_behind or time.monotonic() - self.written_at > LOOK_S)


class StreamShelf:
    """Used on one event loop only. Whatever fails here is logged and keeps no stream from going on."""

    def __init__(self) -> None:
        self._kept: dict[uuid.UUID, _Kept] = {}
        # There while streams are kept or somebody asks.
        self._client: redis.asyncio.Redis | None = None
        self._asking = 0
        self._flushing: asyncio.Task[None] | None = None
        self._outage = Outage("streams cannot be resumed on another replica, Valkey does not answer")
        self._bytes = 0

    def keep(
        self,
        request_id: uuid.UUID,
        scope: str,
        about: Shelved,
        body: bytes,
        journal: StreamJournal,
        lost: Callable[[bool], None],
        arrived_at: float,
        number: int = 0,
    ) -> None:
        """Write the stream down while it runs, and its conversation's former one off; `lost` is called once another replica has
        taken (False) or stopped it (True). `number` 0: it is new."""
        if len(body) > MAX_BODY_BYTES or self._bytes > MAX_SHELVED_BYTES:
            return
        told = number > 0
        kept = _Kept(scope, about, body, journal, lost, arrived_at, number or 1, is_there=told, was_sent=told)
        if number:
            kept.was_there, kept.written_bytes, kept.written_at = True, len(journal.lines), time.monotonic()
            kept.charged_bytes = len(body) + kept.written_bytes  # by who had it
        self._kept[request_id] = kept
        if self._flushing is None:
            self._flushing = asyncio.create_task(self._run(), name="streams-shelve")

    def end(self, request_id: uuid.UUID) -> None:
        """The stream has ended; what is left of it is written."""
        kept = self._kept.get(request_id)
        if kept is not None:
            kept.ended = True

    async def forget(self, scope: str, request_id: uuid.UUID, *, was_taken: bool) -> None:
        """The stream was stopped: nobody goes on with it. Tried again while Valkey does not answer."""
        kept = self._kept.get(request_id)
        if kept is None:
            if was_taken:  # and stopped before its engine answered
                await self._stop(scope, str(request_id))
            return
        kept.stopped_at, kept.body, kept.journal = time.monotonic(), b"", StreamJournal()
        if not kept.was_sent or await self._forgotten(kept):
            self._kept.pop(request_id, None)

    async def _forgotten(self, kept: _Kept) -> bool:
        assert kept.stopped_at is not None
        if time.monotonic() - kept.stopped_at > KEEP_S:
            return True
        return await self._stop(kept.scope, kept.about.request_id)

    async def _stop(self, scope: str, request_id: str) -> bool:
        keys = _keys(scope, request_id)
        return bool(await self._asked(self._valkey().eval, scripts.FORGET, len(keys), *keys, KEEP_S))

    async def stop(self, scope: str, name: str) -> Ended | None:
        """Stop the scope's stream of this request id, else the last one of this conversation, whoever has it; who reads it ends
        it with its next line. None where there is none."""
        prefix, request_id = _keys(scope, "")[0], name if _is_id(name) else ""
        values = (_name_key(scope, name), prefix, request_id)
        answer = await self._asked(self._valkey().eval, scripts.STOP, 1, *values)
        if not answer:
            return None
        about, state = answer
        return Ended(Shelved.of_json(about), cast(Literal["stopped", "done"], state.decode()))

    async def has(self, scope: str, name: str) -> bool:
        """Whether `take` would find it."""
        if _is_id(name) and await self._asked(self._valkey().hexists, _keys(scope, name)[0], "about"):
            return True
        named = await self._asked(self._valkey().get, _name_key(scope, name))
        return bool(named and await self._asked(self._valkey().hexists, _keys(scope, named.decode())[0], "about"))

    async def take(self, scope: str, name: str) -> Taken | None:
        """The scope's stream of this request id, else the last one of this conversation, from whoever had it."""
        clock = await self._asked(self._valkey().time)
        if clock is None:
            return None
        until_s = clock[0] + clock[1] / 1e6 + PATIENCE_S
        found = await self._taken(scope, name, until_s) if _is_id(name) else None
        if found is None:
            named = await self._asked(self._valkey().get, _name_key(scope, name))
            found = await self._taken(scope, named.decode(), until_s) if named else None
        return found

    async def _taken(self, scope: str, request_id: str, until_s: float) -> Taken | None:
        keys = _keys(scope, request_id)
        answer = await self._asked(self._valkey().eval, scripts.TAKE, len(keys), *keys, until_s)
        if not answer:
            return None
        number, told, body, lines, age_s = answer
        about = Shelved.of_json(told)
        # A replica of the release before has not written when it came.
        return Taken(about, body, lines, int(number), max(0.0, float(age_s or time.time() - about.created_at)))

    async def close(self) -> None:
        """Write what is left; for a site that is about to stop."""
        if self._flushing is not None:
            self._flushing.cancel()
            await asyncio.wait([self._flushing])
        await self._flush()
        await self._disconnect()

    async def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _run(self) -> None:
        try:
            while self._kept:
                # A client may lose its site right after the first event.
                await asyncio.sleep(FLUSH_S if all(kept.was_sent for kept in self._kept.values()) else FIRST_S)
                await self._flush()
        finally:
            self._flushing = None
            if not self._asking:
                await self._disconnect()

    async def _flush(self) -> None:
        for request_id, kept in list(self._kept.items()):
            was_over = kept.ended
            if not await self._written(kept):
                self._kept.pop(request_id, None)
                if kept.gave_up:
                    kept.lost(kept.was_stopped)
            elif was_over and kept.written_bytes == len(kept.journal.lines):
                self._kept.pop(request_id, None)

    async def _written(self, kept: _Kept) -> bool:
        """False once there is no use in going on with it."""
        if kept.stopped_at is not None:
            return not await self._forgotten(kept)
        if not kept.has_news or self._outage.lasts:
            return not (kept.ended and (self._outage.lasts or not kept.journal.is_kept))
        said = await self._put(kept)
        if said == scripts.THERE:
            said = await self._add(kept)
        if said == scripts.NOT_THERE and kept.stopped_at is None:
            # Valkey has lost it: from the beginning, at once for a site that is about to stop.
            kept.is_there, kept.written_bytes = False, 0
            said = await self._put(kept)
            if said == scripts.THERE:
                said = await self._add(kept)
        kept.was_stopped = said == scripts.STOPPED_ELSEWHERE
        kept.gave_up = kept.stopped_at is None and (said == scripts.TAKEN or kept.was_stopped)
        return not kept.gave_up and not (said is None and kept.ended)

    async def _put(self, kept: _Kept) -> int | None:
        """The request, if it is not there. None where Valkey does not answer."""
        if kept.is_there:
            return scripts.THERE
        kept.was_sent = True
        about = json.dumps(asdict(kept.about))
        again, others, age_s = int(kept.was_there), _keys(kept.scope, "")[0], time.monotonic() - kept.arrived_at
        values = (kept.number, KEEP_S, about, kept.body, kept.about.request_id, again, others, f"{age_s:.3f}")
        said: int | None = await self._asked(self._valkey().eval, scripts.PUT, len(kept.keys), *kept.keys, *values)
        if said == scripts.THERE:
            kept.is_there = kept.was_there = True
            self._charge(kept)
        return said

    async def _add(self, kept: _Kept) -> int | None:
        """What the journal has that is not there. None where Valkey does not answer."""
        place = kept.written_bytes
        fresh = bytes(kept.journal.lines[place:])
        values = (kept.number, KEEP_S, place, fresh)
        said: int | None = await self._asked(self._valkey().eval, scripts.ADD, len(kept.keys), *kept.keys, *values)
        if said == scripts.THERE:
            kept.written_bytes, kept.written_at = place + len(fresh), time.monotonic()
            self._charge(kept)
        return said

    def _charge(self, kept: _Kept) -> None:
        """Count what of it was not counted yet: what is written again after a loss was."""
        size_bytes = len(kept.body) + kept.written_bytes
        if (fresh_bytes := size_bytes - kept.charged_bytes) > 0:
            kept.charged_bytes = size_bytes
            self._bytes += fresh_bytes
            asyncio.get_running_loop().call_later(KEEP_S, self._expired, fresh_bytes)

    def _expired(self, size_bytes: int) -> None:
        self._bytes -= size_bytes

    def _valkey(self) -> redis.asyncio.Redis:
        if self._client is None:
            self._client = redis.asyncio.Redis.from_url(
                current_app.conf.broker_url, socket_timeout=PATIENCE_S, socket_connect_timeout=PATIENCE_S
            )
        return self._client

    async def _asked(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """None where Valkey does not answer."""
        if self._outage.lasts:
            return None
        self._asking += 1
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await call(*arguments)
        except (OSError, RedisError, TimeoutError) as error:
            self._outage.tell(error)
            return None
        finally:
            self._asking -= 1
            if not self._asking and not self._kept:
                await self._disconnect()


def _keys(scope: str, request_id: str) -> tuple[str, str]:
    """The owner is a part of the name, so nobody else can say it."""
    return f"hydra-stream:{scope}:{request_id}", f"hydra-stream:{scope}:{request_id}:journal"


def _name_key(scope: str, conversation_id: str) -> str:
    return f"hydra-stream-of:{scope}:{conversation_id}"


def _is_id(name: str) -> bool:
    try:
        return str(uuid.UUID(name)) == name
    except ValueError:
        return False
