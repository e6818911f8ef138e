"""A database that is away for a moment: nobody gets in. Services come with a connection of their own each time, as `in_db` calls
them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from django.db import connection
from psycopg import sql


@contextmanager
def database_away() -> Iterator[None]:
    """Who is in already, as the tests' own fixtures, may stay."""
    at = connection.settings_dict
    place = {"user": at["USER"], "password": at["PASSWORD"], "host": at["HOST"], "port": at["PORT"]}
    allow = sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS {}")
    with psycopg.connect(dbname="postgres", autocommit=True, **place) as other:
        other.execute(allow.format(sql.Identifier(at["NAME"]), sql.Literal(False)))
        try:
            yield
        finally:
            other.execute(allow.format(sql.Identifier(at["NAME"]), sql.Literal(True)))
