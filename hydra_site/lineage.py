"""Where a conversation's KV state is, and how it came there, as the session page draws it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sessions.lifecycle import SessionView
from sessions.services import TurnView

SHOWN_STEPS = 12
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")

# What the next turn will find.
PROSPECTS = {
    "warm": "An engine holds it: the next turn goes on at once.",
    "parked": "Stores hold it, no engine does: the next turn reads it back, then goes on.",
    "resumable": "The stores that hold it do not answer now. Until one does, a turn is computed whole from its messages.",
    "expired": "Nothing of it is held or saved any more: the next turn is computed whole from its messages.",
}


@dataclass(frozen=True)
class Place:
    """Something that holds some first `tokens` of a conversation. `width` is their share of all its tokens ("87.50%").

    `saved_at` and `size` are those of a snapshot; `answers`: whether it can be used now.
    """

    kind: str
    name: str
    host_name: str
    tokens: int
    width: str
    size: str = ""
    saved_at: datetime | None = None
    has_checkpoint: bool = False
    answers: bool = True


@dataclass(frozen=True)
class Step:
    """One step of a conversation's state: a turn that made it longer, or a save. `reused` of `tokens` needed no computing."""

    at: datetime
    kind: str
    where: str
    tokens: int
    reused: int = 0


def places(view: SessionView, turns: Sequence[TurnView]) -> tuple[Place, ...]:
    """The engines and stores that hold it, what can be used soonest first."""
    lengths = [holder.tokens for holder in view.holders] + [snapshot.tokens for snapshot in view.snapshots]
    longest = max([*lengths, *(turn.prompt_tokens + turn.completion_tokens for turn in turns[:1])], default=0)

    def width(tokens: int) -> str:
        return f"{min(100.0, 100 * tokens / longest) if longest else 0.0:.2f}%"

    held = [
        Place("engine", holder.endpoint.name, holder.endpoint.host_name, holder.tokens, width(holder.tokens))
        for holder in view.holders
    ]
    saved = [
        Place(
            kind="store",
            name=f"store of {snapshot.host_name}",
            host_name=snapshot.host_name,
            tokens=snapshot.tokens,
            width=width(snapshot.tokens),
            size=binary_size(snapshot.size_bytes),
            saved_at=snapshot.saved_at,
            has_checkpoint=snapshot.has_checkpoint,
            answers=snapshot.ready,
        )
        for snapshot in sorted(view.snapshots, key=lambda snapshot: (not snapshot.ready, -snapshot.tokens))
    ]
    return (*held, *saved)


def steps(view: SessionView, turns: Sequence[TurnView]) -> tuple[Step, ...]:
    """Its last turns and the saves that are still there, the newest first. A turn that failed changed nothing for sure."""
    answered = [
        Step(
            turn.started_at,
            "turn",
            turn.engine_name,
            turn.prompt_tokens + turn.completion_tokens,
            reused=turn.cached_tokens,
        )
        for turn in turns
        if turn.state == "done" and not turn.is_background
    ]
    saved = [Step(found.saved_at, "save", f"store of {found.host_name}", found.tokens) for found in view.snapshots]
    return tuple(sorted((*answered, *saved), key=lambda step: step.at, reverse=True)[:SHOWN_STEPS])


def binary_size(size_bytes: int) -> str:
    """Bytes in the units that the dashboard uses: 812 MiB, 6.2 GiB."""
    rest = float(size_bytes)
    unit = 0
    while rest >= 1000 and unit < len(_UNITS) - 1:
        rest /= 1024
        unit += 1
    return f"{rest:.{0 if rest >= 100 or unit == 0 else 1}f} {_UNITS[unit]}"
