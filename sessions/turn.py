"""The record of one turn while it runs: written beside the stream, never in its way.

The database is written by tasks of their own: a client that leaves, or a database that is slow, changes neither the tokens
nor whether the end is written.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from django.db import Error as DatabaseError

from engines.errors import EngineError
from engines.services import EngineEndpoint
from pools.db import in_db
from sessions import services
from sessions.answer_form import AnswerFacts
from sessions.choices import TurnState
from sessions.dialects import Dialect
from sessions.rates_board import Answered
from sessions.request_timeline import EVENT, early_headers, timeline
from sessions.services import TurnEnd, TurnStart
from sessions.times_told import seconds, times_told, whole_first_token_s

if TYPE_CHECKING:
    from sessions.split import Split

WRITE_TIMEOUT_S = 10.0
# A start that is not written so long before that is taken back: nobody would write its end.
COMMIT_S = 1.0
# The write would contend with the first token for the interpreter; nobody misses a row that is this young.
START_DELAY_S = 0.05

# Of a turn's end, what its event tells elsewhere or not at all.
_TOLD_APART = frozenset({"engine_id", "split", "came", "ends_session"})

logger = logging.getLogger(__name__)
# The loop keeps only weak references to tasks; a write must not be collected in the middle.
_writes: set[asyncio.Task[Any]] = set()


class TurnRecord:
    """Counts what passes and writes the turn's start and end, each once, where the dialect's requests are turns."""

    def __init__(
        self, start: TurnStart, arrived_s: float, dialect: Dialect, headers_sent_s: float | None = None
    ) -> None:
        self._start = start
        self._headers_sent_s = headers_sent_s
        self.engine_id = start.engine_id
        self.split: Split | None = None
        self._arrived_s = arrived_s
        self._form = dialect.form
        self._facts = AnswerFacts()
        self._first_token_s: float | None = None
        self._events = 0
        self._ended = False
        self._bytes = 0
        self._marks: dict[str, float] = {}
        self._engine_name = ""
        self._node = ""
        self._placed = asyncio.Event()
        self._begun = _keep(self._write_start()) if dialect.is_turn else None

    def saw(self, frames: bytes) -> None:
        """Note what whole SSE frames say; nearly all are only searched, the closing ones are parsed."""
        if self._first_token_s is None and self._form.text.search(frames):
            self._first_token_s = time.monotonic() - self._arrived_s
        # A line break in a text is none on the wire, so no text counts.
        self._events += frames.startswith(b"data: ") + frames.count(b"\ndata: ")
        self._bytes += len(frames)
        if self._form.telling.search(frames):
            for frame in frames.split(b"\n\n"):
                if self._form.telling.search(frame):
                    self.saw_answer(frame[frame.find(b"data: ") + 6 :])

    def saw_answer(self, body: bytes) -> None:
        """Note what a whole answer, or a closing chunk, says of tokens and times."""
        self._bytes = max(self._bytes, len(body))
        try:
            values = json.loads(body)
        except ValueError:
            return  # Text that only looks like something telling.
        if isinstance(values, dict):
            self._form.note(values, self._facts)

    def planned_anew(self, **fields: Any) -> None:
        """The request goes elsewhere than was planned, before it was placed anywhere (see `sessions.turn_plan`)."""
        self._start = replace(self._start, **fields)

    def placed(self) -> None:
        """The request has its place, and its plan is what the row is to tell."""
        self._placed.set()

    async def begun(self) -> None:
        """Returns once the turn's start is written, or could not be."""
        if self._begun is not None:
            await asyncio.wait((self._begun,))

    def hand_over(self) -> None:
        """Another replica writes the end."""
        self._ended = True
        self._placed.set()

    def mark(self, name: str) -> None:
        """Note that something happened now; of things that happen twice the last counts."""
        self._marks[name] = time.monotonic() - self._arrived_s

    def sent_to(self, engine: EngineEndpoint) -> None:
        """The engine that is asked, perhaps another than the one that the turn began with."""
        self.engine_id, self._engine_name, self._node = engine.engine_id, engine.name, engine.host_name

    @property
    def tokens(self) -> tuple[int, int]:
        """Of the prompt and of the answer, as far as the engine told."""
        return self._facts.prompt_tokens, self._facts.completion_tokens

    @property
    def cached_tokens(self) -> int:
        return self._facts.cached_tokens

    def answered(self) -> Answered | None:
        """What the answer told of its first token; None where it did not."""
        outcome = self._outcome(TurnState.DONE, "")
        if not self.is_finished or outcome.came is None or not outcome.prompt_tokens:
            return None
        return Answered(outcome.prompt_tokens, outcome.cached_tokens, outcome.came)

    @property
    def is_finished(self) -> bool:
        """Whether the engine said how the answer ended."""
        return bool(self._facts.finish_reason)

    def lost_frame(self, error: EngineError) -> bytes:
        """The frame that tells the client that the stream broke here."""
        return self._form.lost_frame(error, self._events)

    def end(self, state: TurnState, error_code: str = "") -> asyncio.Task[Any] | None:
        """Have the end written; only the first call counts. Returns the write, which nobody has to wait for."""
        if self._ended:
            return None
        self._ended = True
        self._placed.set()
        outcome = self._outcome(state, error_code)
        if self.split is not None and self._begun is not None:
            return _keep(self._end_split(self.split, self._begun, outcome))
        self._tell(outcome)
        return _keep(self._write_end(self._begun, outcome)) if self._begun else None

    async def _end_split(self, split: Split, begun: asyncio.Task[Any], outcome: TurnEnd) -> None:
        """An answer can be over before it is known how it came to its second engine."""
        await split.settled()
        outcome = replace(outcome, route="solo" if split.fell_back else "pd", split=split.to_dict())
        self._tell(outcome)
        await self._write_end(begun, outcome)

    def _tell(self, outcome: TurnEnd) -> None:
        """One event with all times (seconds since the request arrived), tokens and bytes."""
        if self._begun is None or not timeline.isEnabledFor(logging.INFO):
            return
        start, explanation = self._start, self._start.explanation or {}
        event = {
            "event": EVENT,
            "request_id": str(start.request_id),
            "session": start.identity.key_hash[:16],
            "model": start.model_name,
            "engine": self._engine_name,
            "node": self._node,
            "route": outcome.route,
            "why": explanation.get("why"),
            "background": start.is_background,
            "predicted_first_token_s": start.predicted_first_token_s,
            **{name: round(at_s, 6) for name, at_s in self._marks.items()},
            "request_bytes": start.request_bytes,
            **early_headers(self._headers_sent_s, self._arrived_s),
            **{name: value for name, value in vars(outcome).items() if name not in _TOLD_APART},
            **({"split": outcome.split} if outcome.split is not None else {}),
            **({"expected": expected} if (expected := (explanation.get("chosen") or {}).get("terms")) else {}),
            **({"came": outcome.came.to_dict()} if outcome.came is not None else {}),
            **{name: value for name, value in self._facts.timings.items() if name.endswith("_ms")},
        }
        timeline.info(json.dumps(event))

    def _outcome(self, state: TurnState, error_code: str) -> TurnEnd:
        facts = self._facts
        rate, duration_s = facts.timings.get("predicted_per_second"), time.monotonic() - self._arrived_s
        first_token_s = self._first_token_s
        if first_token_s is None:
            first_token_s = whole_first_token_s(facts.timings, duration_s)
        return TurnEnd(
            state=state,
            engine_id=self.engine_id,
            duration_s=duration_s,
            finish_reason=facts.finish_reason[:32],
            error_code=error_code[:64],
            prompt_tokens=facts.prompt_tokens,
            cached_tokens=facts.cached_tokens,
            completion_tokens=facts.completion_tokens,
            queue_s=seconds(facts.timings, "queue_ms"),
            first_token_s=first_token_s,
            tokens_per_s=float(rate) if isinstance(rate, int | float) else None,
            answer_bytes=self._bytes,
            # What is shared tells its own outcome: see `_end_split`.
            route="solo" if self._start.route == "pd" and self.split is None else self._start.route,
            came=times_told(facts.timings, first_token_s, duration_s),
            ends_session=self._start.ends_session,
        )

    async def _write_start(self) -> int | None:
        await asyncio.sleep(START_DELAY_S)
        await self._placed.wait()
        until_s = time.monotonic() + WRITE_TIMEOUT_S - COMMIT_S
        return await written(services.begin_turn, self._start, until_s)

    async def _write_end(self, begun: asyncio.Task[Any], outcome: TurnEnd) -> None:
        turn_id = await begun
        if turn_id is not None:
            await written(services.end_turn, turn_id, outcome)


def _keep(work: Any) -> asyncio.Task[Any]:
    task = asyncio.get_running_loop().create_task(work)
    _writes.add(task)
    task.add_done_callback(_writes.discard)
    return task


async def written(call: Any, *args: Any) -> Any:
    """The service's result, or None when the database did not take it: an answer is worth more than its row."""
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            return await in_db(call, *args)
    except (DatabaseError, TimeoutError) as error:
        logger.error("a row could not be written: %s: %s", type(error).__name__, error)
        return None


async def wait_for_writes(timeout_s: float) -> None:
    """Give the writes that are under way at most `timeout_s` seconds; for a site that is about to stop."""
    if _writes:
        await asyncio.wait(set(_writes), timeout=timeout_s)
