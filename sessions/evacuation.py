"""What would move where, and at what price, if engines got empty: asked of the engines just now, planned without I/O.

What runs is placed first, then what is idle, the one used last first. A target's idle conversations make way for what comes, as
they would for any request; what runs there does not. What finds no room stays where it is, with the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from django.db.models import Q
from django.db.models.functions import Now

from engines import services as engines
from engines.choices import MAY_HOLD
from engines.client import EngineClient
from engines.config import SlotView
from engines.errors import EngineUnreachable
from engines.rates_view import EngineRates
from engines.services import EngineEndpoint
from pools.db import in_db
from sessions import handoffs, kv_losses
from sessions.choices import HandoffState
from sessions.models import ChatSession, SlotLease

# Moves from which pauses are foretold.
KNOWN_MOVES = 50
# What a running answer may grow by meanwhile.
ROOM_TOKENS = 512
UNKNOWN = "nobody knows whose it is: its rows are gone"
NO_STATE = "its engine gives no state away"
NOBODY_SHARES = "no other engine may share this engine's state"
TOO_LONG = "it is longer than the context of every other engine"
UNMEASURED = "what its state loses in the other engines' quants was not measured"
LOSSY = "its state would lose more in the other engines' quants than its model allows"
NO_CELLS = "what runs on the other engines leaves no room for it"
NO_SLOT = "every slot of the other engines works"
FEW_SLOTS = "it writes several choices at once, and no other engine has as many slots free"
MANY_CHOICES = "it writes more choices at once than any other engine has slots"
# These may pass by themselves.
PASSING = frozenset({NO_CELLS, NO_SLOT, FEW_SLOTS})


@dataclass(frozen=True)
class PlannedMove:
    """One conversation of an engine. `target` is "" and `reason` says why where it must stay. Bytes are what its engine says a
    token takes, else, as the pause, foretold from former moves of the model, None while there is none; one that is idle has none
    (0). One that `displaces` pushes idle conversations out of the target's cache. The `choices` that a request has running there
    move together, each into a slot of its own; `tokens` are those of all, a shared beginning counted for each."""

    session: str
    source: str
    target: str
    tokens: int
    foretold_bytes: int | None
    foretold_pause_ms: float | None
    reason: str = ""
    running: bool = False
    displaces: bool = False
    title: str = ""
    chat_id: int | None = None
    source_id: int = 0
    target_id: int = 0
    choices: int = 1
    longest_tokens: int = 0


@dataclass(frozen=True)
class Preview:
    """`silent` are engines that are to get empty and do not answer, or are not asked since they did not answer others; what they
    hold nobody can tell. `unserved` are models that take requests there, and nowhere else."""

    moves: tuple[PlannedMove, ...]
    silent: tuple[str, ...] = ()
    unserved: tuple[str, ...] = ()

    @property
    def going(self) -> tuple[PlannedMove, ...]:
        return tuple(move for move in self.moves if move.target)

    @property
    def staying(self) -> tuple[PlannedMove, ...]:
        return tuple(move for move in self.moves if not move.target)

    @property
    def foretold_bytes(self) -> int | None:
        """Of all that would go; None where that of one is not known."""
        sizes = [move.foretold_bytes for move in self.going]
        return None if None in sizes else sum(size or 0 for size in sizes)

    @property
    def longest_pause_ms(self) -> float | None:
        """Of those that run; None where none does, or nothing is known."""
        return max((move.foretold_pause_ms or 0.0 for move in self.going if move.running), default=0.0) or None


@dataclass
class Place:
    """An engine with what it told; `coming_*` is what the plan has sent there so far."""

    endpoint: EngineEndpoint
    rates: EngineRates
    slots: Sequence[SlotView] = ()
    coming_tokens: int = 0
    coming_running: int = 0
    coming: int = 0

    @property
    def busy_tokens(self) -> int:
        """Cells that those who run or wait have or will need; a shared beginning counts for each."""
        working = [slot for slot in self.slots if slot.state != "idle"]
        taken = sum(max(slot.prompt_tokens, slot.prompt_done_tokens) + slot.decoded_tokens for slot in working)
        begun = sum(slot.prompt_tokens - slot.prompt_done_tokens for slot in working if slot.state == "prefill")
        return taken + max(0, sum(self.rates.pending_tokens) - begun)

    @property
    def room_tokens(self) -> int:
        """Idle conversations make way."""
        return self.rates.cells - self.busy_tokens - self.coming_tokens

    @property
    def unused_tokens(self) -> int:
        return self.rates.cells - self.rates.resident_tokens - self.coming_tokens

    @property
    def free_slots(self) -> int:
        return self.rates.free_slots - self.rates.queue_length - self.coming_running


@dataclass(frozen=True)
class Known:
    """What rows say: of conversations their keys and titles, which of them run where and as which requests, what moves of a model
    cost so far, and what is lost between two quants' engines (KL in nats, by variants)."""

    chats: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    running: Mapping[tuple[int, str], Collection[str]] = field(default_factory=dict)
    costs: Mapping[str, tuple[float | None, float | None]] = field(default_factory=dict)
    losses: Mapping[tuple[int, int], float] = field(default_factory=dict)


