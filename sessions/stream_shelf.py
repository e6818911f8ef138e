"""What another replica of the site needs to go on with a kept stream, in Valkey: the request, and the stream's journal.

A shelved stream has one owner, the replica that reads it from its engine. Whoever takes it becomes the owner under the next
number; what the former one still writes is refused, and tells it that the stream is another's now. All of it expires by itself.
Losing Valkey loses nothing else: streams go on where they are, and can be resumed there.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import redis.asyncio
from celery import current_app
from redis.exceptions import RedisError

from pools.events import Outage
from sessions.dispatch import REQUEST_BUDGET_S
from sessions.stream_journal import StreamJournal

# A client that lost its site comes back soon; a stream that has ended is kept as long as one in memory.
KEEP_S = 600
FLUSH_S, FIRST_S = 0.1, 0.01
PATIENCE_S = 2.0
MAX_BODY_BYTES = 4 << 20
# Of all that this process has written and that may still be there.
MAX_SHELVED_BYTES = 256 << 20

# Keys: the stream, its journal, the conversation's name. What is written under another number than the last one is refused.
_PUT = """
redis.call('HSET', KEYS[1], 'about', ARGV[1], 'body', ARGV[2], 'number', 1)
redis.call('EXPIRE', KEYS[1], ARGV[3])
if KEYS[2] then redis.call('SET', KEYS[2], ARGV[4], 'EX', ARGV[3]) end
return 1
"""
_ADD = """
if redis.call('HGET', KEYS[1], 'number') ~= ARGV[1] then return 0 end
redis.call('APPEND', KEYS[2], ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[3])
redis.call('EXPIRE', KEYS[2], ARGV[3])
return 1
"""
_TAKE = """
if redis.call('EXISTS', KEYS[1]) == 0 then return false end
local number = redis.call('HINCRBY', KEYS[1], 'number', 1)
return {number, redis.call('HGET', KEYS[1], 'about'), redis.call('HGET', KEYS[1], 'body'), redis.call('GET', KEYS[2]) or ''}
"""


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


@dataclass(frozen=True)
class Taken:
    """A stream that is this replica's from now on, under `number`."""

    about: Shelved
    body: bytes
    journal: bytes
    number: int


@dataclass
class _Kept:
    """`number` 0: not written yet. `gave_up`: another replica has it."""

    scope: str
    about: Shelved
    body: bytes
    journal: StreamJournal
    lost: Callable[[], None]
    number: int = 0
    written_bytes: int = 0
    ended: bool = False
    gave_up: bool = False


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
        lost: Callable[[], None],
        number: int = 0,
    ) -> None:
        """Write the stream down while it runs; `lost` is called once another replica has taken it. `number` 0: it is new."""
        if len(body) > MAX_BODY_BYTES or self._bytes > MAX_SHELVED_BYTES:
            return
        written = len(journal.lines) if number else 0
        self._kept[request_id] = _Kept(scope, about, body, journal, lost, number, written)
        if self._flushing is None:
            self._flushing = asyncio.create_task(self._run(), name="streams-shelve")

    def end(self, request_id: uuid.UUID) -> None:
        """The stream has ended; what is left of it is written."""
        kept = self._kept.get(request_id)
        if kept is not None:
            kept.ended = True

    async def forget(self, scope: str, request_id: uuid.UUID) -> None:
        """The stream was stopped: nobody goes on with it."""
        kept = self._kept.pop(request_id, None)
        if kept is not None and kept.number:
            await self._asked(self._valkey().delete, *_keys(scope, str(request_id)))

    async def take(self, scope: str, name: str) -> Taken | None:
        """The scope's stream of this request id, else the last one of this conversation, from whoever had it."""
        found = await self._taken(scope, name) if _is_id(name) else None
        if found is None:
            named = await self._asked(self._valkey().get, _name_key(scope, name))
            found = await self._taken(scope, named.decode()) if named else None
        return found

    async def _taken(self, scope: str, request_id: str) -> Taken | None:
        stream, journal = _keys(scope, request_id)
        answer = await self._asked(self._valkey().eval, _TAKE, 2, stream, journal)
        if not answer:
            return None
        number, about, body, lines = answer
        return Taken(Shelved(**json.loads(about)), body, lines, int(number))

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
                await asyncio.sleep(FLUSH_S if all(kept.number for kept in self._kept.values()) else FIRST_S)
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
                    kept.lost()
            elif was_over and kept.written_bytes == len(kept.journal.lines):
                self._kept.pop(request_id, None)

    async def _written(self, kept: _Kept) -> bool:
        """False once there is no use in going on with it."""
        lines = kept.journal.lines
        if not kept.journal.is_kept or kept.written_bytes == len(lines) or self._outage.lasts:
            return not (kept.ended and (self._outage.lasts or not kept.journal.is_kept))
        stream, journal = _keys(kept.scope, kept.about.request_id)
        if not kept.number:
            names = [_name_key(kept.scope, kept.about.conversation_id)] if kept.about.conversation_id else []
            put = (_PUT, 1 + len(names), stream, *names, json.dumps(asdict(kept.about)), kept.body, KEEP_S)
            if not await self._asked(self._valkey().eval, *put, kept.about.request_id):
                return not kept.ended
            kept.number = 1
            self._charge(len(kept.body))
        fresh = bytes(lines[kept.written_bytes :])
        added = await self._asked(self._valkey().eval, _ADD, 2, stream, journal, kept.number, fresh, KEEP_S)
        if added is None:
            return not kept.ended
        kept.gave_up = not added
        kept.written_bytes += len(fresh)
        self._charge(len(fresh))
        return bool(added)

    def _charge(self, size_bytes: int) -> None:
        self._bytes += size_bytes
        asyncio.get_running_loop().call_later(KEEP_S, self._expired, size_bytes)

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
