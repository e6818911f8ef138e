"""An engine, a card or a host gets empty: first a preview of what would go where and at what price, then the moves, live.

Conversations that run go on at their new engines in the middle of an answer; those that are idle are there for their next turn.
What finds no room is left where it is, with the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, replace

from django.db.models import Q

from engines import services as engines
from engines.client import EngineClient
from engines.errors import EngineError, EngineUnreachable
from engines.rates_view import EngineRates
from engines.services import EngineEndpoint
from pools.db import in_db
from sessions import handoffs, lifecycle

# Moves from which bytes and pauses are foretold.
KNOWN_MOVES = 50
ROOM_TOKENS = 512


@dataclass(frozen=True)
class PlannedMove:
    """One conversation of an engine. `target` is "" and `reason` says why where it must stay. Bytes and pause are foretold from
    former moves of the model, None while there is none."""

    session: str
    source: str
    target: str
    tokens: int
    foretold_bytes: int | None
    foretold_pause_ms: float | None
    reason: str = ""


@dataclass
class _Place:
    endpoint: EngineEndpoint
    rates: EngineRates
    coming: int = 0

    @property
    def free_tokens(self) -> int:
        return self.rates.cells - self.rates.resident_tokens - self.coming


async def preview(leaving: Iterable[str]) -> list[PlannedMove]:
    """What would move from the engines of these names. Raises an EngineError where one of them does not answer."""
    names = frozenset(leaving)
    endpoints = await in_db(engines.serving_engines, None)
    places = [place for place in await asyncio.gather(*map(_place, endpoints)) if place is not None]
    lost = names - {place.endpoint.name for place in places}
    if lost:
        raise EngineUnreachable(f"No serving engine is called {', '.join(sorted(lost))}, or it does not answer.")
    others = [place for place in places if place.endpoint.name not in names]
    planned = []
    for place in places:
        if place.endpoint.name in names:
            bytes_per_token, pause_ms = await in_db(_known, place.endpoint.model_name)
            for session, tokens in place.rates.sessions.items():
                planned.append(_planned(place, session, tokens, others, bytes_per_token, pause_ms))
    return planned


def _planned(
    source: _Place,
    session: str,
    tokens: int,
    others: list[_Place],
    bytes_per_token: float | None,
    pause_ms: float | None,
) -> PlannedMove:
    foretold = None if bytes_per_token is None else round(bytes_per_token * tokens)
    move = PlannedMove(session, source.endpoint.name, "", tokens, foretold, pause_ms)
    alike = [
        place
        for place in others
        if place.endpoint.model_name == source.endpoint.model_name and _may_share(place.rates, source.rates)
    ]
    if not alike:
        return replace(move, reason="no other engine may share this engine's state")
    roomy = [place for place in alike if place.rates.context_tokens >= tokens and place.free_tokens >= tokens]
    if not roomy:
        return replace(move, reason="no other engine has room for it")
    best = max(roomy, key=lambda place: (place.rates.free_slots > 0, place.free_tokens))
    best.coming += tokens + ROOM_TOKENS
    return replace(move, target=best.endpoint.name)


async def carry_out(planned: Iterable[PlannedMove]) -> list[PlannedMove]:
    """One move after the other; those that came to nothing have their reason."""
    done = []
    for move in planned:
        if not move.target:
            done.append(move)
            continue
        try:
            await lifecycle.migrate(None, move.session, move.target)
        except EngineError as error:
            done.append(replace(move, target="", reason=error.message))
        else:
            done.append(move)
    return done


def _may_share(one: EngineRates, other: EngineRates) -> bool:
    """Also where an engine still reads its file and cannot say: the move itself finds out."""
    return one.kv_group == other.kv_group or not one.kv_group or not other.kv_group


async def _place(endpoint: EngineEndpoint) -> _Place | None:
    try:
        rates = await EngineClient(endpoint.base_url, endpoint.secret).rates()
    except EngineUnreachable:
        return None
    return None if rates is None else _Place(endpoint, rates)


def _known(model: str) -> tuple[float | None, float | None]:
    """Bytes a token, and the median pause, of the model's last moves."""
    moved = handoffs.views(Q(state="committed", chat__model_name=model), KNOWN_MOVES)
    tokens = sum(move.tokens for move in moved)
    pauses = sorted(move.pause_ms for move in moved if move.kind == "live" and move.pause_ms is not None)
    size_bytes = sum(move.sent_bytes + move.skipped_bytes for move in moved)
    return size_bytes / tokens if tokens else None, pauses[len(pauses) // 2] if pauses else None
