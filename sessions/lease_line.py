"""A straight way to the database for leases, which stand between every request and its first token.

`in_db` changes threads, asks a pool for a connection and has that checked; here a few connections stay open on the event loop,
and a lease is one prepared statement and one round trip. Only a site process keeps them; where none is free, or one is broken,
the caller goes the usual way.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import psycopg
from django.db import OperationalError, connection

from sessions.leases import ACQUIRE, Lease, Wanted, arguments

MOST_LINES = 4
# A database that is away is not asked again by every request.
RETRY_S = 2.0
CLOSE_S = 1.0

logger = logging.getLogger(__name__)


class LeaseLine:
    """Used on one event loop only. `kept` says whether this process keeps lines at all."""

    kept = False

    def __init__(self) -> None:
        self._is_open = self.kept
        self._free: list[psycopg.AsyncConnection[Any]] = []
        self._lines = 0
        self._opening: asyncio.Task[None] | None = None
        self._due_s = float("-inf")

    async def acquire(self, wanted: Wanted) -> Lease | None:
        """The lease; None where no line is free now. Raises OperationalError when the line broke, with nothing known.

        To ask again is safe: a request never has more than one lease.
        """
        if not self._free:
            self._open_one()
            return None
        line = self._free.pop()
        try:
            cursor = await line.execute(ACQUIRE, arguments(wanted), prepare=True)
            row = await cursor.fetchone()
        except BaseException as error:
            # Also when the asker left: what the connection is in the middle of, nobody may take for another answer.
            self._lines -= 1
            await self._closed(line)
            if isinstance(error, psycopg.Error):
                raise OperationalError(f"the line for leases broke: {error}") from error
            raise
        self._free.append(line)
        assert row is not None
        return Lease(*row)

    async def close(self) -> None:
        """Close what is not in use. Used lines are closed when the loop ends."""
        self._is_open = False
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        while self._free:
            self._lines -= 1
            await self._closed(self._free.pop())

    def _open_one(self) -> None:
        """Have one more line made, for the next request."""
        now = asyncio.get_running_loop().time()
        if self._is_open and self._opening is None and self._lines < MOST_LINES and now >= self._due_s:
            self._due_s = now + RETRY_S
            self._opening = asyncio.create_task(self._connect(), name="lease-line")

    async def _connect(self) -> None:
        try:
            line = await psycopg.AsyncConnection.connect(**_parameters(), autocommit=True)
        except psycopg.Error as error:
            logger.warning("no line for leases, they go the usual way: %s", error)
        else:
            self._lines += 1
            self._free.append(line)
            self._due_s = float("-inf")
        finally:
            self._opening = None

    async def _closed(self, line: psycopg.AsyncConnection[Any]) -> None:
        try:
            async with asyncio.timeout(CLOSE_S):
                await line.close()
        except (psycopg.Error, TimeoutError) as error:
            logger.debug("a line for leases did not close: %s", error)


def _parameters() -> dict[str, Any]:
    """How Django reaches the database; its own kinds of cursors and adapters are for connections that wait."""
    parameters: dict[str, Any] = connection.get_connection_params()
    for name in ("pool", "cursor_factory", "context", "prepare_threshold"):
        parameters.pop(name, None)
    return parameters
