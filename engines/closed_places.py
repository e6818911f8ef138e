"""Hosts, cards and engines that are being emptied: nothing is loaded or started there, by whomever. Kinds: host, card, engine.

Told in reservations, so that it holds for what has no engine yet, and ends by itself where nobody empties any more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from django.db import connection

from engines.models import Engine
from pools import reservation

_LOCK = 0x6879_6472
_WHAT = "emptied"


def plan_alone() -> None:
    """Until the transaction ends nobody else plans a load or closes a place, in the whole pool: two loads must not count on the
    same bytes, and none may come where it was just closed. Taken before any row is locked."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])


@dataclass(frozen=True)
class ClosedPlaces:
    """Those closed now, by their keys."""

    hosts: frozenset[int]
    cards: frozenset[int]
    engines: frozenset[int]

    def holds(self, engine: Engine) -> bool:
        """Whether this engine is, or would come up, at one of them."""
        return engine.pk in self.engines or engine.host_id in self.hosts or engine.gpu_id in self.cards


def close(kind: str, place_id: int, held_s: float) -> None:
    """Nothing comes up there for so long; again and again while it is being emptied."""
    reservation.keep(_resource(kind, place_id), _owner(kind, place_id), held_s, f"the {kind} is being emptied")


def open_again(kind: str, place_id: int) -> None:
    reservation.release_owner(_owner(kind, place_id))


def closed(engine: Engine) -> bool:
    """Whether the engine may not come up where it is; of one whose row the transaction has locked, for as long as that lasts."""
    names: list[tuple[str, int | None]] = [("engine", engine.pk), ("host", engine.host_id), ("card", engine.gpu_id)]
    return bool(reservation.held_of(_resource(kind, pk) for kind, pk in names if pk is not None))


def among(host_ids: Iterable[int], card_ids: Iterable[int], engine_ids: Iterable[int]) -> ClosedPlaces:
    """Those of these that are closed; one question for all."""
    asked: dict[str, tuple[str, int]] = {}
    kinds: tuple[tuple[str, Iterable[int]], ...] = (("host", host_ids), ("card", card_ids), ("engine", engine_ids))
    for kind, ids in kinds:
        asked |= {_resource(kind, pk): (kind, pk) for pk in ids}
    found = [asked[resource] for resource in reservation.held_of(asked)]
    hosts, cards, engines = (frozenset(pk for one, pk in found if one == kind) for kind, _ in kinds)
    return ClosedPlaces(hosts, cards, engines)


def _resource(kind: str, place_id: int) -> str:
    return f"{kind}:{place_id}:{_WHAT}"


def _owner(kind: str, place_id: int) -> str:
    # Not `host:…`: that is how what a host's own processes reserve begins.
    return f"{_WHAT}:{kind}:{place_id}"
