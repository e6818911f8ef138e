"""One request over two engines: the first computes its prompt, the second writes the answer.

The request goes to the first as any other would. Beside it the conversation is moved to the second by the handoff that moves
conversations (`sessions.handoffs`): finished blocks leave while the prompt is computed, the rest behind its first token. Where
that fails the first engine answers alone, and what happened stands in the turn's row, the timeline and the header. The second
engine's place is held from the beginning, and given back however it ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from django.db import Error as DatabaseError
from django.db import transaction

from engines.errors import EngineError
from engines.services import EngineEndpoint
from pools.db import in_db_within, not_after
from sessions import handoffs
from sessions.choices import HandoffCause
from sessions.handoffs import HandoffView
from sessions.lease_desk import LeaseDesk
from sessions.models import ChatSession
from sessions.move_speeds import TELLING_BYTES
from sessions.rates_board import RatesBoard

# A prompt may take this long until its first token; the engines bound a move by as much.
DEADLINE_S = 600.0
DATABASE_PATIENCE_S = 5.0
# A move that is not written so long before that is taken back: it would keep others from being planned.
COMMIT_S = 1.0
# After a request's end its move has nothing to wait for.
SETTLE_S = 15.0
_NAMESPACE = uuid.UUID("6d1c1d52-5f0a-4c6e-9a54-3f4a8a4f2d7b")
# The loop keeps only weak references to tasks.
_running: set[asyncio.Task[None]] = set()

logger = logging.getLogger(__name__)


class Split:
    """Of one request. `begin` it when the request is sent; `release` it when the request has ended, whatever came of it."""

    def __init__(
        self,
        request_id: uuid.UUID,
        session: str,
        engines: tuple[EngineEndpoint, EngineEndpoint],
        desk: LeaseDesk,
        board: RatesBoard,
    ) -> None:
        self.prefill, self.decode = engines
        self.outcome: HandoffView | None = None
        self.problem = ""
        self._request_id, self._session = request_id, session
        self._desk, self._board = desk, board
        self._lease_id = uuid.uuid5(_NAMESPACE, str(request_id))
        self._holds = False
        self._task: asyncio.Task[None] | None = None

    @property
    def fell_back(self) -> bool:
        """Whether one engine does all of it after all."""
        return bool(self.problem)

    def begin(self, limit: int, written: Callable[[], Awaitable[Any]]) -> None:
        """Hold the second engine's place (of `limit` there) and have the move done once the turn's row is `written`."""
        self._board.enter(self.decode, 0)
        self._board.tries(self.prefill.host_name, self.decode.host_name)
        self._holds = True
        self._task = asyncio.create_task(self._run(limit, written), name=f"split-{self._request_id}")
        _running.add(self._task)
        self._task.add_done_callback(_running.discard)

    async def settled(self) -> None:
        """Returns once it is known what came of it, or after SETTLE_S."""
        if self._task is not None:
            await asyncio.wait((self._task,), timeout=SETTLE_S)
        if self.outcome is None and not self.problem:
            self._give_up("nobody knows what came of it")

    async def _run(self, limit: int, written: Callable[[], Awaitable[Any]]) -> None:
        try:
            await self._move(limit, written)
        except EngineError as error:
            self._give_up(f"{error.code}: {error.message}")
        except DatabaseError as error:
            self._give_up("the database does not answer")
            logger.warning("a request is not split, the database does not answer: %s", error)
        except Exception:
            self._give_up("internal error")
            logger.exception("a split of %s failed", self._request_id)
        finally:
            self.release()

    async def _move(self, limit: int, written: Callable[[], Awaitable[Any]]) -> None:
        lease = await self._desk.acquire(self._lease_id, "", (self.decode,), (limit,))
        if lease.engine_id != self.decode.engine_id:
            self._give_up(f"{self.decode.name} has no place left")
            return
        await written()
        if not self._holds:
            self._give_up("the request had ended")
            return
        handoff_id = await in_db_within(
            DATABASE_PATIENCE_S,
            planned,
            self._session,
            self.prefill.engine_id,
            self.decode.engine_id,
            str(self._request_id),
            time.monotonic() + DATABASE_PATIENCE_S - COMMIT_S,
        )
        if handoff_id is None:
            self._give_up("the session has no row")
            return
        self.outcome = await handoffs.run(handoff_id)
        if self.outcome.state != "committed":
            self._give_up(self.outcome.why_not or "the move failed")
        elif self.outcome.mb_per_s and self.outcome.sent_bytes >= TELLING_BYTES:
            self._board.moved(self.prefill.host_name, self.decode.host_name, self.outcome.mb_per_s * 1e6)

    def _give_up(self, problem: str) -> None:
        self.problem = self.problem or problem
        logger.info("request %s is not split: %s", self._request_id, problem)

    def abandon(self, problem: str) -> None:
        """The first engine does not do its part: what was begun ends by itself, and the second one's place is given back now."""
        if self.outcome is None:
            self._give_up(problem)
        self.release()

    def release(self) -> None:
        """Give the second engine's place back; the request's own lease moves there if it goes on there. Safe to call again."""
        if self._holds:
            self._holds = False
            self._board.leave(self.decode)
            self._desk.release(self._lease_id)

    def to_dict(self) -> dict[str, Any]:
        """For the turn's row and the timeline."""
        values: dict[str, Any] = {"prefill": self.prefill.name, "decode": self.decode.name}
        if self.outcome is not None:
            told = self.outcome
            values |= {"handoff": told.id, "state": told.state, "sent_bytes": told.sent_bytes}
            values |= {"pause_ms": told.pause_ms, "pause_steps": told.pause_steps}
        if self.problem:
            values["fell_back"] = self.problem
        return values


def planned(session: str, prefill_id: int, decode_id: int, request_id: str, until_s: float) -> int | None:
    """Write the move down; None for a conversation that has no row. Raises SessionBusy while another move goes on, and
    OperationalError, with nothing written, where that takes until after `until_s` (monotonic)."""
    chat_id = ChatSession.objects.filter(key_hash=session).values_list("pk", flat=True).first()
    if chat_id is None:
        return None
    with transaction.atomic():
        handoff_id = handoffs.start(
            chat_id,
            prefill_id,
            decode_id,
            send=False,
            request_id=request_id,
            deadline_s=DEADLINE_S,
            cause=HandoffCause.SPLIT,
        )
        not_after(until_s)
    return handoff_id
