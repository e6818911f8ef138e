"""The way to the host's store, and to stores of other hosts. A store that is missing or dead costs nobody time.

After a failure nothing is asked for a while, which doubles up to half a minute; the first call after that tries again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from engines.errors import EngineUnreachable, NotAuthenticated, ProtocolBroken, RpcRefused, StoreAway
from engines.rpc_client import Patience
from engines.store.client import StoreClient

log = logging.getLogger("hydra.engine.store")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
# Connections to the host's store that are kept for the next caller.
KEPT_CLIENTS = 4
LOCAL = Patience(connect_s=1.0, hello_s=2.0, look_s=3.0, stall_s=5.0)
REMOTE = Patience(connect_s=2.0, hello_s=5.0, look_s=5.0, stall_s=15.0)


class StoreLink:
    """Belongs to the event loop. `epoch` rises whenever the store came back, which may then hold less than before."""

    def __init__(self, host: str, port: int, secret: str) -> None:
        self.epoch = 0
        self._host, self._port, self._secret = host, port, secret
        self._idle: deque[StoreClient] = deque()
        self._pause_s = 0.0
        self._asks_again_at = 0.0

    @property
    def is_up(self) -> bool:
        """False between a failure and the next success."""
        return self._pause_s == 0

    @property
    def may_ask(self) -> bool:
        return self.is_up or time.monotonic() >= self._asks_again_at

    @asynccontextmanager
    async def client(self, limit_s: float | None = None) -> AsyncIterator[StoreClient]:
        """A connection of one's own, for at most `limit_s`. Raises StoreAway while nothing is asked, and in place of what says
        that the store is away."""
        if not self.may_ask:
            raise StoreAway(f"The store at {self._host}:{self._port} does not answer.")
        client = self._idle.pop() if self._idle else self._new(self._host, self._port, LOCAL)
        try:
            async with asyncio.timeout(limit_s):
                if not self.is_up:
                    await self._try(client)
                yield client
        except StoreAway:
            raise  # of another connection, which has noted it
        except (EngineUnreachable, ProtocolBroken, NotAuthenticated, TimeoutError) as error:
            self._fell_away(error)
            raise StoreAway(f"The store at {self._host}:{self._port} does not answer: {error}") from error
        except RpcRefused:
            self._came_back()  # it answered, if only to refuse
            raise
        else:
            self._came_back()
        finally:
            await self._keep(client)

    @asynccontextmanager
    async def remote(self, host: str, port: int) -> AsyncIterator[StoreClient]:
        """Another host's store, which knows the same secret."""
        client = self._new(host, port, REMOTE)
        try:
            yield client
        finally:
            await client.close()

    async def close(self) -> None:
        while self._idle:
            await self._idle.pop().close()

    def _new(self, host: str, port: int, patience: Patience) -> StoreClient:
        return StoreClient(host, port, secret=self._secret, name="engine", patience=patience)

    async def _keep(self, client: StoreClient) -> None:
        if self.is_up and len(self._idle) < KEPT_CLIENTS:
            self._idle.append(client)
        else:
            await client.close()

    async def _try(self, client: StoreClient) -> None:
        """One looks whether the store is there again; the others go on without meanwhile."""
        self._asks_again_at = time.monotonic() + self._pause_s
        await client.store_info()
        self._came_back()

    def _fell_away(self, error: BaseException) -> None:
        if self.is_up:
            log.warning("the store at %s:%d is away: %s", self._host, self._port, error or type(error).__name__)
        self._pause_s = min(max(2 * self._pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
        self._asks_again_at = time.monotonic() + self._pause_s

    def _came_back(self) -> None:
        if not self.is_up:
            log.info("the store at %s:%d is there again", self._host, self._port)
            self.epoch += 1
        self._pause_s = 0.0
