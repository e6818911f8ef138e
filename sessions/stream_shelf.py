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
# Of all that this process has written and that may still be there. Valkey has 256 MB for all replicas and for tasks and events.
MAX_SHELVED_BYTES = 64 << 20
# Number of a stream that was stopped: nobody writes or takes it any more.
STOPPED = 1 << 40

# Keys: the stream, its journal, the conversation's name. The answers of those that write: 1 it is there now, 0 the stream is
# another's, -1 it is not there as the writer knows it, who writes all of it again. Who writes again does not take the name from a
# later stream, which may have been written again before.
_PUT = """
local number, own = tonumber(redis.call('HGET', KEYS[1], 'number') or '0'), tonumber(ARGV[1])
if number > own then return 0 end
if number < own then
  redis.call('HSET', KEYS[1], 'about', ARGV[3], 'body', ARGV[4], 'number', ARGV[1])
  redis.call('DEL', KEYS[2])
  local last = KEYS[3] and redis.call('GET', KEYS[3])
  local other = ARGV[6] == '1' and last and redis.call('HGET', ARGV[7] .. last, 'about')
  if KEYS[3] and not (other and cjson.decode(other).created_at > cjson.decode(ARGV[3]).created_at) then
    redis.call('SET', KEYS[3], ARGV[5], 'EX', ARGV[2])
  end
end
redis.call('EXPIRE', KEYS[1], ARGV[2])
return 1
"""
# Lines that belong at a place of the journal; some of them may be there already. At 0 they are all that there is.
_ADD = """
local number, own = tonumber(redis.call('HGET', KEYS[1], 'number') or '0'), tonumber(ARGV[1])
if number > own then return 0 end
if number < own then return -1 end
local place, lines = tonumber(ARGV[3]), ARGV[4]
local there = redis.call('GETRANGE', KEYS[2], place, -1)
local both = math.min(#there, #lines)
if redis.call('STRLEN', KEYS[2]) < place or string.sub(there, 1, both) ~= string.sub(lines, 1, both) then
  if place > 0 then return -1 end
  redis.call('SET', KEYS[2], lines)
elseif #lines > both then
  redis.call('APPEND', KEYS[2], string.sub(lines, both + 1))
end
for _, key in ipairs(KEYS) do redis.call('EXPIRE', key, ARGV[2]) end
return 1
"""
_FORGET = """
redis.call('DEL', KEYS[1], KEYS[2])
redis.call('HSET', KEYS[1], 'number', ARGV[1])
redis.call('EXPIRE', KEYS[1], ARGV[2])
return 1
"""
# Not after the time (Valkey's own) until which somebody waits for it: nobody would read the stream then.
_TAKE = """
local now = redis.call('TIME')
if now[1] + now[2] / 1000000 > tonumber(ARGV[1]) or redis.call('HEXISTS', KEYS[1], 'about') == 0 then return false end
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
    ends_session: bool = False

    @classmethod
    def of_json(cls, text: bytes | str) -> Shelved:
        """What a replica wrote, perhaps one of a newer release that tells more."""
        return cls(**{name: value for name, value in json.loads(text).items() if name in cls.__dataclass_fields__})


@dataclass(frozen=True)
class Taken:
    """A stream that is this replica's from now on, under `number`."""

    about: Shelved
    body: bytes
    journal: bytes
    number: int


@dataclass
class _Kept:
    """`is_there`: the request is written down under `number`, and `written_bytes` of the journal; `was_there`: it has been, and
    `charged_bytes` of all were counted; `was_sent`: it may be. `gave_up`: another replica has it. `written_at`, `stopped_at` on
    the monotonic clock."""

    scope: str
    about: Shelved
    body: bytes
    journal: StreamJournal
    lost: Callable[[], None]
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

    @property
    def keys(self) -> tuple[str, ...]:
        keys = _keys(self.scope, self.about.request_id)
        name = self.about.conversation_id
        return (*keys, _name_key(self.scope, name)) if name else keys

    @property
    def has_news(self) -> bool:
        """Also of one that says nothing for long: it is not to expire while it runs."""
        is_behind = self.written_bytes < len(self.journal.lines)
        return self.journal.is_kept and (is_behind or time.monotonic() - self.written_at > KEEP_S / 2)


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
        kept = _Kept(scope, about, body, journal, lost, number or 1, is_there=number > 0, was_sent=number > 0)
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
        return bool(await self._asked(self._valkey().eval, _FORGET, len(keys), *keys, STOPPED, KEEP_S))

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
        answer = await self._asked(self._valkey().eval, _TAKE, len(keys), *keys, until_s)
        if not answer:
            return None
        number, about, body, lines = answer
        return Taken(Shelved.of_json(about), body, lines, int(number))

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
                    kept.lost()
            elif was_over and kept.written_bytes == len(kept.journal.lines):
                self._kept.pop(request_id, None)

    async def _written(self, kept: _Kept) -> bool:
        """False once there is no use in going on with it."""
        if kept.stopped_at is not None:
            return not await self._forgotten(kept)
        if not kept.has_news or self._outage.lasts:
            return not (kept.ended and (self._outage.lasts or not kept.journal.is_kept))
        said = await self._put(kept)
        if said == 1:
            said = await self._add(kept)
        if said == -1 and kept.stopped_at is None:
            # Valkey has lost it: from the beginning, at once for a site that is about to stop.
            kept.is_there, kept.written_bytes = False, 0
            said = await self._put(kept)
            if said == 1:
                said = await self._add(kept)
        kept.gave_up = said == 0 and kept.stopped_at is None
        return not kept.gave_up and not (said is None and kept.ended)

    async def _put(self, kept: _Kept) -> int | None:
        """The request, if it is not there. None where Valkey does not answer."""
        if kept.is_there:
            return 1
        kept.was_sent = True
        about = json.dumps(asdict(kept.about))
        again, others = int(kept.was_there), _keys(kept.scope, "")[0]
        values = (kept.number, KEEP_S, about, kept.body, kept.about.request_id, again, others)
        said: int | None = await self._asked(self._valkey().eval, _PUT, len(kept.keys), *kept.keys, *values)
        if said == 1:
            kept.is_there = kept.was_there = True
            self._charge(kept)
        return said

    async def _add(self, kept: _Kept) -> int | None:
        """What the journal has that is not there. None where Valkey does not answer."""
        place = kept.written_bytes
        fresh = bytes(kept.journal.lines[place:])
        values = (kept.number, KEEP_S, place, fresh)
        said: int | None = await self._asked(self._valkey().eval, _ADD, len(kept.keys), *kept.keys, *values)
        if said == 1:
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
