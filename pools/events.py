"""Hints to open pages that a row changed. They carry no state: who misses one reads a snapshot.

Event types (`id` is the row's primary key, `version` milliseconds since the epoch, so that the newer hint has the larger one):
host, model, engine, chat.
"""

import asyncio
import logging
import threading
import time
from typing import Any

from asgiref.sync import async_to_sync
from channels.layers import get_channel_layer
from django.db import transaction
from redis.exceptions import RedisError

GROUP = "pool"
EVENT_TYPES = ("host", "model", "engine", "chat", "job")
SEND_TIMEOUT_S = 2.0
# A layer that did not answer is left alone for so long: a thousand rows written at once must not wait for it a thousand times.
PAUSE_S = 2.0
LOG_INTERVAL_S = 60.0

logger = logging.getLogger(__name__)


class Outage:
    """A server that did not answer: whom to spare the waiting, and that it writes one line a minute and not one per write."""

    def __init__(self, words: str, pause_s: float = PAUSE_S) -> None:
        self._words = words
        self._pause_s = pause_s
        self._lock = threading.Lock()
        self._told_at: float | None = None
        self._until = float("-inf")

    @property
    def lasts(self) -> bool:
        """Whether it failed a moment ago, and asking again would most likely be in vain."""
        return time.monotonic() < self._until

    def tell(self, error: BaseException) -> None:
        now = time.monotonic()
        with self._lock:
            self._until = now + self._pause_s
            if self._told_at is not None and now - self._told_at < LOG_INTERVAL_S:
                return
            self._told_at = now
        logger.warning("%s: %s: %s", self._words, type(error).__name__, error)


_outage = Outage("events are lost, the channel layer does not answer")


def publish_on_commit(event_type: str, row_id: int, version: int | None = None) -> None:
    """Send `{"type", "id", "version"}` to the group `pool` once the transaction commits; at once outside of one.

    Best effort: a channel layer that is gone never breaks the write that the event tells of.
    """
    if event_type not in EVENT_TYPES:
        raise ValueError(f"{event_type!r} is no event type; known are {', '.join(EVENT_TYPES)}")
    event = {"type": event_type, "id": row_id, "version": time.time_ns() // 1_000_000 if version is None else version}
    transaction.on_commit(lambda: _send(event), robust=True)


def _send(event: dict[str, Any]) -> None:
    if _outage.lasts:
        return
    try:
        async_to_sync(_publish)(event)
    except (OSError, RedisError) as error:
        _outage.tell(error)


async def _publish(event: dict[str, Any]) -> None:
    layer = get_channel_layer()
    if layer is None:
        return
    async with asyncio.timeout(SEND_TIMEOUT_S):
        await layer.group_send(GROUP, {"type": "pool.event", "event": event})
