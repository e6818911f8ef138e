"""Where a conversation was last, as this process remembers it and as the rows say; a warm one costs no question."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from dataclasses import dataclass

from django.db import Error as DatabaseError

from pools.db import in_db_within
from sessions import services
from sessions.services import SessionPlace

MAX_PLACES = 20_000
# Another replica, or a person, may have moved it since.
TRUSTED_S = 30.0
# What the rows say only makes a turn cheaper.
PATIENCE_S = 2.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """The engine that answered last in this process, how many tokens it then held, and when (monotonic seconds)."""

    engine_id: int
    tokens: int
    used_s: float


class SessionPlaces:
    """Bounded, the longest unused first to go."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, Place] = OrderedDict()

    def recent(self, session: str) -> Place | None:
        """What this process knows, if it is young enough to be true."""
        place = self._known.get(session)
        return place if place is not None and time.monotonic() - place.used_s < TRUSTED_S else None

    def note(self, session: str, engine_id: int, tokens: int) -> None:
        """The engine answers, or has answered, a turn of it."""
        if not session:
            return
        self._known[session] = Place(engine_id, tokens, time.monotonic())
        self._known.move_to_end(session)
        if len(self._known) > MAX_PLACES:
            self._known.popitem(last=False)

    def forget(self, session: str) -> None:
        self._known.pop(session, None)

    async def look_up(self, session: str) -> SessionPlace:
        """What the rows say: its last engine, where it is wanted, and its snapshots. Nothing of one that has no row, or while the
        database does not answer.
        """
        try:
            return await in_db_within(PATIENCE_S, services.session_place, session)
        except DatabaseError as error:
            logger.warning("nobody knows where a session is, the database does not answer: %s", error)
            return SessionPlace()
