"""What happens to conversations between their turns: looked at, parked, brought back, moved, deleted.

A conversation is `warm` while an engine holds it, `parked` while only stores do, `resumable` while the stores that do are away,
and `expired` when nothing is left: its next turn is computed whole. Rows say where it was, engines what they hold now.
Every call names the scope of whoever asks, and finds nothing of others; None is a person who may see all.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.db.models import Q

from engines import loading
from engines import services as engines
from engines.client import EngineClient
from engines.errors import EngineError, EngineUnreachable, ModelNotFound, NoEngineReady
from engines.services import EngineEndpoint
from engines.wire_store import SnapshotEntry
from pools.db import in_db
from sessions import handoffs, leases, services, snapshots
from sessions.choices import HandoffState
from sessions.errors import EngineRefused, SessionBusy, SessionStays, SessionUnknown
from sessions.handoffs import HandoffView
from sessions.relayed_request import dispatcher
from sessions.services import SessionDetail
from sessions.snapshots import SnapshotView

PARK_TIMEOUT_S = 60.0
FORGET_TIMEOUT_S = 10.0
MOVE_LOOK_S = 0.05
# Without a worker's help the site does a move itself.
TAKE_UP_S = 1.0
SHOWN_MOVES = 10
MAX_LISTED = 200


@dataclass(frozen=True)
class Holder:
    """An engine that holds a conversation now."""

    endpoint: EngineEndpoint
    tokens: int


@dataclass(frozen=True)
class SessionView:
    """A conversation with where it is."""

    detail: SessionDetail
    holders: tuple[Holder, ...]
    snapshots: tuple[SnapshotView, ...]
    moves: tuple[HandoffView, ...] = ()

    @property
    def state(self) -> str:
        if self.holders:
            return "warm"
        if any(snapshot.ready for snapshot in self.snapshots):
            return "parked"
        return "resumable" if self.snapshots else "expired"

    def to_dict(self) -> dict[str, Any]:
        detail = self.detail
        return {
            "id": detail.key_hash,
            "object": "session",
            "title": detail.title,
            "model": detail.model_name,
            "state": self.state,
            "source": detail.source,
            "engine": detail.engine_name or None,
            "wanted_engine": detail.wanted_engine_name or None,
            "turns": detail.turn_count,
            "prompt_tokens": detail.prompt_tokens,
            "completion_tokens": detail.completion_tokens,
            "created": int(detail.created_at.timestamp()),
            "last_active": int(detail.last_active_at.timestamp()),
            "held": [
                {"engine": holder.endpoint.name, "node": holder.endpoint.host_name, "tokens": holder.tokens}
                for holder in self.holders
            ],
            "snapshots": [
                {
                    "node": snapshot.host_name,
                    "tokens": snapshot.tokens,
                    "bytes": snapshot.size_bytes,
                    "checkpoint": snapshot.has_checkpoint,
                    "saved": int(snapshot.saved_at.timestamp()),
                    "ready": snapshot.ready,
                }
                for snapshot in self.snapshots
            ],
            "moves": [move.to_dict() for move in self.moves],
        }


async def listed(scope: str | None, limit: int = 50) -> list[SessionView]:
    """The conversations used last, the newest first."""
    found = await in_db(services.session_details, scope, None, min(limit, MAX_LISTED))
    held = await _held(None)
    saved = await in_db(snapshots.snapshots_of_chats, [detail.id for detail in found])
    return [SessionView(detail, held.get(detail.key_hash, ()), saved.get(detail.id, ())) for detail in found]


async def inspected(scope: str | None, session: str) -> SessionView:
    """One conversation. Raises SessionUnknown, also for another's."""
    found = await in_db(services.session_details, scope, session, 1)
    if not found:
        raise SessionUnknown("There is no session of this id.")
    # Before the engines are asked: what is not moved behind this is where they say.
    moves = await in_db(handoffs.views, Q(chat_id=found[0].id), SHOWN_MOVES)
    held = await _held(found[0].model_name)
    saved = await in_db(snapshots.snapshots_of, found[0].id)
    return SessionView(found[0], held.get(session, ()), saved, moves)