async def preview(leaving: Collection[int]) -> Preview:
    """What would move from the engines of these ids."""
    holding = await in_db(engines.holding_engines, None)
    serving = await in_db(engines.serving_engines, None)
    open_ids = {endpoint.engine_id for endpoint in serving}
    asked = [one for one in holding if one.engine_id in open_ids or one.engine_id in leaving]
    answers = await asyncio.gather(*map(_place, asked))
    answered = {one.engine_id for one, place in zip(asked, answers, strict=True) if place is not None}
    places = [place for place in answers if isinstance(place, Place)]
    sources = [place for place in places if place.endpoint.engine_id in leaving]
    known = await in_db(_known, sources, places)
    silent = await in_db(_silent, [engine_id for engine_id in leaving if engine_id not in answered])
    moves = tuple(planned(sources, [one for one in places if one not in sources], known))
    return Preview(moves, silent, _unserved(serving, leaving))


def _unserved(serving: Sequence[EngineEndpoint], leaving: Collection[int]) -> tuple[str, ...]:
    left = {one.model_name for one in serving if one.engine_id not in leaving}
    return tuple(sorted({one.model_name for one in serving} - left))


def _silent(unanswered: Collection[int]) -> tuple[str, ...]:
    """Those of these that may hold something for all that."""
    views = [one for one in engines.engine_views() if one.id in unanswered]
    return tuple(one.name for one in views if one.state in MAY_HOLD and one.base_url is not None)


def planned(sources: Sequence[Place], others: Sequence[Place], known: Known) -> list[PlannedMove]:
    """Where the conversations of `sources` would go. What runs at another engine, or is held there as far, needs no move and is
    left out."""
    found: list[tuple[Place, PlannedMove]] = []
    own = {place.endpoint.engine_id for place in sources}
    elsewhere = {session for engine_id, session in known.running if engine_id not in own}
    for place in sources:
        held = dict(place.rates.sessions)
        for engine_id, session in sorted(known.running):
            if engine_id == place.endpoint.engine_id:
                held.setdefault(session, 0)  # Nothing of it is computed yet.
        for session, tokens in reversed(held.items()):
            move = _described(place, session, tokens, known)
            kept = max((other.rates.sessions.get(session, 0) for other in others), default=0)
            if move.running or not (session in elsewhere or kept >= tokens):
                found.append((place, move))
    found.sort(key=lambda one: not one[1].running)
    return [_placed(source, move, others, known.losses) for source, move in found]


def _described(place: Place, session: str, tokens: int, known: Known) -> PlannedMove:
    """The move without its target."""
    endpoint, rates = place.endpoint, place.rates
    bytes_per_token, pause_ms = known.costs.get(endpoint.model_name, (None, None))
    requests = known.running.get((endpoint.engine_id, session))
    running = requests is not None
    written = _choices(place.slots, requests or ())
    longest = max([tokens, *written])
    tokens = max(tokens, sum(written))
    size: float | None = rates.kv_token_bytes * tokens + rates.kv_part_bytes * max(1, len(written))
    if not rates.kv_token_bytes:
        size = None if bytes_per_token is None else bytes_per_token * tokens
    chat_id, title = known.chats.get(session, (None, ""))
    return PlannedMove(
        session=session,
        source=endpoint.name,
        target="",
        tokens=tokens,
        foretold_bytes=None if size is None else round(size),
        foretold_pause_ms=pause_ms if running else 0.0,
        running=running,
        title=title,
        chat_id=chat_id,
        source_id=endpoint.engine_id,
        choices=max(1, len(written)),
        longest_tokens=longest,
    )


def _choices(slots: Sequence[SlotView], requests: Collection[str]) -> list[int]:
    """The tokens in each slot of the request that has most of them; another one of the conversation moves by itself."""
    found = ([_held(slot) for slot in slots if slot.request_id == request] for request in requests)
    return max(found, key=len, default=[])


def _held(slot: SlotView) -> int:
    return slot.prompt_done_tokens + slot.decoded_tokens


