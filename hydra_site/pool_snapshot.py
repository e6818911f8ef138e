"""What the dashboard shows at one moment, as frozen dataclasses, and how it is gathered.

A snapshot joins the rows (hosts, engines, sessions: read through the apps' services) with the slots that each serving engine
reports itself. It holds no number that nobody measured: what is unknown is None, what is old keeps the time of its
last measurement.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from engines.client import EngineClient
from engines.config import SlotView
from engines.errors import EngineUnreachable
from engines.services import EngineView, engine_views
from engines.store_rows import StoreView, store_views
from hydra_site.attention import Attention, OpenWork, build_warnings, engine_troubles, host_warnings, is_waiting
from pools import jobs
from pools.choices import JobState
from pools.db import in_db
from pools.release import this_release
from pools.services import HostView, host_views
from sessions.services import ChatView, recent_sessions, session_details

RECENT_SESSIONS = 12
SLOT_POLL_TIMEOUT_S = 0.8
# Engines in these states answer /slots; an unhealthy one is asked too, since its answer is the first sign of recovery.
POLLED_STATES = frozenset({"ready", "unhealthy"})


@dataclass(frozen=True)
class SlotCell:
    """One slot as the page draws it. `progress` is the done share of a prefill (0..1), None in other states."""

    id: int
    state: str
    progress: float | None
    tokens_per_s: float | None
    context_used_tokens: int
    context_tokens: int


@dataclass(frozen=True)
class EngineCard:
    """An engine's row and its slots. `cells_stale_since` is set while the engine does not answer: the cells are that old.

    One that `waits` did not fail, though its row says so: what it starts with is not there yet.
    """

    engine: EngineView
    cells: tuple[SlotCell, ...]
    cells_stale_since: datetime | None
    waits: bool = False


@dataclass(frozen=True)
class Sample:
    """One point of the activity plot. None means that no engine answered, which is not the same as zero."""

    at_s: float
    tokens_per_s: float | None
    busy_slots: int | None
    slots: int | None


@dataclass(frozen=True)
class Work:
    """A build or a download that waits or runs. `done` of `total`: steps or bytes; total 0: not known yet."""

    id: int
    host: str
    kind: str
    subject: str
    state: str
    stage: str
    done: int
    total: int


@dataclass(frozen=True)
class SessionPage:
    """Whose a conversation is, and under which key its page is found."""

    id: int
    key: str
    scope: str


@dataclass(frozen=True)
class PoolSnapshot:
    """The whole pool. `version` grows when anything but the time changed; `taken_at` is when it was last true.

    `release` is this site's, which hosts are compared with.
    """

    version: int
    taken_at: datetime
    hosts: tuple[HostView, ...]
    engines: tuple[EngineCard, ...]
    sessions: tuple[ChatView, ...]
    attention: tuple[Attention, ...]
    stores: tuple[StoreView, ...] = ()
    work: tuple[Work, ...] = ()
    session_pages: tuple[SessionPage, ...] = ()
    release: str = ""

    def same_content(self, other: PoolSnapshot) -> bool:
        """True if a page that shows `other` would look the same with this one."""
        return dataclasses.replace(self, version=other.version, taken_at=other.taken_at) == other

    def seen_by(self, scope: str | None) -> PoolSnapshot:
        """What the owner of these conversations may see: of others' neither title nor page. None sees all."""
        if scope is None:
            return self
        pages = tuple(page for page in self.session_pages if page.scope == scope)
        own = {page.id for page in pages}
        chats = tuple(chat if chat.id in own else dataclasses.replace(chat, title="") for chat in self.sessions)
        return dataclasses.replace(self, sessions=chats, session_pages=pages)

    def text_for(self, scope: str | None) -> str:
        """What this owner may see, as JSON. The part that all see is made once, however many pages are open."""
        seen = self.seen_by(scope)
        own = json.dumps({name: to_wire(getattr(seen, name)) for name in _OWNED_FIELDS})
        return f"{self._shared_text[:-1]}, {own[1:]}"

    @cached_property
    def _shared_text(self) -> str:
        names = [field.name for field in dataclasses.fields(self) if field.name not in _OWNED_FIELDS]
        return json.dumps({name: to_wire(getattr(self, name)) for name in names})


