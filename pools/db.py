"""The one way from asynchronous code to the services, which are plain functions; and the database's clock."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any, TypeVar

from channels.db import database_sync_to_async
from django.db import OperationalError, connection

Result = TypeVar("Result")

# As many as the site keeps connections. A database that hangs holds these threads up, and nobody else's.
DATABASE_THREADS = 16
# Connecting, and the longest query that the server lets run.
PATIENCE_S = 35.0
# Who has a client waiting asks with this.
REQUEST_PATIENCE_S = 5.0

_threads = ThreadPoolExecutor(DATABASE_THREADS, thread_name_prefix="database")


async def in_db(call: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Run the plain function `call` in a thread of its own with a database connection, and return its result.

    Not on the thread that Channels shares between all sockets of a process: there one slow query would stall every other.
    Raises OperationalError when nothing came of it for PATIENCE_S: a database that is frozen answers nobody, not even with
    an error.
    """
    return await in_db_within(PATIENCE_S, call, *args, **kwargs)


async def in_db_within(patience_s: float, call: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """The same with a patience of one's own. What was begun may still come to its end."""
    try:
        async with asyncio.timeout(patience_s) as patience:
            result: Result = await database_sync_to_async(call, thread_sensitive=False, executor=_threads)(
                *args, **kwargs
            )
    except TimeoutError as error:
        if not patience.expired():
            raise
        raise OperationalError(f"the database has not answered for {patience_s:g} s") from error
    return result


def not_after(until_s: float) -> None:
    """Raises OperationalError behind that time (monotonic): whoever asked has given up, and what a transaction wrote for it is
    taken back, instead of staying behind with nobody to end it."""
    if time.monotonic() > until_s:
        raise OperationalError("the database took so long that nobody waits for this any more")


def database_now() -> datetime:
    """The database's clock. Ages of rows are told by it, since several hosts write them and their clocks differ."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT clock_timestamp()")
        now: datetime = cursor.fetchone()[0]
    return now
