"""How an answer goes on at another engine: what the stream tells the site of moves and of itself, and who continues it."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from aiohttp import web

from engines.runtime.journal import JOURNAL_HEADER
from engines.runtime.origin import FOLLOWS_HEADER, RequestOrigin, read_origin

if TYPE_CHECKING:
    from engines.runtime.handoff_entry import Adopted
    from engines.runtime.http_continue import Resumption

# Set by the endpoints of continuations: on a request whose answer goes on here, and on one whose engine was lost over it.
ADOPTED = "hydra.adopted"
RESUMPTION = "hydra.resumption"
_BEGUN_AT = "hydra.begun_at"
# Of an answer that goes on here, as a site tells it, in seconds since 1970.
BEGUN_HEADER = "X-Hydra-Begun-At"
_SECONDS = re.compile(r"[0-9]{1,12}")


def origin_of(request: web.Request) -> RequestOrigin:
    """What the headers say, and the generation that moved here for this request. Raises as `read_origin`."""
    adopted: Adopted | None = request.get(ADOPTED)
    follows = request.headers.get(FOLLOWS_HEADER) == "1"
    resumption = resumption_of(request)
    return replace(read_origin(request.headers), follows=follows, adopted=adopted, resumption=resumption)


def resumption_of(request: web.Request) -> Resumption | None:
    return request.get(RESUMPTION)


async def asked_body(request: web.Request) -> bytes:
    """The body of the request that a client sent."""
    resumption = resumption_of(request)
    return await request.read() if resumption is None else resumption.body


def begun_at(request: web.Request) -> int:
    """When the answer was begun, here or by another engine, in seconds since 1970."""
    resumption = resumption_of(request)
    if resumption is not None:
        return resumption.journal.head.created
    told = request.headers.get(BEGUN_HEADER, "")
    if ADOPTED in request and _SECONDS.fullmatch(told):
        return int(told)
    begun: int = request.setdefault(_BEGUN_AT, int(time.time()))
    return begun


def wants_journal(request: web.Request) -> bool:
    """Whether who reads the stream keeps what another engine would need to go on with it."""
    return request.headers.get(JOURNAL_HEADER) == "1"


def move_event(name: str, handoff: str) -> bytes:
    """An event between engine and site: `moving` (the other engine takes the generation in, and may have it soon), `moved`, or
    `stays` (it will not have it)."""
    return b"event: hydra." + name.encode() + b"\ndata: " + json.dumps({"handoff": handoff}).encode() + b"\n\n"
