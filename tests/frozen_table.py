"""A database that answers no question about a table, as one that hangs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from django.db import connection
from psycopg import sql
from psycopg.conninfo import make_conninfo


@contextmanager
def frozen(table: str) -> Iterator[None]:
    """Whoever reads or writes `table` waits until the block ends."""
    at = connection.settings_dict
    place = make_conninfo(dbname=at["NAME"], user=at["USER"], password=at["PASSWORD"], host=at["HOST"], port=at["PORT"])
    with psycopg.connect(place) as other:
        other.execute(sql.SQL("LOCK TABLE {} IN ACCESS EXCLUSIVE MODE").format(sql.Identifier(table)))
        yield
        other.rollback()
