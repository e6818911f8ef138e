"""The leases of this process: taken before a request goes to an engine, given back in batches, prolonged while requests run."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import uuid
from collections.abc import Sequence
from typing import Any

from django.db import Error as DatabaseError

from engines.services import EngineEndpoint
from pools.db import in_db
from sessions import leases
from sessions.lease_line import LeaseLine
from sessions.leases import LEASE_S, Lease, Wanted

PROLONG_EVERY_S = LEASE_S / 3
DATABASE_PATIENCE_S = 2.0
RELEASE_TRIES = 5
RELEASE_PAUSE_S = 0.5

logger = logging.getLogger(__name__)


def process_name() -> str:
    """Names this process among all replicas, also after a restart with the same pid."""
    return f"{socket.gethostname()[:24]}:{os.getpid()}:{uuid.uuid4().hex[:12]}"


def _look_at(written: asyncio.Future[Lease]) -> None:
    """An error that nobody waits for any more was told of already."""
    if not written.cancelled():
        written.exception()


class LeaseDesk:
    """Used on one event loop only. Without a database requests go on without leases: engines have bounds of their own."""

    def __init__(self) -> None:
        self.owner = process_name()
        self.line = LeaseLine()
        self._held: set[uuid.UUID] = set()
        self._done: list[uuid.UUID] = []
        self._writing: set[asyncio.Future[Lease]] = set()
        self._releasing: asyncio.Task[None] | None = None
        self._prolonging: asyncio.Task[None] | None = None

    @property
    def count(self) -> int:
        return len(self._held)

    async def acquire(
        self,
        request_id: uuid.UUID,
        session: str,
        endpoints: Sequence[EngineEndpoint],
        limits: Sequence[int],
        idempotency: str = "",
    ) -> Lease:
        """A place on the first of `endpoints` that has one, or on the engine where the session runs. Always `release` it.

        A request that goes on to another engine asks again without releasing first: its lease moves, and is never two or none.
        """
        wanted = Wanted(
            request_id,
            session,
            self.owner,
            tuple(endpoint.engine_id for endpoint in endpoints),
            tuple(limits),
            idempotency,
        )
        writing = asyncio.ensure_future(self._write(wanted))
        self._writing.add(writing)
        writing.add_done_callback(self._writing.discard)
        moves = request_id in self._held
        self._held.add(request_id)
        try:
            async with asyncio.timeout(DATABASE_PATIENCE_S):
                lease: Lease = await asyncio.shield(writing)
        except (DatabaseError, TimeoutError) as error:
            logger.warning("no lease could be written, going on without: %s: %s", type(error).__name__, error)
            writing.add_done_callback(lambda written: _look_at(written) or self._written_late(request_id))
            # It may be written late, and has to last as long as its request all the same.
            self._keep_prolonging()
            return Lease("leased", endpoints[0].engine_id)
        except asyncio.CancelledError:
            # What is being written now must not outlive a request that has ended.
            self._held.discard(request_id)
            writing.add_done_callback(lambda written: _look_at(written) or self._give_back(request_id))
            raise
        if lease.outcome != "leased":
            self._held.discard(request_id)
            if moves:
                # What it had on the engine before.
                self._give_back(request_id)
            return lease
        self._keep_prolonging()
        return lease

    def _keep_prolonging(self) -> None:
        if self._prolonging is None:
            self._prolonging = asyncio.create_task(self._prolong(), name="leases-prolong")

    async def _write(self, wanted: Wanted) -> Lease:
        try:
            lease = await self.line.acquire(wanted)
        except DatabaseError as error:
            logger.info("%s", error)
            lease = None
        return lease or await in_db(leases.acquire, wanted)

    def release(self, request_id: uuid.UUID) -> None:
        """Give a place back, whatever became of it. Safe to call again; it is written in the background, many at once."""
        if request_id not in self._held:
            return
        self._held.discard(request_id)
        self._give_back(request_id)

    def _written_late(self, request_id: uuid.UUID) -> None:
        if request_id not in self._held:
            self._give_back(request_id)

    def _give_back(self, request_id: uuid.UUID) -> None:
        self._done.append(request_id)
        if self._releasing is None:
            self._releasing = asyncio.get_running_loop().create_task(self._release(), name="leases-release")

    async def close(self, timeout_s: float) -> None:
        """Give all back; for a site that is about to stop."""
        for task in (self._prolonging, self._releasing):
            if task is not None:
                task.cancel()
        try:
            async with asyncio.timeout(timeout_s):
                await self.line.close()
                await in_db(leases.release_all, self.owner)
        except (DatabaseError, TimeoutError) as error:
            logger.warning("leases are left to end by themselves: %s: %s", type(error).__name__, error)

    async def settled(self) -> None:
        """Returns once all that was asked for and given back is written."""
        while under_way := [*self._writing, *([self._releasing] if self._releasing is not None else [])]:
            await asyncio.wait(under_way)

    async def _release(self) -> None:
        try:
            for _ in range(RELEASE_TRIES):
                while self._done:
                    done, self._done = self._done, []
                    if not await self._written(leases.release, done, self.owner):
                        # The sweep would see to them too, but a place must not stand empty so long.
                        self._done += done
                        await asyncio.sleep(RELEASE_PAUSE_S)
                        break
                else:
                    return
            self._done = []
        finally:
            self._releasing = None

    async def _prolong(self) -> None:
        try:
            while self._held:
                await asyncio.sleep(PROLONG_EVERY_S)
                await self._written(leases.prolong, list(self._held))
        finally:
            self._prolonging = None

    async def _written(self, call: Any, *args: Any) -> bool:
        try:
            async with asyncio.timeout(DATABASE_PATIENCE_S):
                await in_db(call, *args)
        except (DatabaseError, TimeoutError) as error:
            logger.warning("leases could not be written: %s: %s", type(error).__name__, error)
            return False
        return True
