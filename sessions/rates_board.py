"""What this process knows of the engines' speeds and of the conversations that they hold: asked for once a second, while in use.

No request waits for it but an engine's first, and that not for long. Other replicas' work shows in the next rates; this
process's own since the last ones is counted here.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from engines.client import EngineClient
from engines.errors import EngineUnreachable
from engines.rates_view import EngineRates
from engines.services import EngineEndpoint
from pools.router_views import DecodeRates, EngineView, LinkView, PoolView, PrefillFit, Sent, SnapshotView

FRESH_S = 1.0
# An engine that was never asked is worth waiting for a little: its first requests would go by guesses else.
FIRST_WAIT_S = 0.3
# A host that is silent must not be asked again by every request.
RETRY_S = 2.0
# Rates that are older tell of another time: slots count as this process sees them.
STALE_S = 15.0
MAX_ENGINES = 1024
MAX_RETRY_AFTER_S = 120
# Until an engine has told its own: one that is neither fast nor slow.
UNKNOWN_PREFILL = PrefillFit(0.002)
UNKNOWN_DECODE = DecodeRates(((1, 0.05), (8, 0.1)))
# Until a link was measured: memory of the same host, and a gigabit's network.
MEMORY_BYTES_PER_S = 1e9
NETWORK = LinkView(1e8, 0.001)
# How much the newest word of an engine counts, among those of its host.
LINK_WEIGHT = 0.5
MAX_LINKS = 4096

logger = logging.getLogger(__name__)


@dataclass
class _Known:
    """An engine's rates and when they were taken; what was sent to it since, and how many requests of this process run there."""

    rates: EngineRates | None = None
    taken_s: float = float("-inf")
    asked_s: float = float("-inf")
    asking: asyncio.Task[None] | None = None
    sent: list[tuple[float, int]] = field(default_factory=list)
    running: int = 0


