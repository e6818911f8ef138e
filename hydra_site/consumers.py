"""The dashboard's WebSocket: the whole pool on connect, then what changed."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress

from hydra_site.pool_snapshot import to_wire
from hydra_site.pool_watcher import watcher
from sessions.identity import Owner
from sessions.panel_socket import CLOSE_SILENT_PAGE, PanelSocket

# A page answers every frame with "seen"; one that is silent for so long has gone or hangs.
SEEN_TIMEOUT_S = 60.0


class PoolConsumer(PanelSocket):
    """Sends `{"type": "pool", "taken_at", "version", "snapshot"|null, "samples"}`; the page answers `{"type": "seen"}`.

    The next frame waits for that answer and is made from the latest snapshot at that moment, so that a slow browser
    gets fewer frames instead of a growing buffer. `snapshot` is null while the version is what the page has.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sender: asyncio.Task[None] | None = None
        self.seen = asyncio.Event()
        self.owner_scope: str | None = ""

    async def opened(self, user_id: int) -> None:
        # As on the sessions pages: the staff sees all conversations, others their own.
        self.owner_scope = None if self.scope["user"].is_staff else Owner(user_id=user_id).scope
        self.sender = asyncio.create_task(self._send_frames(), name="pool-page")

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None) -> None:
        self.seen.set()

    async def ended(self) -> None:
        if self.sender is not None:
            self.sender.cancel()
            with suppress(asyncio.CancelledError):
                await self.sender

    async def _send_frames(self) -> None:
        pool = watcher()
        version_sent = 0
        sample_sent_s = 0.0
        async with pool.subscribe() as refreshed:
            while True:
                await refreshed.wait()
                refreshed.clear()
                snapshot = pool.snapshot
                if snapshot is None:
                    continue
                samples = pool.samples_after(sample_sent_s)
                frame = json.dumps(
                    {
                        "type": "pool",
                        "version": snapshot.version,
                        "taken_at": to_wire(snapshot.taken_at),
                        "samples": to_wire(samples),
                    }
                )
                shown = snapshot.text_for(self.owner_scope) if snapshot.version != version_sent else "null"
                version_sent = snapshot.version
                sample_sent_s = samples[-1].at_s if samples else sample_sent_s
                self.seen.clear()
                await self.send(f'{frame[:-1]}, "snapshot": {shown}}}')
                try:
                    async with asyncio.timeout(SEEN_TIMEOUT_S):
                        await self.seen.wait()
                except TimeoutError:
                    await self.close(CLOSE_SILENT_PAGE)
                    return