async def park(scope: str | None, session: str) -> SessionView:
    """Save what engines hold of it to their stores, and free their slots.

    Raises SessionUnknown, SessionBusy while a request of it runs, SessionStays where no store can take it, EngineUnreachable.
    """
    view = await inspected(scope, session)
    for holder in view.holders:
        status, answer = await _client(holder).session_act("park", session, PARK_TIMEOUT_S)
        if status == 200:
            await in_db(snapshots.record, holder.endpoint.host_name, _entries(session, answer))
        elif status != 404:  # 404: it went meanwhile, to the store or for good
            raise _refusal(status, answer)
    _forget_here(session)
    return await inspected(scope, session)


async def end(turn_id: int) -> bool:
    """Free the slot of a conversation whose last turn this is, as its client said: what a store can keep of it stays there, for
    a client that goes on after all. False where somebody has gone on already. Raises as `park` does, but not SessionStays.
    """
    session = await in_db(services.session_to_end, turn_id)
    if session is None:
        return False
    try:
        await park(None, session)
    except SessionBusy:
        return False
    except SessionStays:
        await _forgotten(await inspected(None, session))
    return True


async def resume(scope: str | None, session: str, engine_name: str = "") -> SessionView:
    """Have the next turn go on from what is saved, on `engine_name` or where the router chooses; a wish to be elsewhere ends.

    Raises SessionUnknown, NoEngineReady for an engine that does not serve its model, SessionStays if nothing of it is left.
    """
    view = await inspected(scope, session)
    if view.state == "expired":
        raise SessionStays("Nothing of the session is held or saved; its next turn is computed from its messages.")
    target = await _target(view, engine_name) if engine_name else None
    await in_db(services.move_session, view.detail.id, target.engine_id if target else None)
    _forget_here(session)
    return await inspected(scope, session)


async def migrate(scope: str | None, session: str, engine_name: str) -> SessionView:
    """Have it go on at `engine_name`: a running request in the middle of its answer, else its next turn.

    The two engines move it between them; where they cannot it is parked, for the next turn to be resumed there. Raises as `park`
    and `resume` do.
    """
    view = await inspected(scope, session)
    target = await _target(view, engine_name)
    running = (await in_db(leases.engines_of, [session])).get(session, ())
    held = {holder.endpoint.engine_id: holder.tokens for holder in view.holders}
    source_id = home_of(running, held, target.engine_id)
    if source_id is not None and source_id != target.engine_id:
        move = await _handed_over(view, source_id, target.engine_id)
        if move is None or move.state != HandoffState.COMMITTED:
            await _parked_instead(scope, session, move)
    await in_db(services.move_session, view.detail.id, target.engine_id)
    _forget_here(session)
    return await inspected(scope, session)


def home_of(running: Sequence[int], held: Mapping[int, int], target_id: int) -> int | None:
    """The engine where a conversation is, of equals its target: where a request of it runs, else where most tokens of it are
    held. Others may hold what it left there earlier. None where nobody holds anything."""
    if running:
        return next((one for one in running if one != target_id), target_id)
    return max(held, key=lambda one: (held[one], one == target_id), default=None)


async def _handed_over(view: SessionView, source_id: int, target_id: int) -> HandoffView | None:
    """The move at its end; None where one of the engines moves nothing."""
    source, target = (
        await in_db(engines.engine_rpc, source_id, leaving=True),
        await in_db(engines.engine_rpc, target_id),
    )
    if source is None or target is None:
        return None
    handoff_id = await in_db(handoffs.start, view.detail.id, source_id, target_id)
    began_at = time.monotonic()
    while True:
        move: HandoffView = await in_db(handoffs.view, handoff_id)
        if move.state == HandoffState.PLANNED and time.monotonic() - began_at > TAKE_UP_S:
            move = await handoffs.run(handoff_id)
        if not move.is_open:
            return move
        if time.monotonic() - began_at > handoffs.DEADLINE_S + TAKE_UP_S:
            raise SessionBusy("The session is still being moved.")
        await asyncio.sleep(MOVE_LOOK_S)


