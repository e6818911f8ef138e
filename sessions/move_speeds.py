"""How fast states moved from host to host, by the moves that were written down: every replica knows it, also after a restart."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from django.db import Error as DatabaseError

from pools.db import in_db_within
from sessions.choices import HandoffState
from sessions.models import Handoff

KNOWN_S = 10.0
PATIENCE_S = 2.0
# Smaller moves tell more of fixed costs than of the link.
TELLING_BYTES = 1 << 20
MAX_MOVES = 200
# How much the newest move of a link counts.
NEWEST_WEIGHT = 0.5

logger = logging.getLogger(__name__)


def between_hosts() -> dict[tuple[str, str], float]:
    """Bytes a second by source's and target's host, of the latest MAX_MOVES moves that tell something."""
    told = Handoff.objects.filter(
        state=HandoffState.COMMITTED, sent_bytes__gte=TELLING_BYTES, mb_per_s__gt=0, ended_at__isnull=False
    )
    moves = told.order_by("-ended_at").values_list("source__host__name", "target__host__name", "mb_per_s")[:MAX_MOVES]
    speeds: dict[tuple[str, str], float] = {}
    for source, target, mb_per_s in reversed(moves):
        if source and target:  # an engine may have been deleted since
            speed = mb_per_s * 1e6
            old = speeds.get((source, target), speed)
            speeds[source, target] = old + NEWEST_WEIGHT * (speed - old)
    return speeds


class MoveSpeeds:
    """`between_hosts`, asked for now and then; of one event loop."""

    def __init__(self) -> None:
        self._known: Mapping[tuple[str, str], float] = {}
        self._asked_s = float("-inf")

    async def lately(self) -> Mapping[tuple[str, str], float]:
        if time.monotonic() - self._asked_s >= KNOWN_S:
            # Also where the database does not answer: not every request is to wait for that.
            self._asked_s = time.monotonic()
            try:
                self._known = await in_db_within(PATIENCE_S, between_hosts)
            except DatabaseError as error:
                logger.warning("new speeds of moves are not known, the database does not answer: %s", error)
        return self._known
