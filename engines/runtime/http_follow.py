"""How an answer follows its generation from one engine to another: what the stream says of a move, and who continues it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from aiohttp import web

from engines.runtime.origin import FOLLOWS_HEADER, RequestOrigin, read_origin

if TYPE_CHECKING:
    from engines.runtime.handoff_in import Adopted

# Set by the endpoint of continuations on a request whose answer goes on here.
ADOPTED = "hydra.adopted"


def origin_of(request: web.Request) -> RequestOrigin:
    """What the headers say, and the generation that moved here for this request. Raises as `read_origin`."""
    adopted: Adopted | None = request.get(ADOPTED)
    return replace(read_origin(request.headers), follows=request.headers.get(FOLLOWS_HEADER) == "1", adopted=adopted)


def move_event(name: str, handoff: str) -> bytes:
    """An event between engine and site: `moving` (the other engine takes the generation in, and may have it soon) or `moved`."""
    return b"event: hydra." + name.encode() + b"\ndata: " + json.dumps({"handoff": handoff}).encode() + b"\n\n"