async def _parked_instead(scope: str | None, session: str, move: HandoffView | None) -> None:
    """Raises SessionBusy with the move's own reason where a request runs."""
    try:
        await park(scope, session)
    except SessionBusy as error:
        if move is None:
            raise
        raise SessionBusy(f"It cannot move now: {move.reason}", hint=move.hint or None) from error


async def delete(scope: str | None, session: str) -> SessionView:
    """Free what engines hold of it, its rows, and then what stores hold. Raises SessionUnknown, SessionBusy, also while it is
    being moved: the engine that takes it in would hold it for nobody."""
    view = await inspected(scope, session)
    last_move = next(iter(view.moves), None)
    if last_move is not None and last_move.is_open:
        raise SessionBusy("The session is being moved; it can be deleted once it is there.")
    await _forgotten(view)
    if not await in_db(snapshots.delete_chat, view.detail.id, None if last_move is None else last_move.id):
        raise SessionBusy("The session was moved meanwhile; delete it once more.")
    _forget_here(session)
    return view


async def _forgotten(view: SessionView) -> None:
    """Free what engines hold of it, saved or not. Raises SessionBusy while a request of it runs."""
    for holder in view.holders:
        try:
            status, answer = await _client(holder).session_act("forget", view.detail.key_hash, FORGET_TIMEOUT_S)
        except EngineUnreachable:
            continue  # A dead engine holds nothing.
        if status not in (200, 404):
            raise _refusal(status, answer)


def _client(holder: Holder) -> EngineClient:
    return EngineClient(holder.endpoint.base_url, holder.endpoint.secret)


def _forget_here(session: str) -> None:
    """What this process remembers may be wrong now; other replicas trust theirs for some seconds only."""
    dispatcher().places.forget(session)


async def _target(view: SessionView, engine_name: str) -> EngineEndpoint:
    endpoints = await in_db(loading.engines_for, view.detail.model_name)
    found = next((endpoint for endpoint in endpoints if endpoint.name == engine_name), None)
    if found is None:
        raise NoEngineReady(f"No engine {engine_name[:63]!r} serves the session's model right now.")
    return found


async def _held(model: str | None) -> dict[str, tuple[Holder, ...]]:
    """By session, the engines that hold something of it (of one model, None: of all), asked just now."""
    try:
        endpoints = await in_db(engines.holding_engines, model)
    except (NoEngineReady, ModelNotFound):
        return {}
    answers = await asyncio.gather(*(_rates(endpoint) for endpoint in endpoints))
    held: dict[str, tuple[Holder, ...]] = {}
    for endpoint, sessions in zip(endpoints, answers, strict=True):
        for session, tokens in sessions.items():
            held[session] = (*held.get(session, ()), Holder(endpoint, tokens))
    return held


async def _rates(endpoint: EngineEndpoint) -> dict[str, int]:
    try:
        rates = await EngineClient(endpoint.base_url, endpoint.secret).rates()
    except EngineUnreachable:
        return {}
    return dict(rates.sessions) if rates is not None else {}


def _entries(session: str, answer: dict[str, object]) -> list[SnapshotEntry]:
    """What an engine says that it saved, as its store would list it."""
    found = answer.get("snapshots")
    return [
        SnapshotEntry(
            name=str(saved["name"]),
            session=session,
            n_past=int(saved["tokens"]),
            total_size=int(saved["bytes"]),
            fingerprint=str(saved["fingerprint"]),
            checkpoint=bool(saved["checkpoint"]),
            pinned=False,
            modified=time.time(),
        )
        for saved in (found if isinstance(found, list) else [])
    ]


def _refusal(status: int, answer: dict[str, object]) -> EngineError:
    error = answer.get("error")
    message = str(error.get("message")) if isinstance(error, dict) else "The engine refused."
    if status == 409:
        return SessionBusy(message)
    if status in (501, 503):
        return SessionStays(f"It cannot be parked: {message}")
    return EngineRefused(message)
