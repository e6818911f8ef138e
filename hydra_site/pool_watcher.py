"""One shared task per process that keeps the pool's snapshot fresh while somebody looks at it.

It polls once a second, earlier when a row changed (channel-layer group "pool"), and sleeps when the last page leaves.
Subscribers hold an asyncio.Event, not a queue: a slow page skips to the latest snapshot, so memory cannot grow.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from weakref import WeakKeyDictionary

from channels.layers import get_channel_layer
from redis.exceptions import RedisError

from hydra_site.pool_snapshot import PoolSnapshot, Sample, take_snapshot

log = logging.getLogger(__name__)

POLL_S = 1.0
# Events come in bursts (a probe writes many rows); between two refreshes there is at least this pause.
SHORTEST_PAUSE_S = 0.25
HISTORY_S = 300.0
LISTEN_RETRY_S = 10.0
EVENT_GROUP = "pool"


class PoolWatcher:
    """Holds the latest snapshot and the last five minutes of samples. Belongs to one event loop; `watcher()` gives it."""

    def __init__(self) -> None:
        self.snapshot: PoolSnapshot | None = None
        self.history: deque[Sample] = deque(maxlen=int(HISTORY_S / SHORTEST_PAUSE_S))
        self._subscribers: set[asyncio.Event] = set()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def subscribe(self) -> AsyncIterator[asyncio.Event]:
        """Yields an event that is set after every refresh. While any subscription lives, the watcher polls."""
        refreshed = asyncio.Event()
        self._subscribers.add(refreshed)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="pool-watcher")
        elif self.snapshot is not None:
            refreshed.set()
        try:
            yield refreshed
        finally:
            self._subscribers.discard(refreshed)
            if not self._subscribers:
                await self._stop()

    def samples_after(self, at_s: float) -> list[Sample]:
        """The samples younger than `at_s` (seconds since 1970) that are still kept."""
        return [sample for sample in self.history if sample.at_s > at_s]

    async def _stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _run(self) -> None:
        listener = asyncio.create_task(self._listen(), name="pool-watcher-events")
        loop = asyncio.get_running_loop()
        try:
            while True:
                started_s = loop.time()
                self._changed.clear()
                await self._refresh()
                await asyncio.sleep(SHORTEST_PAUSE_S)
                rest_s = started_s + POLL_S - loop.time()
                with suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, rest_s)):
                        await self._changed.wait()
        finally:
            listener.cancel()
            with suppress(asyncio.CancelledError):
                await listener

    async def _refresh(self) -> None:
        """Takes a snapshot and wakes the subscribers. A failure is logged, and the pages see their numbers grow old."""
        try:
            self.snapshot, sample = await take_snapshot(self.snapshot)
        except Exception:
            # Whatever it is (database restarting, a bug in one row), the next second tries again for every open page.
            log.exception("The pool's snapshot could not be taken")
            return
        self.history.append(sample)
        while self.history and self.history[0].at_s < sample.at_s - HISTORY_S:
            self.history.popleft()
        for refreshed in self._subscribers:
            refreshed.set()

    async def _listen(self) -> None:
        """Turns pool events into early refreshes. Without a channel layer the poll alone keeps the page right."""
        while True:
            try:
                await self._listen_once()
            except (OSError, RedisError) as error:
                log.warning("No pool events until the channel layer is back: %s", error)
            await asyncio.sleep(LISTEN_RETRY_S)

    async def _listen_once(self) -> None:
        layer = get_channel_layer()
        if layer is None:
            return
        channel = await layer.new_channel()
        await layer.group_add(EVENT_GROUP, channel)
        try:
            while True:
                await layer.receive(channel)
                self._changed.set()
        finally:
            await layer.group_discard(EVENT_GROUP, channel)


_watchers: WeakKeyDictionary[asyncio.AbstractEventLoop, PoolWatcher] = WeakKeyDictionary()


def watcher() -> PoolWatcher:
    """The running loop's watcher, made on first use."""
    loop = asyncio.get_running_loop()
    if loop not in _watchers:
        _watchers[loop] = PoolWatcher()
    return _watchers[loop]
