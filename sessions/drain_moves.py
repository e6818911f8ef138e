"""The moves of a drain: round after round, until nothing is held there that could go elsewhere.

One conversation after the other, so that the pauses of those that run do not add up. Whoever moves them says every few seconds
that it lives; when it dies the next one begins where the engines themselves say that things stand.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from django.db.models import Q

from engines.client import close_client_session
from engines.errors import EngineError
from pools.db import database_now, in_db
from sessions import drains, evacuation, handoffs, lifecycle
from sessions.choices import HandoffCause, HandoffState
from sessions.drains import Moved, Subject
from sessions.evacuation import PlannedMove, Preview
from sessions.handoffs import HandoffView

# A task moves for so long and then has itself sent again, so that it holds no worker for minutes.
SLICE_S = 20.0
BEAT_S = 5.0
# Sites remember who takes requests for a second, and what was on its way comes still.
SETTLE_S = 2.5
LOOK_S = 0.5
# A prompt that is being computed cannot leave; it is asked again until so long after the drain began.
PATIENCE_S = 120.0
MOST_TRIES = 3
SILENT = "it does not answer: what it holds, if anything, nobody can tell"

Tell = Callable[[Moved], None]


@dataclass
class _Progress:
    """What became of each conversation so far. `over` once a person has ended the drain."""

    drain_id: int
    began_at: float
    moves: dict[str, Moved]
    tell: Tell
    tries: Counter[str] = field(default_factory=Counter)
    over: bool = False

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.began_at

    def note(self, session: str, moved: Moved) -> None:
        self.moves[session] = moved
        if moved.outcome in drains.SETTLED:
            self.tell(moved)

    async def beat(self) -> Subject | None:
        subject = await in_db(drains.beat, self.drain_id, list(self.moves.values()))
        self.over = subject is None
        return subject

    def is_due(self, move: PlannedMove) -> bool:
        known = self.moves.get(move.session)
        if known is not None and known.outcome in drains.SETTLED and not move.running:
            return False  # What is left there is a remainder.
        if move.running:
            return self.age_s < PATIENCE_S or not self.tries[move.session]
        return self.tries[move.session] < MOST_TRIES


async def carry_on(drain_id: int, slice_s: float | None = None, tell: Tell = lambda moved: None) -> bool:
    """Move what can be moved (for `slice_s`, None: to the end); True when the drain is over. Where another process is at it,
    nothing is done. `tell` hears of each move as it is done, and of those that stay at the end."""
    if not await in_db(drains.claim, drain_id):
        return not (await in_db(drains.view, drain_id)).is_open
    told = await in_db(drains.view, drain_id)
    age_s = (await in_db(database_now) - told.created_at).total_seconds()
    progress = _Progress(drain_id, time.monotonic() - age_s, {move.session: move for move in told.moves}, tell)
    until = float("inf") if slice_s is None else time.monotonic() + slice_s
    async with _beating(progress):
        while not progress.over and time.monotonic() < until:
            if await _round(progress, until):
                await in_db(drains.finish, drain_id, list(progress.moves.values()))
                for moved in progress.moves.values():
                    if moved.outcome not in drains.SETTLED:
                        tell(moved)
                return True
    if not progress.over:
        await in_db(drains.pause, drain_id)
    return progress.over


async def slice_of(drain_id: int) -> None:
    """A task's share, in an event loop of its own."""
    try:
        await carry_on(drain_id, SLICE_S)
    finally:
        await close_client_session()


async def _round(progress: _Progress, until: float) -> bool:
    """One look and the moves that it shows; True when nothing is left to be done."""
    subject = await progress.beat()
    if subject is None:
        return False
    seen = await evacuation.preview(subject.engine_ids)
    await _noted(progress, seen)
    due = [move for move in seen.going if progress.is_due(move)]
    if not due:
        if progress.age_s >= SETTLE_S:
            await _saved(progress, [move for move in seen.moves if not move.running])
            return True
        await asyncio.sleep(LOOK_S)
    failed = 0
    for move in due:
        if progress.over or time.monotonic() > until:
            return False
        progress.note(move.session, _told(move, "moving"))
        await progress.beat()
        moved = await _moved(move)
        progress.note(move.session, moved)
        progress.tries[move.session] += moved.outcome != "moved"
        failed += moved.outcome != "moved"
    if failed:
        await asyncio.sleep(LOOK_S)
    return False


async def _saved(progress: _Progress, idle: list[PlannedMove]) -> None:
    """What could not move, as what its engine holds in the host's memory only, goes to the store if there is one: its next turn
    resumes from there."""
    for move in idle:
        if progress.moves[move.session].outcome == "stays" and move.chat_id is not None and not progress.over:
            try:
                view = await lifecycle.park(None, move.session)
            except EngineError:
                continue  # Why it did not move is told already.
            if any(snapshot.ready for snapshot in view.snapshots):
                kept = replace(progress.moves[move.session], outcome="saved", target="the store", reason="")
                progress.note(move.session, kept)


async def _noted(progress: _Progress, seen: Preview) -> None:
    """Who stays, and who is gone from there since."""
    for move in seen.staying:
        known = progress.moves.get(move.session)
        if known is None or known.outcome not in drains.SETTLED or move.running:
            progress.note(move.session, _told(move, "stays", move.reason))
    for name in seen.silent:
        progress.note(f"engine {name}", Moved(f"engine {name}", "", name, "", 0, "stays", reason=SILENT))
    here = {move.session for move in seen.moves} | {f"engine {name}" for name in seen.silent}
    for session, known in list(progress.moves.items()):
        if session not in here and known.outcome not in drains.SETTLED:
            # A mover died over it, or it ended meanwhile.
            view = await in_db(_last_move, session) if known.outcome == "moving" else None
            if view is not None and view.state == HandoffState.COMMITTED and view.source == known.source:
                progress.note(session, _of_view(known.title, view))
            else:
                del progress.moves[session]


async def _moved(move: PlannedMove) -> Moved:
    assert move.chat_id is not None, "who has no rows is not planned"
    try:
        ends = (move.source_id, move.target_id)
        handoff_id = await in_db(handoffs.start, move.chat_id, *ends, send=False, cause=HandoffCause.DRAIN)
        view = await handoffs.run(handoff_id)
    except EngineError as error:
        return _told(move, "stays", error.message)
    if view.state == HandoffState.COMMITTED:
        return _of_view(move.title, view)
    return _told(move, "stays", view.reason or "its engine has not said yet what came of it")


def _of_view(title: str, view: HandoffView) -> Moved:
    return Moved(
        view.session,
        title,
        view.source,
        view.target,
        view.tokens,
        "moved",
        view.kind,
        view.sent_bytes,
        view.skipped_bytes,
        view.pause_ms,
        view.duration_s,
    )


def _told(move: PlannedMove, outcome: str, reason: str = "") -> Moved:
    target = move.target if outcome == "moving" else ""
    kind = "live" if move.running else "idle"
    return Moved(move.session, move.title, move.source, target, move.tokens, outcome, kind, reason=reason)


def _last_move(session: str) -> HandoffView | None:
    return next(iter(handoffs.views(Q(chat__key_hash=session), 1)), None)


@asynccontextmanager
async def _beating(progress: _Progress) -> AsyncIterator[None]:
    """A move may take longer than a mover may be silent."""

    async def beat() -> None:
        while not progress.over:
            await asyncio.sleep(BEAT_S)
            await progress.beat()

    beating = asyncio.create_task(beat(), name=f"drain-{progress.drain_id}")
    try:
        yield
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