async def take_snapshot(previous: PoolSnapshot | None) -> tuple[PoolSnapshot, Sample]:
    """Reads rows and slots now. The version is the previous one's unless the content changed.

    Raises django.db.Error when the database does not answer; an engine that does not answer only makes its cells stale.
    """
    rows = await in_db(_read_rows)
    old_cards = {card.engine.id: card for card in previous.engines} if previous else {}
    cards = await asyncio.gather(*(_engine_card(engine, old_cards.get(engine.id)) for engine in rows.engines))
    taken_at = datetime.now(UTC)
    snapshot = PoolSnapshot(
        version=previous.version + 1 if previous else 1,
        taken_at=taken_at,
        hosts=rows.hosts,
        engines=tuple(cards),
        sessions=rows.sessions,
        attention=attention_of(rows.hosts, rows.engines, rows.stores, rows.builds, rows.work),
        stores=rows.stores,
        work=rows.work,
        session_pages=rows.session_pages,
        release=this_release().version,
    )
    if previous and snapshot.same_content(previous):
        snapshot = dataclasses.replace(snapshot, version=previous.version)
    return snapshot, sample_of(taken_at, cards)


@dataclass(frozen=True)
class _Rows:
    hosts: tuple[HostView, ...]
    engines: tuple[EngineView, ...]
    sessions: tuple[ChatView, ...]
    stores: tuple[StoreView, ...]
    work: tuple[Work, ...]
    builds: tuple[jobs.JobView, ...]
    session_pages: tuple[SessionPage, ...]


def _read_rows() -> _Rows:
    return _Rows(
        hosts=host_views(),
        engines=engine_views(),
        sessions=recent_sessions(RECENT_SESSIONS),
        stores=store_views(),
        work=_work(),
        builds=jobs.ended_builds(),
        session_pages=tuple(
            SessionPage(detail.id, detail.key_hash, detail.scope)
            for detail in session_details(None, None, RECENT_SESSIONS)
        ),
    )


def _work() -> tuple[Work, ...]:
    """What runs before what waits."""
    fields = [field.name for field in dataclasses.fields(Work)]
    found = [Work(**{name: getattr(job, name) for name in fields}) for job in jobs.job_views(only_open=True)]
    return tuple(sorted(found, key=lambda work: work.state != "running"))


async def _engine_card(engine: EngineView, old: EngineCard | None) -> EngineCard:
    """The engine with fresh cells, or with its last known ones and their age."""
    if engine.base_url is None or engine.state not in POLLED_STATES:
        return EngineCard(engine, (), None, is_waiting(engine))
    try:
        async with asyncio.timeout(SLOT_POLL_TIMEOUT_S):
            slots = await EngineClient(engine.base_url, engine.secret).slots()
    except (EngineUnreachable, TimeoutError):
        # Not an error of ours: the head notices a dead engine by itself, the page shows how old its cells are.
        if old is None or not old.cells or old.engine.epoch != engine.epoch:
            return EngineCard(engine, (), None)
        return EngineCard(engine, old.cells, old.cells_stale_since or datetime.now(UTC))
    # Places for whole rows of logits stand beside the slots, of which no more run for them: shown once they hold something.
    shown = (slot for slot in slots if slot.id < engine.slots or slot.is_processing or slot.cached_tokens)
    return EngineCard(engine, tuple(cell_of(slot) for slot in shown), None)


