"""What this process knows of the engines' speeds and of the conversations that they hold: asked for once a second, while in use.

No request waits for it but an engine's first, and that not for long. Other replicas' work shows in the next rates; this
process's own since the last ones is counted here.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from urllib.parse import urlsplit

from engines.client import EngineClient
from engines.errors import EngineUnreachable
from engines.rates_view import EngineRates
from engines.services import EngineEndpoint
from pools.router_plan import Candidate
from pools.router_views import EngineView, LinkView, PoolView, PrefillFit, Sent, SnapshotView
from sessions import engine_views
from sessions.first_tokens import ASLEEP_S, USUAL_FIXED_S, FirstTokens
from sessions.times_told import TimesTold

FRESH_S = 1.0
# An engine that was never asked is worth waiting for a little: its first requests would go by guesses else.
FIRST_WAIT_S = 0.3
# One whose rates are of another time (see STALE_S) tells quickly how it stands now, or the old ones must do.
AGAIN_WAIT_S = 0.05
# So long an engine's word counts that it is at work.
BUSY_S = 2.0
# From its choice until its engine counts it a request takes so long: rates that were asked for meanwhile do not know it.
ON_ITS_WAY_S = 0.1
# A host that is silent must not be asked again by every request.
RETRY_S = 2.0
# Rates that are older tell of another time: slots count as this process sees them.
STALE_S = 15.0
MAX_ENGINES = 1024
MAX_RETRY_AFTER_S = 120
# Until a link was measured: memory of the same host, and a gigabit's network.
MEMORY_BYTES_PER_S = 1e9
NETWORK = LinkView(1e8, 0.001)
# A split over a link that nobody has measured is tried no more often.
TRY_AGAIN_S = 600.0
# How much the newest word of an engine counts, among those of its host.
LINK_WEIGHT = 0.5
MAX_LINKS = 4096
# How much an engine's newest answer counts in what requests cost beside their steps on engines that are new.
FIXED_WEIGHT = 0.05

logger = logging.getLogger(__name__)


@dataclass
class _Known:
    """An engine's rates and when they were taken; what was sent to it since, and how many requests of this process run there;
    when it was seen at work, and what its first tokens took."""

    rates: EngineRates | None = None
    taken_s: float = float("-inf")
    asked_s: float = float("-inf")
    asking: asyncio.Task[None] | None = None
    sent: list[tuple[float, int]] = field(default_factory=list)
    running: int = 0
    worked_s: float = float("-inf")
    first_tokens: FirstTokens = field(default_factory=FirstTokens)
    gpu_id: int | None = None

    def is_busy(self, now_s: float) -> bool:
        """Whether it computes, by what this process sent there and by its own last word."""
        if self.running:
            return True
        told = self.rates if now_s - self.taken_s < BUSY_S else None
        return told is not None and bool(told.decoding or told.pending_tokens)


@dataclass(frozen=True)
class Answered:
    """What an answer told: tokens of its prompt, how many of them were there already, and where its time went."""

    prompt_tokens: int
    cached_tokens: int
    came: TimesTold


class RatesBoard:
    """Used on one event loop only."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], _Known] = {}
        # From a store's address to a host, by what that host's engines have told; outlives those engines.
        self._link_speeds: dict[tuple[str, str], float] = {}
        # From host to host, as split requests have shown; and when one was last sent that way.
        self._move_speeds: dict[tuple[str, str], float] = {}
        self._tried_s: dict[tuple[str, str], float] = {}
        self._usual_fixed_s = USUAL_FIXED_S

    async def look(self, endpoints: Sequence[EngineEndpoint]) -> None:
        """Have what is old asked for again; waits only for engines that have never answered, FIRST_WAIT_S at most, and for those
        whose rates are of another time, AGAIN_WAIT_S."""
        now = time.monotonic()
        first: list[asyncio.Task[None]] = []
        again: list[asyncio.Task[None]] = []
        for endpoint in endpoints:
            known = self._of(endpoint)
            if known.asking is None and now - known.taken_s >= FRESH_S and now - known.asked_s >= _pause_s(known):
                known.asked_s = now
                known.asking = asyncio.create_task(self._ask(endpoint, known), name=f"rates-{endpoint.name}")
                if known.taken_s == float("-inf"):
                    first.append(known.asking)
                elif now - known.taken_s > STALE_S:
                    again.append(known.asking)
        if first or again:
            await asyncio.wait(first + again, timeout=FIRST_WAIT_S if first else AGAIN_WAIT_S)

    def view(
        self,
        endpoints: Sequence[EngineEndpoint],
        *,
        held: dict[int, int],
        session: str,
        prefixes: dict[int, int],
        snapshots: tuple[SnapshotView, ...] = (),
        kv_losses: Mapping[tuple[int, int], float] = MappingProxyType({}),
        move_speeds: Mapping[tuple[str, str], float] = MappingProxyType({}),
    ) -> PoolView:
        """The pool as the router takes it. `held` and `prefixes` are what is known of this session beside the engines' word,
        `kv_losses` what is lost between quants, `move_speeds` (bytes/s) what moves between hosts have shown to any replica."""
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
            links=self._links(endpoints, snapshots) | self._pairs(endpoints, move_speeds),
            sent={endpoint.engine_id: self._sent(endpoint) for endpoint in endpoints},
            kv_losses=kv_losses,
            most_kv_loss=max((endpoint.most_kv_loss for endpoint in endpoints), default=0.0),
        )

    def tries(self, source_host: str, target_host: str) -> None:
        """A request is split between engines of these hosts."""
        self._tried_s.pop((source_host, target_host), None)
        self._tried_s[source_host, target_host] = time.monotonic()
        if len(self._tried_s) > MAX_LINKS:
            del self._tried_s[next(iter(self._tried_s))]

    def moved(self, source_host: str, target_host: str, bytes_per_s: float) -> None:
        """A state went from an engine of one host to one of another, or of the same."""
        key = (source_host, target_host)
        old = self._move_speeds.pop(key, bytes_per_s)
        self._move_speeds[key] = old + LINK_WEIGHT * (bytes_per_s - old)
        if len(self._move_speeds) > MAX_LINKS:
            del self._move_speeds[next(iter(self._move_speeds))]

    def holds(self, endpoint: EngineEndpoint, session: str, since_s: float = float("-inf")) -> int | None:
        """Tokens of the session there; None where the engine has not told lately, or not since `since_s` (monotonic)."""
        known = self._of(endpoint)
        if known.rates is None or time.monotonic() - known.taken_s > STALE_S or known.taken_s < since_s:
            return None
        return known.rates.sessions.get(session, 0)

    def has_room(self, endpoint: EngineEndpoint) -> bool:
        """Whether a request would get a slot there at once, as far as is known."""
        rates = self._of(endpoint).rates
        return rates is None or rates.free_slots - rates.queue_length > self._sent(endpoint).requests

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
        known.worked_s = time.monotonic()
        known.sent.append((time.monotonic(), missing_tokens))

    def leave(self, endpoint: EngineEndpoint) -> None:
        known = self._of(endpoint)
        known.running = max(0, known.running - 1)
        # An engine that serves but never tells its rates must not make the list grow.
        known.sent = known.sent[-known.running :] if known.running else []
        known.worked_s = time.monotonic()

    def answered(self, endpoint: EngineEndpoint, chosen: Candidate, guessed_tokens: int, told: Answered) -> None:
        """A request that was sent there by `chosen`, with a prompt guessed at `guessed_tokens`, had its first token."""
        known, terms = self._of(endpoint), chosen.terms
        if known.rates is None or chosen.mode != "solo":
            return
        rates = known.rates
        fit = PrefillFit(rates.prefill_token_s, rates.prefill_pair_s, rates.prefill_beside_s)
        guessed_s = fit.seconds(chosen.cached_tokens, guessed_tokens, rates.resident_tokens)
        # By what was then computed, so that a wrong guess at a prompt is not taken for a slow engine.
        computed_s = fit.seconds(told.cached_tokens, told.prompt_tokens, rates.resident_tokens)
        # By the rates of then, with others' steps between.
        then = terms.prefill_s / guessed_s if guessed_s > 0 else 1.0
        promised_s = computed_s * then + chosen.step_s
        neighbours = self._neighbours(endpoint)
        if neighbours and not terms.crowd_s:
            return  # They came later, so there is nothing that it was promised beside them.
        known.first_tokens.note(
            promised_s, told.came.prefill_s, told.came.fixed_s, asleep=terms.wake_s > 0, neighbours=chosen.neighbours
        )
        self._usual_fixed_s += FIXED_WEIGHT * (known.first_tokens.now.fixed_s - self._usual_fixed_s)

    def _neighbours(self, endpoint: EngineEndpoint) -> int:
        """How many other engines compute on its device now, as far as this process knows."""
        now_s, place = time.monotonic(), _place(endpoint)
        return (
            0
            if endpoint.gpu_id is None
            else sum(
                known.gpu_id == endpoint.gpu_id and other != place and known.is_busy(now_s)
                for other, known in self._known.items()
            )
        )

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
            known = self._known[_place(endpoint)] = _Known(first_tokens=FirstTokens(self._usual_fixed_s))
        known.gpu_id = endpoint.gpu_id
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
            known.sent = [entry for entry in known.sent if entry[0] > asked_s - ON_ITS_WAY_S]
            if rates is not None and (rates.decoding or rates.pending_tokens):
                known.worked_s = known.taken_s
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
            return Sent((0,) * known.running)
        # An answer that has come to its end meanwhile holds nothing any more.
        sent = known.sent[-known.running :] if known.running else []
        return Sent(tuple(tokens for _, tokens in sent))

    def _engine_view(self, endpoint: EngineEndpoint) -> EngineView:
        known = self._of(endpoint)
        beside = known.first_tokens.now
        if known.rates is None:
            return engine_views.unmeasured(endpoint, beside)
        asleep = time.monotonic() - known.worked_s > ASLEEP_S
        return engine_views.measured(
            endpoint, known.rates, beside, asleep=asleep, neighbours=self._neighbours(endpoint)
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

    def _pairs(
        self, endpoints: Sequence[EngineEndpoint], move_speeds: Mapping[tuple[str, str], float]
    ) -> dict[tuple[str, str], LinkView]:
        """Between the engines' hosts: as moves have shown, else as states come in from memory or from that host's store; else a
        guess, which one request now and then may rely on: what comes of it is a measure."""
        told = [(endpoint, rates) for endpoint in endpoints if (rates := self._of(endpoint).rates) and rates.streams_kv]
        links: dict[tuple[str, str], LinkView] = {}
        for source, _ in told:
            address = urlsplit(source.base_url).hostname or ""
            for target, rates in told:
                key = (source.host_name, target.host_name)
                if key in links or source is target:
                    continue
                moved = self._move_speeds.get(key) or move_speeds.get(key, 0.0)
                if key[0] == key[1]:
                    links[key] = LinkView(moved or rates.restore_bytes_per_s or MEMORY_BYTES_PER_S)
                elif speed := moved or self._read_from(address, target.host_name):
                    links[key] = LinkView(speed, NETWORK.latency_s)
                else:
                    tried_s = self._tried_s.get(key, float("-inf"))
                    links[key] = replace(NETWORK, doubted=time.monotonic() - tried_s < TRY_AGAIN_S)
        return links

    def _read_from(self, address: str, host_name: str) -> float | None:
        """How fast anything at that address was read there, whatever its port."""
        found = (
            speed
            for (place, reader), speed in self._link_speeds.items()
            if reader == host_name and place.rpartition(":")[0].strip("[]") == address
        )
        return next(found, None)


def _place(endpoint: EngineEndpoint) -> tuple[int, str]:
    """A restarted engine listens elsewhere, and holds nothing of what it held."""
    return endpoint.engine_id, endpoint.base_url


def _pause_s(known: _Known) -> float:
    return FRESH_S if known.rates is not None else RETRY_S
