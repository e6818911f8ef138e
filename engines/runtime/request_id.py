"""By which id a request goes through answers and logs: the caller's own, or a new one."""

from __future__ import annotations

import uuid

from aiohttp import web

MAX_REQUEST_ID_CHARS = 128


def request_id(request: web.Request) -> str:
    """The caller's id where it is short and plain, for it goes into answers and logs; else a new one."""
    return plain_request_id(request.headers.get("X-Request-Id", ""))


def plain_request_id(given: str) -> str:
    """`given` if it may be used as an id, else a new one."""
    plain = given.isascii() and all(letter.isalnum() or letter in "-_." for letter in given)
    return given if plain and 0 < len(given) <= MAX_REQUEST_ID_CHARS else uuid.uuid4().hex
