"""The one way from asynchronous code to the services, which are plain functions; and the database's clock."""

from collections.abc import Callable
from datetime import datetime
from typing import Any, TypeVar

from channels.db import database_sync_to_async
from django.db import connection

Result = TypeVar("Result")


async def in_db(call: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Run the plain function `call` in a thread of its own with a database connection, and return its result.

    Not on the thread that Channels shares between all sockets of a process: there one slow query would stall every other.
    """
    result: Result = await database_sync_to_async(call, thread_sensitive=False)(*args, **kwargs)
    return result


def database_now() -> datetime:
    """The database's clock. Ages of rows are told by it, since several hosts write them and their clocks differ."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT clock_timestamp()")
        now: datetime = cursor.fetchone()[0]
    return now