def _placed(
    source: Place, move: PlannedMove, others: Sequence[Place], losses: Mapping[tuple[int, int], float]
) -> PlannedMove:
    alike = [place for place in others if place.rates.streams_kv and _may_share(place, source)]
    known = [place for place in alike if _loss(source, place, losses) is not None]
    near = [place for place in known if (_loss(source, place, losses) or 0.0) <= source.endpoint.most_kv_loss]
    fitting = [place for place in near if place.rates.context_tokens > move.longest_tokens]
    wide = [place for place in fitting if place.rates.slots >= move.choices]
    needed = move.tokens + (ROOM_TOKENS * move.choices if move.running else 0)
    free = [place for place in wide if place.free_slots >= move.choices]
    roomy = [place for place in free if place.room_tokens >= min(needed, place.rates.context_tokens * move.choices)]
    reasons = (
        (move.chat_id is None, UNKNOWN),
        (not source.rates.streams_kv, NO_STATE),
        (not alike, NOBODY_SHARES),
        (not known, UNMEASURED),
        (not near, LOSSY),
        (not fitting, TOO_LONG),
        (not wide, MANY_CHOICES),
        (not free, NO_SLOT if move.choices == 1 else FEW_SLOTS),
        (not roomy, NO_CELLS),
    )
    if reason := next((reason for holds, reason in reasons if holds), ""):
        return replace(move, reason=reason)
    best = max(
        roomy,
        key=lambda place: (
            # In its own quant nothing is lost; an answer that runs may become as long as the context that it was promised.
            place.endpoint.variant_id == source.endpoint.variant_id,
            not move.running or place.rates.context_tokens >= source.rates.context_tokens,
            place.rates.free_slots >= place.coming + move.choices,
            place.unused_tokens >= needed,
            place.room_tokens,
        ),
    )
    displaces = best.unused_tokens < needed
    best.coming_tokens += needed
    best.coming_running += move.choices if move.running else 0
    best.coming += move.choices
    return replace(move, target=best.endpoint.name, target_id=best.endpoint.engine_id, displaces=displaces)


def _loss(source: Place, target: Place, losses: Mapping[tuple[int, int], float]) -> float | None:
    """What a state loses there, in nats; None where nobody has measured it."""
    ends = source.endpoint.variant_id, target.endpoint.variant_id
    return 0.0 if ends[0] == ends[1] else losses.get(ends)


def _may_share(one: Place, other: Place) -> bool:
    """Also where an engine still reads its file and cannot say: the move itself finds out."""
    mine, its = one.endpoint, other.endpoint
    if mine.model_name != its.model_name:
        return False
    if one.rates.kv_group and other.rates.kv_group:
        return one.rates.kv_group == other.rates.kv_group
    return mine.variant_id == its.variant_id or (bool(mine.kv_family) and mine.kv_family == its.kv_family)


async def _place(endpoint: EngineEndpoint) -> Place | str | None:
    """None for one that does not answer; "" for one that holds no conversations at all."""
    client = EngineClient(endpoint.base_url, endpoint.secret)
    try:
        rates, slots = await asyncio.gather(client.rates(), client.slots())
    except EngineUnreachable:
        return None
    return "" if rates is None else Place(endpoint, rates, slots)


def _known(sources: Sequence[Place], places: Sequence[Place]) -> Known:
    ids = [place.endpoint.engine_id for place in sources]
    keys = {session for place in sources for session in place.rates.sessions}
    leases = SlotLease.objects.filter(Q(engine_id__in=ids) | Q(session__in=keys), expires_at__gt=Now())
    running: dict[tuple[int, str], set[str]] = {}
    for engine_id, session, request_id in leases.exclude(session="").values_list("engine_id", "session", "request_id"):
        running.setdefault((engine_id, session), set()).add(str(request_id))
    keys |= {session for _, session in running}
    rows = ChatSession.objects.filter(key_hash__in=keys).values_list("key_hash", "pk", "title")
    models = {place.endpoint.model_name for place in sources}
    variants = {place.endpoint.variant_id for place in places if place.endpoint.kv_family}
    return Known(
        {key: (pk, title) for key, pk, title in rows},
        running,
        {model: _costs(model) for model in sorted(models)},
        kv_losses.among(variants) if len(variants) > 1 else {},
    )


def _costs(model: str) -> tuple[float | None, float | None]:
    """Bytes a token, and the median pause, of the model's last moves."""
    moved = handoffs.views(Q(state=HandoffState.COMMITTED, chat__model_name=model), KNOWN_MOVES)
    tokens = sum(move.tokens for move in moved)
    size_bytes = sum(move.sent_bytes + move.skipped_bytes for move in moved)
    return size_bytes / tokens if tokens else None, _median(
        move.pause_ms for move in moved if move.kind == "live" and move.pause_ms is not None
    )


def _median(values: Iterable[float]) -> float | None:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else None
