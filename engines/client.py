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

    def __init__(self, base_url: str, session: aiohttp.ClientSession | None = None) -> None:
        self.base_url = base_url.rstrip("/")
        self._session = session

    async def chat(self, body: bytes, *, request_id: str, stream: bool) -> aiohttp.ClientResponse:
        """Starts a chat completion; the caller reads the answer and must close or release it. Closing it cancels.

        A stream that is silent for READ_SILENCE_S counts as dead; an answer in one piece may take ANSWER_TIMEOUT_S.
        """
        headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
        session = self._session or client_session()
        silence_s = READ_SILENCE_S if stream else ANSWER_TIMEOUT_S
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=silence_s)
        url = f"{self.base_url}/v1/chat/completions"
        try:
            return await session.post(url, data=body, headers=headers, timeout=timeout)
        except (aiohttp.ClientConnectionError, TimeoutError) as error:
            raise EngineUnreachable(f"The engine did not answer: {error or type(error).__name__}") from error

    async def health(self) -> str:
        """The engine's own word: "ok", "loading" or "stopping"."""
        values = await self._get_json("/health")
        return str(values.get("status", "unknown")) if isinstance(values, dict) else "unknown"

    async def slots(self) -> list[SlotView]:
        values = await self._get_json("/slots")
        if not isinstance(values, list):
            raise EngineUnreachable("The engine answered /slots with something else than a list")
        return [SlotView.from_dict(value) for value in values]

    async def _get_json(self, path: str) -> object:
        session = self._session or client_session()
        timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
        try:
            async with session.get(self.base_url + path, timeout=timeout) as response:
                return await response.json()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise EngineUnreachable(f"The engine did not answer {path}: {error or type(error).__name__}") from error