class RatesBoard:
    """Used on one event loop only."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], _Known] = {}
        # From a store's address to a host, by what that host's engines have told; outlives those engines.
        self._link_speeds: dict[tuple[str, str], float] = {}

    async def look(self, endpoints: Sequence[EngineEndpoint]) -> None:
        """Have what is old asked for again; waits only for engines that have never answered, FIRST_WAIT_S at most."""
        now = time.monotonic()
        first: list[asyncio.Task[None]] = []
        for endpoint in endpoints:
            known = self._of(endpoint)
            if known.asking is None and now - known.taken_s >= FRESH_S and now - known.asked_s >= _pause_s(known):
                known.asked_s = now
                known.asking = asyncio.create_task(self._ask(endpoint, known), name=f"rates-{endpoint.name}")
                if known.taken_s == float("-inf"):
                    first.append(known.asking)
        if first:
            await asyncio.wait(first, timeout=FIRST_WAIT_S)

    def view(
        self,
        endpoints: Sequence[EngineEndpoint],
        *,
        held: dict[int, int],
        session: str,
        prefixes: dict[int, int],
        snapshots: tuple[SnapshotView, ...] = (),
    ) -> PoolView:
        """The pool as the router takes it. `held` and `prefixes` are what is known of this session beside the engines' word."""
        on_engines = dict(held)
        for endpoint in endpoints:
            rates = self._of(endpoint).rates
            if rates is not None and session in rates.sessions:
                on_engines[endpoint.engine_id] = rates.sessions[session]
        engines = tuple(self._engine_view(endpoint) for endpoint in endpoints)
        return PoolView(
            engines,
            held={session: on_engines},
            prefixes={"chain": prefixes},
            snapshots={session: snapshots},
            links=self._links(endpoints, snapshots),
            sent={endpoint.engine_id: self._sent(endpoint) for endpoint in endpoints},
        )

    def holds(self, endpoint: EngineEndpoint, session: str, since_s: float = float("-inf")) -> int | None:
        """Tokens of the session there; None where the engine has not told lately, or not since `since_s` (monotonic)."""
        known = self._of(endpoint)
        if known.rates is None or time.monotonic() - known.taken_s > STALE_S or known.taken_s < since_s:
            return None
        return known.rates.sessions.get(session, 0)

    def limit(self, endpoint: EngineEndpoint, usual_queue: int) -> int:
        """How many requests may run or wait there."""
        rates = self._of(endpoint).rates
        return endpoint.slots + usual_queue if rates is None else rates.slots + rates.queue_limit

    def next_place_s(self, model: str) -> int:
        """When a place in some line of the model's engines is free, by how long requests hold a slot there."""
        waits = [
            known.rates.request_s / max(1, known.rates.slots)
            for known in self._known.values()
            if known.rates is not None and known.rates.model == model
        ]
        return min(MAX_RETRY_AFTER_S, max(1, math.ceil(min(waits, default=1.0))))

    def enter(self, endpoint: EngineEndpoint, missing_tokens: int) -> None:
        """A request goes there that has so many tokens to compute."""
        known = self._of(endpoint)
        known.running += 1
        known.sent.append((time.monotonic(), missing_tokens))

    def leave(self, endpoint: EngineEndpoint) -> None:
        known = self._of(endpoint)
        known.running = max(0, known.running - 1)

    def running(self, endpoint: EngineEndpoint) -> int:
        return self._of(endpoint).running

    def forget(self, endpoint: EngineEndpoint) -> None:
        """The engine was lost: what it held is gone."""
        known = self._known.pop(_place(endpoint), None)
        if known is not None and known.asking is not None:
            known.asking.cancel()

    def _of(self, endpoint: EngineEndpoint) -> _Known:
        known = self._known.get(_place(endpoint))
        if known is None:
            if len(self._known) >= MAX_ENGINES:
                self._known = {place: one for place, one in self._known.items() if one.running or one.asking}
            known = self._known[_place(endpoint)] = _Known()
        return known

    async def _ask(self, endpoint: EngineEndpoint, known: _Known) -> None:
        asked_s = time.monotonic()
        try:
            rates = await EngineClient(endpoint.base_url, endpoint.secret).rates()
        except EngineUnreachable as error:
            # Whoever sends a request there finds out for itself; its head looks after the engine.
            logger.debug("engine %s tells no rates: %s", endpoint.name, error)
        else:
            self._learn_links(endpoint.host_name, known.rates, rates)
            known.rates, known.taken_s = rates, time.monotonic()
            known.sent = [entry for entry in known.sent if entry[0] > asked_s]
        finally:
            known.asking = None

    def _learn_links(self, host_name: str, before: EngineRates | None, rates: EngineRates | None) -> None:
        for address, speed in (rates.links if rates is not None else {}).items():
            if before is not None and before.links.get(address) == speed:
                continue  # Nothing was read from there since.
            key = (address, host_name)
            old = self._link_speeds.pop(key, speed)
            self._link_speeds[key] = old + LINK_WEIGHT * (speed - old)
            if len(self._link_speeds) > MAX_LINKS:
                del self._link_speeds[next(iter(self._link_speeds))]

    def _network(self, address: str, host_name: str) -> LinkView:
        speed = self._link_speeds.get((address, host_name))
        return NETWORK if speed is None else LinkView(speed, NETWORK.latency_s)

    def _sent(self, endpoint: EngineEndpoint) -> Sent:
        known = self._of(endpoint)
        if known.rates is None:
            return Sent(known.running)
        # An answer that has come to its end meanwhile holds nothing any more.
        sent = known.sent[-known.running :] if known.running else []
        return Sent(len(sent), sum(tokens for _, tokens in sent))

    def _engine_view(self, endpoint: EngineEndpoint) -> EngineView:
        known = self._of(endpoint)
        features = frozenset({"text", "vision"} if endpoint.sees_images else {"text"})
        rates = known.rates
        if rates is None:
            return EngineView(
                endpoint.engine_id,
                endpoint.name,
                endpoint.host_name,
                endpoint.model_name,
                UNKNOWN_PREFILL,
                UNKNOWN_DECODE,
                endpoint.slots,
                endpoint.context_tokens,
                endpoint.context_tokens * endpoint.slots,
                free_slots=endpoint.slots,
                request_s=1.0,
                features=features,
            )
        return EngineView(
            endpoint.engine_id,
            endpoint.name,
            endpoint.host_name,
            endpoint.model_name,
            PrefillFit(rates.prefill_token_s, rates.prefill_pair_s),
            DecodeRates(rates.steps, rates.resident_token_s),
            rates.slots,
            rates.context_tokens,
            rates.cells,
            free_slots=rates.free_slots,
            decoding=rates.decoding,
            resident_tokens=rates.resident_tokens,
            pending_tokens=rates.pending_tokens,
            queue_length=rates.queue_length,
            queue_limit=rates.queue_limit,
            request_s=rates.request_s,
            chunk_s=rates.chunk_s if rates.interleaves else 0.0,
            idle_tokens=rates.idle_tokens,
            idle_s=rates.idle_s,
            features=features,
            kv_group=rates.kv_group,
            resumes=bool(rates.kv_group),
        )

    def _links(
        self, endpoints: Sequence[EngineEndpoint], snapshots: Sequence[SnapshotView]
    ) -> dict[tuple[str, str], LinkView]:
        links: dict[tuple[str, str], LinkView] = {}
        for endpoint in endpoints:
            rates = self._of(endpoint).rates
            speed = rates.restore_bytes_per_s if rates is not None else 0.0
            for snapshot in snapshots:
                links[snapshot.host, endpoint.host_name] = (
                    LinkView(speed or MEMORY_BYTES_PER_S)
                    if snapshot.host == endpoint.host_name
                    else self._network(snapshot.address, endpoint.host_name)
                )
        return links


def _place(endpoint: EngineEndpoint) -> tuple[int, str]:
    """A restarted engine listens elsewhere, and holds nothing of what it held."""
    return endpoint.engine_id, endpoint.base_url


def _pause_s(known: _Known) -> float:
    return FRESH_S if known.rates is not None else RETRY_S
