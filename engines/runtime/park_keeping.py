"""Which snapshots of this engine's stay in the store: a conversation's last ones, and system prompts while they are used.

Sessions with a name are bounded by the store itself; here the ends that a longer one has made superfluous are dropped, and older
cuts, each of which holds rows of its own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, replace

from engines.errors import EngineError, RpcRefused
from engines.runtime.park_metrics import ParkMetrics
from engines.runtime.store_keys import SnapshotName
from engines.runtime.store_link import StoreLink
from engines.runtime.store_pieces import Prefix
from engines.runtime.store_save import SavedSnapshot
from engines.store.client import StoreClient
from engines.wire_store import Manifest

log = logging.getLogger("hydra.engine.park")

MAX_RECENT = 512
# Cuts of a conversation that are kept, beside its system prompt's: the last one, and the one before for a turn asked again.
KEPT_CUTS = 2
MAX_PINS = 64
PIN_S = 3600.0


@dataclass(frozen=True)
class _Recent:
    name: SnapshotName
    tenant: str
    session: str
    ends: bool


class Keeping:
    """For the event loop; what it remembers is of this process only, and nothing depends on it."""

    def __init__(self, link: StoreLink, metrics: ParkMetrics) -> None:
        self._link = link
        self._metrics = metrics
        self._recent: deque[_Recent] = deque(maxlen=MAX_RECENT)
        self._pins: OrderedDict[str, float] = OrderedDict()
        self._pinning = asyncio.Lock()

    async def supersede(self, saved: SavedSnapshot, prefix: Prefix, *, ends: bool) -> None:
        """A snapshot was saved; `ends`: it is all of a conversation so far."""
        if prefix.shared:
            return
        latest = _Recent(saved.name, prefix.origin.tenant, prefix.session, ends)
        mine = [old for old in self._recent if (old.tenant, old.session) == (latest.tenant, latest.session)]
        mine = [old for old in mine if old.name.tokens < saved.tokens]
        earlier = [old for old in mine if saved.chain.point(old.name.tokens) == old.name.point]
        # A session that has moved on from an end will not come back to it; of nameless ones nobody knows.
        going = [old for old in (mine if prefix.session else earlier) if old.ends and ends]
        if not ends:
            cuts = sorted((old for old in earlier if not old.ends), key=lambda old: old.name.tokens)
            going += cuts[: 1 - KEPT_CUTS]
        if going:
            async with self._link.client() as client:
                for old in going:
                    await client.delete(old.name.text)
        self._recent = deque(
            (old for old in self._recent if old not in going and old.name != saved.name), maxlen=MAX_RECENT
        )
        self._recent.append(latest)

    # --- shared system prompts ------------------------------------------------------------------

    async def used(self, name: SnapshotName, manifest: Manifest) -> None:
        """A system prompt was taken up by another conversation than the one that saved it: it stays from now on."""
        try:
            async with self._pinning, self._link.client() as client:
                known = name.text in self._pins
                self._pins[name.text] = time.monotonic()
                self._pins.move_to_end(name.text)
                if not known or not manifest.pinned:
                    await self._pin(client, name, manifest)
                await self._unpin(client, self._stale())
        except EngineError as error:
            self._metrics.failed("pin", error)

    async def _pin(self, client: StoreClient, name: SnapshotName, manifest: Manifest) -> None:
        try:
            await client.put_manifest(name.text, replace(manifest, pinned=True))
        except RpcRefused:
            # Too much is pinned: the longest unused gives way, and this one is tried when it is used again.
            self._pins.pop(name.text, None)
            await self._unpin(client, list(self._pins)[:1])
            raise

    def _stale(self) -> list[str]:
        oldest = time.monotonic() - PIN_S
        too_many = list(self._pins)[: max(0, len(self._pins) - MAX_PINS)]
        return too_many + [text for text, used_at in self._pins.items() if used_at < oldest and text not in too_many]

    async def _unpin(self, client: StoreClient, names: list[str]) -> None:
        for text in names:
            self._pins.pop(text, None)
            manifest = await client.get_manifest(text)
            if manifest is not None and manifest.pinned:
                await client.put_manifest(text, replace(manifest, pinned=False))
