"""The moves of a drain: round after round, until nothing is held there that could go elsewhere.

One conversation after the other, so that the pauses of those that run do not add up. Whoever moves them says every few seconds
that it lives; when it dies the next one begins where the engines themselves say that things stand.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from uuid import UUID, uuid4

from django.db.models import Q

from engines.errors import EngineError
from pools.db import database_now, in_db
from sessions import drains, evacuation, handoffs, lifecycle
from sessions.choices import HandoffCause, HandoffState
from sessions.drains import Moved, Subject
from sessions.errors import SessionBusy
from sessions.evacuation import PASSING, PlannedMove, Preview
from sessions.handoffs import HandoffView

# A task moves for so long and then has itself sent again, so that it holds no worker for minutes.
SLICE_S = 20.0
BEAT_S = 5.0
# Sites remember who takes requests for a second, and what was on its way comes still.
SETTLE_S = 2.5
LOOK_S = 0.5
# A prompt that is being computed cannot leave, and the other engines may be full for a moment: both are asked again until so long
# after the drain was taken up.
PATIENCE_S = 120.0
# An engine that missed a probe answers the next one, or is given up and started anew.
SILENT_S = 30.0
MOST_TRIES = 3
SILENT = "it does not answer: what it holds, if anything, nobody can tell"

Tell = Callable[[Moved], None]

logger = logging.getLogger(__name__)


@dataclass
class _Progress:
    """What became of each conversation so far. `over` once a person has ended the drain, or somebody else moves it."""

    drain_id: int
    mover: UUID
    began_at: float
    moves: dict[str, Moved]
    tell: Tell
    over: bool = False
    beats: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.began_at

    def note(self, session: str, moved: Moved) -> None:
        self.moves[session] = moved
        if moved.outcome in drains.SETTLED:
            self.tell(moved)

    async def beat(self) -> Subject | None:
        # One after the other: an older one must not be written over a newer one.
        async with self.beats:
            subject = await in_db(drains.beat, self.drain_id, self.mover, list(self.moves.values()))
        if subject is None:
            self.over = True
        return subject

    def tries(self, session: str) -> int:
        known = self.moves.get(session)
        return 0 if known is None else known.tries

    def is_remainder(self, move: PlannedMove) -> bool:
        """Whether only what it left behind is there."""
        known = self.moves.get(move.session)
        return known is not None and known.outcome in drains.SETTLED and not move.running

    def is_due(self, move: PlannedMove) -> bool:
        if move.running:
            return self.age_s < PATIENCE_S or not self.tries(move.session)
        return not self.is_remainder(move) and self.tries(move.session) < MOST_TRIES

    def waits(self, seen: Preview) -> bool:
        """Whether what is in the way now may pass soon."""
        if seen.silent and self.age_s < SILENT_S:
            return True
        full = any(move.reason in PASSING and not self.is_remainder(move) for move in seen.staying)
        return full and self.age_s < PATIENCE_S


async def carry_on(
    drain_id: int, slice_s: float | None = None, tell: Tell = lambda moved: None, most_movers: int | None = None
) -> bool:
    """Move what can be moved (for `slice_s`, None: to the end); True when the drain is over. Where another process is at it, or
    `most_movers` are at others, nothing is done. `tell` hears of each move as it is done, and of those that stay at the end."""
    mover = uuid4()
    if await in_db(drains.claim, drain_id, mover, most_movers):
        await _carried_on(await _begun(drain_id, mover, tell), slice_s)
    return not await in_db(drains.is_open, drain_id)


async def _begun(drain_id: int, mover: UUID, tell: Tell) -> _Progress:
    told = await in_db(drains.view, drain_id)
    now = await in_db(database_now)
    age_s = (now - (told.moving_since or now)).total_seconds()
    return _Progress(drain_id, mover, time.monotonic() - age_s, {move.session: move for move in told.moves}, tell)


async def _carried_on(progress: _Progress, slice_s: float | None) -> None:
    until = float("inf") if slice_s is None else time.monotonic() + slice_s
    async with _beating(progress):
        while not progress.over and time.monotonic() < until:
            if await _round(progress, until):
                if await in_db(drains.finish, progress.drain_id, progress.mover, list(progress.moves.values())):
                    for moved in progress.moves.values():
                        if moved.outcome not in drains.SETTLED:
                            progress.tell(moved)
                return
    if not progress.over:
        await in_db(drains.pause, progress.drain_id, progress.mover, list(progress.moves.values()))


async def slice_of(drain_id: int) -> None:
    """A task's share of a drain."""
    await carry_on(drain_id, SLICE_S, most_movers=drains.MOST_MOVERS)


