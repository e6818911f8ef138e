"""Conversations between the engine and its host's store: saved when a turn has ended, parked when they are idle, a slot is
asked for or the engine stops, and found again when a request comes.

For the event loop. Nothing here may keep a request from being computed: whatever fails is counted, and the request goes on
without the store.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from contextlib import suppress

from engines.config import EngineConfig
from engines.errors import EngineError, EngineStopping, NotServed, SessionNotHeld, SlotBusy, StateSharingOff
from engines.runtime.core import EngineCore
from engines.runtime.generation import Generation
from engines.runtime.park_entry import StoreEntry
from engines.runtime.park_keeping import Keeping
from engines.runtime.park_metrics import ParkMetrics
from engines.runtime.park_rates import ParkRates
from engines.runtime.park_survey import Holding, Key, find, free, survey
from engines.runtime.state_desk import StateDesk
from engines.runtime.state_terms import SharingTerms
from engines.runtime.store_link import StoreLink
from engines.runtime.store_pieces import ContextPieces, EntryPieces, Prefix, PrefixGone
from engines.runtime.store_save import SavedSnapshot, SnapshotSaver
from engines.store.errors import StoreError

log = logging.getLogger("hydra.engine.park")

TICK_S = 0.25
# A turn's end is saved when nobody has asked anything new for so long: a client that goes on at once would only be disturbed.
QUIET_S = 0.2
# What failed to be saved is tried again after so long, unless it changed meanwhile.
RETRY_S = 10.0
LOOK_AGAIN_S = 60.0
READY_WAIT_S = 0.5
MAX_REMEMBERED = 4096
# Looks at what is to be parked: it may move into host memory between a look and the save.
LOOKS = 3
# What is broken off may have to take leave of a store that does not answer; an engine that stops does not wait for that.
LEAVE_S = 0.5


class Parking:
    """One engine's. Harmless where no store is configured: then nothing is saved and nobody is asked."""

    def __init__(self, config: EngineConfig, core: EngineCore, desk: StateDesk) -> None:
        self._config = config
        self._core = core
        self._desk = desk
        self._link = StoreLink(config.store_host, config.store_port, config.store_secret)
        self.rates = ParkRates()
        self._metrics = ParkMetrics(core.metrics.registry, lambda: float(self.is_on and self._link.is_up))
        self._terms: SharingTerms | None = None
        self._entry: StoreEntry | None = None
        self._keeping = Keeping(self._link, self._metrics)
        self._watch: asyncio.Task[None] | None = None
        self._one_save = asyncio.Lock()
        self._making = asyncio.Lock()
        # Holdings that were saved as they are (0.0), or that failed and when.
        self._done: dict[Key, float] = {}
        self._epoch = 0

    @property
    def is_on(self) -> bool:
        return bool(self._config.store_port)

    def begin(self) -> None:
        if self.is_on and self._watch is None:
            self._watch = asyncio.ensure_future(self._run())

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait((self._watch,), timeout=LEAVE_S)
        if self._entry is not None:
            await self._entry.close()
        await self._link.close()

    async def ready(self) -> None:
        """Waits until requests can be looked for. Raises what `park_slot` does, but for what is about a slot."""
        await self._require_terms()

    # --- requests -------------------------------------------------------------------------------

    async def look_up(self, generations: Sequence[Generation], stores: Sequence[tuple[str, int]]) -> None:
        """Tells each generation what the host's store has of its prompt, or what other hosts' have; within bounds."""
        if self._entry is None:
            await self._soon_ready()
        if self._entry is not None:
            await self._entry.look_up(generations, stores)

    async def _soon_ready(self) -> None:
        """An engine that has just started is ready at once, unless a large model's file is read for the first time."""
        try:
            async with asyncio.timeout(READY_WAIT_S):
                await self._require_terms()
        except (EngineError, TimeoutError) as error:
            log.debug("the store is not asked yet: %s", error)

    # --- asked for ------------------------------------------------------------------------------

    async def park_slot(self, slot_id: int) -> SavedSnapshot:
        """Saves a slot's conversation and empties the slot.

        Raises NotServed, SlotNotFound, SlotBusy, SlotEmpty, StateHasImages, StateSharingOff, EngineLoading, StoreAway, and what
        the store refuses with.
        """
        await self._require_terms()
        for _ in range(LOOKS):
            with suppress(PrefixGone):
                return await self._park(await self._core.perform(lambda cache: find(cache, slot_id)), "asked")
        raise SlotBusy("The conversation was used again while it was being saved.")

    async def park_session(self, session: str) -> list[SavedSnapshot]:
        """The same for all that is held of a session, the last used first. Raises SessionNotHeld instead of SlotEmpty."""
        await self._require_terms()
        saved: list[SavedSnapshot] = []
        for _ in range(LOOKS):
            holdings = [h for h in await self._core.perform(survey) if h.origin.session == session and session]
            if not holdings and not saved:
                raise SessionNotHeld("This engine holds nothing of that session.")
            if any(holding.busy for holding in holdings):
                raise SlotBusy("A request of the session is running.")
            with suppress(PrefixGone):
                for holding in holdings:
                    saved.append(await self._park(holding, "asked"))
                return saved
        raise SlotBusy("The conversation was used again while it was being saved.")

    async def stop(self) -> None:
        """Saves what is held, as far as `park_stop_s` allows; before the core is stopped. Raises nothing."""
        if self._terms is None or not self._link.may_ask:
            return
        saving = asyncio.ensure_future(self._save_all())
        if (await asyncio.wait((saving,), timeout=self._config.park_stop_s))[0]:
            return
        log.warning("the engine stops before all conversations are saved")
        saving.cancel()
        await asyncio.wait((saving,), timeout=LEAVE_S)

    async def _save_all(self) -> None:
        try:
            for holding in await self._core.perform(survey):
                if not holding.busy and self._done.get(holding.key) == 0.0 and not holding.whole_only:
                    continue
                await self._park_quietly(holding, "stop")
        except EngineError as error:
            log.warning("conversations could not be saved: %s", error)

    async def _require_terms(self) -> SharingTerms:
        if not self.is_on:
            raise NotServed("This engine has no store.", hint="Start it with store_port, the port of its host's store.")
        async with self._making:
            if self._terms is None:
                self._terms = await self._desk.terms()
                self._entry = StoreEntry(
                    self._config, self._core, self._terms, self._link, self.rates, self._metrics, self._keeping
                )
            return self._terms

    # --- saving ---------------------------------------------------------------------------------

    async def _park(self, holding: Holding, reason: str) -> SavedSnapshot:
        """Saves all that is worth it of a holding, and lets it go unless it was used meanwhile."""
        for prefix in self._worth(holding):
            if prefix != holding.end:
                await self._save(holding, prefix, reason)
        saved = await self._save(holding, holding.end, reason)
        self._remember(holding)
        if not holding.busy and await self._core.perform(free(holding)):
            self._metrics.freed.labels(reason).inc()
        return saved

    async def _park_quietly(self, holding: Holding, reason: str) -> None:
        """A busy one is saved as far as that is possible, and stays."""
        try:
            if holding.busy and holding.whole_only:
                for prefix in self._worth(holding):
                    await self._save(holding, prefix, reason)
            else:
                await self._park(holding, reason)
        except Exception as error:  # noqa: BLE001 -- logged there, and not tried at each look
            self._note_failure(holding, error)

    async def _save_turn(self, holding: Holding) -> None:
        try:
            for prefix in self._worth(holding):
                await self._save(holding, prefix, "system" if prefix.shared else "turn")
            self._remember(holding)
        except Exception as error:  # noqa: BLE001 -- as above
            self._note_failure(holding, error)

    @staticmethod
    def _worth(holding: Holding) -> list[Prefix]:
        system = holding.system()
        return [*([system] if system else []), *holding.turns()]

    async def _save(self, holding: Holding, prefix: Prefix, reason: str) -> SavedSnapshot:
        terms = await self._require_terms()
        maker = EntryPieces(terms, holding.entry) if holding.entry else ContextPieces(terms, prefix)
        # One at a time: a second one would only share the errands' small part of the core's time.
        async with self._one_save:
            saved = await SnapshotSaver(terms, self._link).save(prefix, maker)
            await self._keeping.supersede(saved, prefix, ends=prefix == holding.end)
        self._metrics.saved.labels(reason).inc()
        self._metrics.bytes.labels("saved").inc(saved.written_bytes)
        self._metrics.bytes.labels("skipped").inc(saved.total_bytes - saved.written_bytes)
        return saved

    def _remember(self, holding: Holding, failed_at: float = 0.0) -> None:
        self._done[holding.key] = failed_at
        while len(self._done) > MAX_REMEMBERED:
            self._done.pop(next(iter(self._done)))

    def _note_failure(self, holding: Holding, error: Exception) -> None:
        """Also of a fault of ours, or the same conversation would fail again at each look."""
        self._remember(holding, time.monotonic())
        if isinstance(error, PrefixGone):
            return  # somebody needed the room first; what was put away is a holding of its own
        self._metrics.failed("save", error)
        ours = not isinstance(error, (EngineError, OSError))
        level = logging.ERROR if ours or isinstance(error, (StoreError, OSError)) else logging.INFO
        log.log(
            level,
            "a conversation of %d tokens was not saved: %s",
            len(holding.tokens),
            error,
            exc_info=error if ours else None,
        )

    # --- by itself ------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Until cancelled, or until the engine can share no state."""
        seen: object = None
        look_at = 0.0
        while True:
            await asyncio.sleep(TICK_S)
            try:
                if self._core.state != "ready" or not self._link.may_ask:
                    continue
                await self._require_terms()
                now = self._core.cache.glance()
                if now != seen or time.monotonic() >= look_at or self._link.epoch != self._epoch:
                    seen, look_at = now, await self._look_around()
            except StateSharingOff as error:
                log.warning("conversations stay in this engine: %s", error)
                return
            except EngineStopping:
                return
            except Exception as error:
                # A fault of ours must not end the saving for good.
                self._metrics.failed("watch", error)
                log.exception("looking after idle conversations failed")

    async def _look_around(self) -> float:
        """Saves and parks what is due. Returns when something will be, should nothing change before."""
        if self._link.epoch != self._epoch:
            # The store was away and is back: it may have lost what it had.
            self._epoch = self._link.epoch
            self._done.clear()
        now, due = time.monotonic(), [time.monotonic() + LOOK_AGAIN_S]

        def is_due(key: Key) -> bool:
            at = math.inf if key.busy else self._due_at(key)
            due.append(at if at > now else now)
            return at <= now

        holdings = await self._core.perform(lambda cache: survey(cache, is_due))
        for holding in holdings:
            if len(holding.tokens) < holding.least:
                self._remember(holding, time.monotonic())
            elif 0 < self._config.park_idle_s <= now - holding.used_at:
                await self._park_quietly(holding, "idle")
            else:
                await self._save_turn(holding)
        return min(due)

    def _due_at(self, key: Key) -> float:
        """When it is to be saved, or parked."""
        done_at = self._done.get(key)
        if done_at is None:
            return key.used_at + QUIET_S
        if done_at:
            return done_at + RETRY_S
        return key.used_at + self._config.park_idle_s if self._config.park_idle_s else math.inf
