"""How site and head speak to an engine over HTTP.

One aiohttp session per event loop, shared by all calls of that loop; an `EngineClient` is a base URL on it.
Knows nothing of Django and keeps no state about engines.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import aiohttp

from engines.config import SlotView
from engines.errors import EngineUnreachable
from engines.rates_view import EngineRates

CONNECT_TIMEOUT_S = 2.0
# Of an engine that was seen to take connections: this process is busy with others' requests, and connects when it comes to it.
SEEN_CONNECT_TIMEOUT_S = 30.0
PROBE_TIMEOUT_S = 2.0
# The engine pings every 10 s of silence, so three missed pings mean that it is gone.
READ_SILENCE_S = 45.0
# An answer in one piece is silent until it is done; the engine ends it at its own deadline, before this.
ANSWER_TIMEOUT_S = 1860.0
MAX_CONNECTIONS = 1024
# Shared: the site asks every engine once a second.
_PROBE_TIMEOUT = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)

_sessions: WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession] = WeakKeyDictionary()


def client_session() -> aiohttp.ClientSession:
    """The running loop's session, made on first use; `close_client_session` ends it."""
    loop = asyncio.get_running_loop()
    session = _sessions.get(loop)
    if session is None or session.closed:
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS, keepalive_timeout=30),
            read_bufsize=1 << 18,
        )
        _sessions[loop] = session
    return session


async def close_client_session() -> None:
    """Closes the running loop's session; a later call of `client_session` makes a new one."""
    session = _sessions.pop(asyncio.get_running_loop(), None)
    if session is not None:
        await session.close()


async def _connected(
    method: str, url: str, *, timeout: aiohttp.ClientTimeout, **options: Any
) -> aiohttp.ClientResponse:
    """Raises as a session's request does.

    The time to connect also runs while the event loop is held up by others' requests, as in a crowd. So a thread looks whether
    the engine takes connections before it counts as gone; nothing has been sent by then.
    """
    try:
        return await client_session().request(method, url, timeout=timeout, **options)
    except aiohttp.ConnectionTimeoutError:
        if not await asyncio.to_thread(_takes_connections, url):
            raise
    patient = aiohttp.ClientTimeout(
        total=timeout.total, sock_connect=SEEN_CONNECT_TIMEOUT_S, sock_read=timeout.sock_read
    )
    return await client_session().request(method, url, timeout=patient, **options)


def _takes_connections(url: str) -> bool:
    place = urlsplit(url)
    try:
        socket.create_connection((place.hostname or "", place.port or 0), CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True


class EngineClient:
    """Calls one engine, with its secret if it has one; answers of any status are returned.

    Raises EngineUnreachable when its process does not answer.
    """

    def __init__(self, base_url: str, secret: str = "") -> None:
        self.base_url = base_url.rstrip("/")
        self._authorization = {"Authorization": f"Bearer {secret}"} if secret else {}

    async def call(
        self,
        method: str,
        path: str,
        body: bytes,
        *,
        request_id: str,
        silence_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> aiohttp.ClientResponse:
        """Starts a request; the caller reads the answer and must close or release it. Closing it cancels.

        An engine that says nothing for `silence_s` counts as dead.
        """
        sent = {**(headers or {}), "X-Request-Id": request_id, **self._authorization}
        if body:
            sent["Content-Type"] = "application/json"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=silence_s)
        try:
            return await _connected(method, self.base_url + path, data=body or None, headers=sent, timeout=timeout)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineUnreachable(f"The engine did not answer: {error or type(error).__name__}") from error

    async def slots(self) -> list[SlotView]:
        values = await self._get_json("/slots")
        if not isinstance(values, list):
            raise EngineUnreachable("The engine answered /slots with something else than a list")
        try:
            return [SlotView.from_dict(value) for value in values]
        except (KeyError, TypeError) as error:
            raise EngineUnreachable("The engine answered /slots with something else than slots") from error

    async def rates(self) -> EngineRates | None:
        """None where the engine has none to tell, as one that only embeds."""
        values = await self._get_json("/rates")
        if not isinstance(values, dict) or "steps" not in values:
            return None
        try:
            return EngineRates.from_dict(values)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise EngineUnreachable("The engine answered /rates with something else than rates") from error

    async def session_act(self, act: str, session: str, timeout_s: float) -> tuple[int, dict[str, object]]:
        """`POST /sessions/{act}`: the answer's status and body."""
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        url, headers, body = f"{self.base_url}/sessions/{act}", self._authorization, {"session": session}
        try:
            async with await _connected("POST", url, json=body, timeout=timeout, headers=headers) as response:
                values = await response.json()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise EngineUnreachable(f"The engine did not answer: {error or type(error).__name__}") from error
        if not isinstance(values, dict):
            raise EngineUnreachable("The engine answered with something else than an object")
        return response.status, values

    async def _get_json(self, path: str) -> object:
        try:
            url, headers = self.base_url + path, self._authorization
            async with client_session().get(url, timeout=_PROBE_TIMEOUT, headers=headers) as response:
                return await response.json()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise EngineUnreachable(f"The engine did not answer {path}: {error or type(error).__name__}") from error