async def _round(progress: _Progress, until: float) -> bool:
    """One look and the moves that it shows; True when nothing is left to be done."""
    subject = await progress.beat()
    if subject is None:
        return False
    seen = await evacuation.preview(subject.engine_ids)
    await _noted(progress, seen)
    due = [move for move in seen.going if progress.is_due(move)]
    if not due:
        if progress.age_s >= SETTLE_S and not progress.waits(seen):
            return await _saved(progress, [move for move in seen.moves if not move.running], until)
        await asyncio.sleep(LOOK_S)
    failed = 0
    for move in due:
        if progress.over:
            return False
        # It counts as tried from now on, also where its mover dies of it.
        tries = progress.tries(move.session) + 1
        progress.note(move.session, replace(_told(move, "moving"), tries=tries))
        if await progress.beat() is None:
            return False
        moved = replace(await _moved(move), tries=tries)
        progress.note(move.session, moved)
        failed += moved.outcome != "moved"
        if time.monotonic() > until:
            return False
    if failed:
        await asyncio.sleep(LOOK_S)
    return False


async def _saved(progress: _Progress, idle: list[PlannedMove], until: float) -> bool:
    """What could not move, as what its engine holds in the host's memory only, goes to the store if there is one: its next turn
    resumes from there. False where there was no time for all of it."""
    for move in idle:
        known = progress.moves[move.session]
        if progress.over or known.outcome != "stays" or move.chat_id is None or known.tries > MOST_TRIES:
            continue
        progress.note(move.session, await _parked(known))
        if time.monotonic() > until:  # Behind it, so that each task gets something done.
            return False
    return True


async def _parked(known: Moved) -> Moved:
    """Saved, or marked as tried: why it did not move is told already."""
    try:
        view = await lifecycle.park(None, known.session)
    except EngineError as error:
        logger.info("a conversation that did not move is not saved either: %s", error)
        return replace(known, tries=MOST_TRIES + 1)
    if any(snapshot.ready for snapshot in view.snapshots):
        return replace(known, outcome="saved", target="the store", reason="")
    return replace(known, tries=MOST_TRIES + 1)


async def _noted(progress: _Progress, seen: Preview) -> None:
    """Who stays, and who is gone from there since."""
    for move in seen.staying:
        known = progress.moves.get(move.session)
        if known is None or known.outcome not in drains.SETTLED or move.running:
            told = _told(move, "stays", move.reason)
            progress.note(move.session, replace(told, tries=progress.tries(move.session)))
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
    except SessionBusy as error:
        return await _gone_on_with(move, error.message)
    except EngineError as error:
        return _told(move, "stays", error.message)
    return _outcome(move, view)


async def _gone_on_with(move: PlannedMove, reason: str) -> Moved:
    """It is being moved already, maybe by a mover that died over it: what comes of that."""
    begun = await in_db(_last_move, move.session)
    if begun is None or not begun.is_open:
        return _told(move, "stays", reason)
    try:
        return _outcome(move, await handoffs.run(begun.id))
    except EngineError as error:
        return _told(move, "stays", error.message)


def _outcome(move: PlannedMove, view: HandoffView) -> Moved:
    if view.state == HandoffState.COMMITTED and view.source == move.source:
        return _of_view(move.title, view)
    return _told(move, "stays", view.why_not or "its engine has not said yet what came of it")


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
            try:
                await progress.beat()
            except Exception:
                # A database that is away for a moment: whoever is silent for too long is replaced, and learns it then.
                logger.exception("drain %d: its mover could not say that it lives", progress.drain_id)

    beating = asyncio.create_task(beat(), name=f"drain-{progress.drain_id}")
    try:
        yield
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
