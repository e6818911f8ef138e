"""How site and head speak to an engine over HTTP.

One aiohttp session per event loop, shared by all calls of that loop; an `EngineClient` is a base URL on it.
Knows nothing of Django and keeps no state about engines.
"""

from __future__ import annotations

import asyncio
from weakref import WeakKeyDictionary

import aiohttp

from engines.config import SlotView
from engines.errors import EngineUnreachable

CONNECT_TIMEOUT_S = 2.0
PROBE_TIMEOUT_S = 2.0
# The engine pings every 10 s of silence, so three missed pings mean that it is gone.
READ_SILENCE_S = 45.0
# An answer in one piece is silent until it is done; the engine ends it at its own deadline, before this.
ANSWER_TIMEOUT_S = 1860.0
MAX_CONNECTIONS = 1024

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


class EngineClient:
    """Calls one engine. Raises EngineUnreachable when its process does not answer; answers of any status are returned."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url.rstrip("/")

    async def call(
        self, method: str, path: str, body: bytes, *, request_id: str, silence_s: float
    ) -> aiohttp.ClientResponse:
        """Starts a request; the caller reads the answer and must close or release it. Closing it cancels.

        An engine that says nothing for `silence_s` counts as dead.
        """
        headers = {"X-Request-Id": request_id}
        if body:
            headers["Content-Type"] = "application/json"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=silence_s)
        try:
            return await client_session().request(
                method, self.base_url + path, data=body or None, headers=headers, timeout=timeout
            )
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

    async def _get_json(self, path: str) -> object:
        timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
        try:
            async with client_session().get(self.base_url + path, timeout=timeout) as response:
                return await response.json()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise EngineUnreachable(f"The engine did not answer {path}: {error or type(error).__name__}") from error
