"""The JSON of a handoff's operations (0x34 to 0x38): a conversation, running or idle, moves from one engine to another.

A `fence` is the number under which whoever asks for a move was granted it: larger than that of every earlier move of the session.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from engines import api_constraint

# How a move's exchanges and manifest are written. Engines that say nothing of it are of form 1; form 2 has no windows as
# checkpoints, form 4 no rehearsals.
FORM = 5
# In ADOPT_REST of a move whose pieces lie on a shelf: where the next one lies, and its XXH3 (128 bits), which may come later.
PLACE_OFFSET, PLACE_PROOF_BYTES = struct.Struct("<Q"), 16
PLACE_BYTES = PLACE_OFFSET.size + PLACE_PROOF_BYTES
# An exchange brings at most so many; places that are none fill one up that ends before it has as many as were announced.
PLACES = 16
NO_PLACE = (1 << 64) - 1


@dataclass(frozen=True)
class HandoffBody:
    """Asked of the source. The target's RPC address and secret; the source gives up `deadline_s` from now. With `request_id` that
    very request moves, which may still be on its way to the source, in its line or in its prompt."""

    handoff: str
    fence: int
    session: str
    target_host: str
    target_port: int
    target_secret: str = field(default="", repr=False)
    deadline_s: float = 60.0
    request_id: str = ""


@dataclass(frozen=True)
class HandoffAnswer:
    """What was moved. `kind` is live or idle. `pause_ms` is from the stop until the target had everything, 0 of an idle one;
    `pause_steps` the same in steps of the source. `total_bytes` is what copying all of the state at once would have sent, of
    which the target held `skipped_bytes`; `hidden_bytes` had gone before the first token of the answer was drawn. `send_s` were
    spent on sending, `phases_ms` on the parts of the move; `way` is shelf (memory of the host that both map) or stream. When
    what happened in the pause: `marks_ms` here, from the stop on, `target_marks_ms` there, from its manifest on."""

    kind: str
    tokens: int
    sent_bytes: int
    skipped_bytes: int
    total_bytes: int
    seconds: float
    pause_ms: float
    pause_steps: float
    request_id: str | None = None
    hidden_bytes: int = 0
    send_s: float = 0.0
    way: str = "stream"
    phases_ms: dict[str, float] = field(default_factory=dict)
    marks_ms: dict[str, float] = field(default_factory=dict)
    target_marks_ms: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ShelfOffer:
    """Memory of the source's host, which a target of the same host and user may map: a file's name in the folder that both are
    set to, its numbers, and `nonce` (hexadecimal), which stands at `nonce_at` while ADOPT is answered."""

    name: str
    size_bytes: int
    device: int
    inode: int
    nonce_at: int
    nonce: str


@dataclass(frozen=True)
class PrefixMark:
    """The first `tokens` tokens of the state have this digest."""

    tokens: int
    digest: str


@dataclass(frozen=True)
class AdoptBody:
    """The source's first word to the target. `expected_tokens` is how long the state is thought to be at its end. `marks`: what
    the target may already hold of it, the shortest first. `of` names the move that this one is a part of: `choice` of the request
    that comes by it. `constraint` is its form, which the target makes ready before the source stops. `form` is the move's own.
    A request that said how long its answer may be can grow to `most_tokens`; 0: as much as fits."""

    handoff: str
    fence: int
    session: str
    tenant: str
    fingerprint: str
    expected_tokens: int
    idle: bool
    raw_logits: bool
    request_id: str | None = None
    shelf: ShelfOffer | None = None
    marks: tuple[PrefixMark, ...] = ()
    choice: int = 0
    of: str = ""
    constraint: api_constraint.ConstraintSpec | None = None
    form: int = 1
    most_tokens: int = 0


@dataclass(frozen=True)
class AdoptAnswer:
    """The slot that was taken, or of an idle conversation that comes as a stream will be. `on_shelf`: pieces are taken from the
    offered memory. The first `held_tokens` are there and are not sent. `form` is the one that the target takes. `others_run`:
    somebody's answer is written there, so that pieces should be small."""

    slot_id: int
    on_shelf: bool = False
    held_tokens: int = 0
    form: int = 1
    others_run: bool = False


@dataclass(frozen=True)
class BlockHead:
    """What stands before a block's bytes in ADOPT_BLOCK; of one on the shelf (`offset`) it is all there is. `tokens` are its
    own; a checkpoint, the state of an earlier cut, has none."""

    start: int
    end: int
    size_bytes: int
    proof: str
    tokens: tuple[int, ...] = ()
    offset: int | None = None
    kind: str = "block"


@dataclass(frozen=True)
class AdoptedAnswer:
    """`state` is open (pieces are awaited), going (the generation runs here, or the idle state is in its slot) or over. Of the
    pieces that came `entered` are not needed on the shelf any more. `marks_ms`: when what happened behind the manifest. Nothing
    was tried for `rehearse_rows` yet where it is to be asked for again, once `again_after_tokens` more tokens of all choices
    together have been written."""

    state: str
    tokens: int = 0
    entered: int = 0
    marks_ms: dict[str, float] = field(default_factory=dict)
    again_after_tokens: int = 0


@dataclass(frozen=True)
class AskBody:
    """How a move stands at the target; with `drop` it ends there unless the generation goes on already, and with `resumed` also
    then: it goes on at the source. With `wait` the answer comes when nothing of what was sent is on its way in any more; before
    the source stops, with `reader` when whoever continues the client's stream has all ready there, or does not come, and with
    `rehearse_rows`, as with `wait`, when the target has tried what a step of so many rows a choice is like."""

    handoff: str
    fence: int
    drop: bool = False
    wait: bool = False
    resumed: bool = False
    reader: bool = False
    rehearse_rows: int = 0
