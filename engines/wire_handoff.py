"""The JSON of a handoff's operations (0x34 to 0x38): a conversation, running or idle, moves from one engine to another.

A `fence` is the number under which whoever asks for a move was granted it: larger than that of every earlier move of the session.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class HandoffBody:
    """Asked of the source. The target's RPC address and secret; the source gives up `deadline_s` from now."""

    handoff: str
    fence: int
    session: str
    target_host: str
    target_port: int
    target_secret: str = field(default="", repr=False)
    deadline_s: float = 60.0


@dataclass(frozen=True)
class HandoffAnswer:
    """What was moved. `kind` is live or idle. `pause_ms` is from the stop until the target had everything, 0 of an idle one;
    `pause_steps` the same in steps of the source. `total_bytes` is what copying all of the state at once would have sent."""

    kind: str
    tokens: int
    sent_bytes: int
    skipped_bytes: int
    total_bytes: int
    seconds: float
    pause_ms: float
    pause_steps: float
    request_id: str | None = None


@dataclass(frozen=True)
class AdoptBody:
    """The source's first word to the target. `expected_tokens` is how long the state is thought to be at its end."""

    handoff: str
    fence: int
    session: str
    tenant: str
    fingerprint: str
    expected_tokens: int
    idle: bool
    raw_logits: bool
    request_id: str | None = None


@dataclass(frozen=True)
class AdoptAnswer:
    """The slot that was taken, or of an idle conversation will be."""

    slot_id: int


@dataclass(frozen=True)
class BlockHead:
    """What stands before a block's bytes in ADOPT_BLOCK."""

    start: int
    end: int
    size_bytes: int
    proof: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class AdoptedAnswer:
    """`state` is open (pieces are awaited), going (the generation runs here, or the idle state is in its slot) or over."""

    state: str
    tokens: int = 0


@dataclass(frozen=True)
class AskBody:
    """How a move stands at the target; with `drop` it ends there unless the generation goes on already."""

    handoff: str
    fence: int
    drop: bool = False