def cell_of(slot: SlotView) -> SlotCell:
    """A slot as the page draws it. An idle slot's context is what it keeps for the next turn."""
    prefilling = slot.state == "prefill"
    busy = slot.state in ("prefill", "decode")
    progress = min(1.0, slot.prompt_done_tokens / slot.prompt_tokens) if prefilling and slot.prompt_tokens else None
    return SlotCell(
        id=slot.id,
        state=slot.state,
        progress=round(progress, 3) if progress is not None else None,
        tokens_per_s=round(slot.tokens_per_s, 1) if slot.state == "decode" else None,
        context_used_tokens=slot.prompt_done_tokens + slot.decoded_tokens if busy else slot.cached_tokens,
        context_tokens=slot.context_tokens,
    )


def sample_of(taken_at: datetime, cards: list[EngineCard]) -> Sample:
    """Sums over the engines that answered just now."""
    fresh = [card for card in cards if card.cells_stale_since is None]
    cells = [cell for card in fresh for cell in card.cells]
    if not cells:
        return Sample(taken_at.timestamp(), None, None, None)
    return Sample(
        at_s=taken_at.timestamp(),
        tokens_per_s=round(sum(cell.tokens_per_s or 0.0 for cell in cells), 1),
        busy_slots=sum(cell.state != "idle" for cell in cells),
        slots=sum(min(len(card.cells), card.engine.slots) for card in fresh),
    )


def attention_of(
    hosts: tuple[HostView, ...],
    engines: tuple[EngineView, ...],
    stores: tuple[StoreView, ...] = (),
    builds: tuple[jobs.JobView, ...] = (),
    work: tuple[OpenWork, ...] = (),
) -> tuple[Attention, ...]:
    """What wants a decision, failures first; empty when all is well."""
    hosts = tuple(host for host in hosts if host.duty != "retired")
    lost = {host.id for host in hosts if host.state == "lost"}
    found = [
        Attention(
            "failure",
            f"Host {host.name}",
            "has not reported for a while. Its engines cannot be started or stopped until it is back.",
            "Check that the host is up and that its head runs.",
        )
        for host in hosts
        if host.id in lost
    ]
    # A build that failed speaks for the engines that wait for it.
    told = (*work, *(build for build in builds if build.state == JobState.FAILED))
    troubles = tuple(engine_troubles(hosts, engines, told))
    found += [one for one in troubles if one.severity == "failure"]
    names = {host.id: host.name for host in hosts}
    for store in stores:
        # The first failure is no news: it is started again at once.
        if store.state in ("failed", "unhealthy") and store.restarts > 1 and store.host_id not in lost:
            hint = "It is started again after a pause; until then conversations are computed anew. Its log: store/store.log."
            subject = f"Store of {names.get(store.host_id, 'a host')}"
            found.append(Attention("warning", subject, store.last_error or "does not come up.", hint))
    for engine in engines:
        if engine.state == "unhealthy" and engine.host_id not in lost:
            hint = "It is asked again every few seconds, and restarted if it stays silent."
            message = engine.last_error or "does not answer its health check."
            found.append(Attention("warning", f"Engine {engine.name}", message, hint))
    there = [host for host in hosts if host.id not in lost]
    found += [one for one in troubles if one.severity != "failure"]
    return (*found, *(one for host in there for one in host_warnings(host)), *build_warnings(there, engines, builds))


# What differs from owner to owner.
_OWNED_FIELDS = ("sessions", "session_pages")
# Where an engine listens, and which owners there are, is nobody's business in a browser.
_PRIVATE_FIELDS = frozenset({"base_url", "secret", "address", "scope"})


def to_wire(value: Any) -> Any:
    """A snapshot (or any part of it) as JSON-ready values: dataclasses become objects, datetimes seconds since 1970."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {f.name: to_wire(getattr(value, f.name)) for f in fields if f.name not in _PRIVATE_FIELDS}
    if isinstance(value, tuple | list):
        return [to_wire(item) for item in value]
    if isinstance(value, datetime):
        return value.timestamp()
    return value
