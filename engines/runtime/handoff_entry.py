"""One move towards this engine, or a part of one: how far it has come."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engines.errors import GenerationStays, NoCellsFree, StateInvalid, StateTooLarge
from engines.rpc_exchange import Exchange
from engines.rpc_handoff import HEAD_LENGTH
from engines.runtime.arena import Arena
from engines.runtime.generation import Generation
from engines.runtime.handoff_shelf import Shelf
from engines.runtime.prefix import PrefixCache
from engines.runtime.prefix_marks import longest_marked
from engines.runtime.prefix_search import Source
from engines.runtime.slots import Slot
from engines.runtime.state_adopt import Adopting
from engines.runtime.state_forms import digest_of
from engines.runtime.state_snapshot import MAX_TOKENS, Manifest, StatePiece
from engines.runtime.state_transfer import Delivery
from engines.wire_handoff import FORM, AdoptBody, AdoptedAnswer, BlockHead

if TYPE_CHECKING:
    from engines.runtime.handoff_choices import Making
    from engines.runtime.handoff_in import ArrivingHandoffs

TOKEN_BYTES = 4

# How long a stop waits for who is to read the answer's rest: to ask for it, and to be ready, which takes the longer, for template
# and tokenizer, the longer the prompt is.
ASKED_S, READY_S = 0.25, 3.0

OPEN, GOING, OVER = "open", "going", "over"


class Reader:
    """Whoever is to continue the client's stream: asks, makes all ready for the answer, and then waits for it."""

    def __init__(self) -> None:
        self._asked, self._waits = asyncio.Event(), asyncio.Event()

    def asked(self) -> None:
        self._asked.set()

    def waits(self) -> None:
        self._waits.set()

    async def ready(self) -> None:
        """Returns when it waits; in ASKED_S where it does not ask, and in READY_S in any case."""
        with suppress(TimeoutError):
            async with asyncio.timeout(ASKED_S):
                await self._asked.wait()
            async with asyncio.timeout(READY_S):
                await self._waits.wait()


@dataclass(eq=False)
class Adopted:
    """One move towards this engine."""

    body: AdoptBody
    slot_id: int
    desk: ArrivingHandoffs
    adopting: Adopting
    shelf: Shelf | None = None
    manifest: Manifest | None = None
    awaited: deque[StatePiece] = field(default_factory=deque)
    """Once the manifest is here: the pieces that are still to come."""
    state: str = OPEN
    tokens: int = 0
    generations: list[Generation] = field(default_factory=list)
    """Once it goes on here: all choices of the request."""
    first: Adopted | None = None
    """Of a move that is a part of another one; that one has it among its `parts`."""
    parts: list[Adopted] = field(default_factory=list)
    making: Making | None = None
    """Of a request that comes alone, once the manifest is here: what it goes on with."""
    is_whole: bool = False
    claimed: bool = False
    reader: Reader = field(default_factory=Reader)
    """Of a generation that runs."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    timer: asyncio.TimerHandle | None = None
    leaving: asyncio.Task[None] | None = None
    at_work: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def together(self) -> list[Adopted]:
        """All parts of the move."""
        first = self.first or self
        return [first, *first.parts]

    @property
    def is_at_work(self) -> bool:
        """Whether an exchange of any part is under way."""
        return any(one.at_work.locked() for one in self.together)

    def reading(self, generations: Sequence[Generation]) -> AbstractAsyncContextManager[list[Generation]]:
        """As `ArrivingHandoffs.reading`."""
        return self.desk.reading(self, generations)

    def settle(self, state: str) -> None:
        self.state = state
        self.settled.set()
        if self.leaving is not None and self.leaving is not asyncio.current_task():
            self.leaving.cancel()

    def let_go(self) -> None:
        """Of a move that is known for a while yet, and of which nobody needs more than how it stands."""
        self.generations = []
        self.let_go_of_state()

    def let_go_of_state(self) -> None:
        """What came is not needed any more; the request's generations are, if this is the part that has them."""
        self.shelf, self.manifest = None, None
        self.awaited.clear()
        self.adopting.let_go()

    def answer(self, again_after_tokens: int = 0) -> AdoptedAnswer:
        marks = self.adopting.marks
        marks_ms = {} if marks is None or self.body.idle else dict(marks.ms)
        return AdoptedAnswer(self.state, self.tokens, self.adopting.entered, marks_ms, again_after_tokens)

    def unwatch(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


async def read_head(exchange: Exchange, most_bytes: int) -> bytes:
    """The JSON before a payload's bytes. Raises StateInvalid."""
    length = bytearray(HEAD_LENGTH.size)
    await exchange.read_into(memoryview(length))
    (count,) = HEAD_LENGTH.unpack(length)
    if count > min(most_bytes, exchange.unread_bytes):
        raise StateInvalid(f"The payload's head is said to have {count} bytes.")
    head = bytearray(count)
    await exchange.read_into(memoryview(head))
    return bytes(head)


async def read_tokens(exchange: Exchange) -> NDArray[np.int32]:
    """The tokens behind a manifest. Raises StateInvalid."""
    raw = await read_head(exchange, TOKEN_BYTES * MAX_TOKENS)
    if len(raw) % TOKEN_BYTES:
        raise StateInvalid("The state's tokens do not fill their bytes.")
    return np.frombuffer(raw, dtype="<i4").astype(np.int32, copy=False)


async def read_piece(exchange: Exchange, piece: StatePiece, proof: bytes, arena: Arena) -> Delivery:
    """The next piece, whose bytes stand in the exchange. Raises StateInvalid, StateTooLarge."""
    if not 0 < piece.size_bytes <= exchange.unread_bytes:
        raise StateInvalid(f"A piece is said to have {piece.size_bytes} bytes; {exchange.unread_bytes} are left.")
    if piece.size_bytes > arena.size_bytes:
        raise StateTooLarge(f"A piece has {piece.size_bytes} bytes; here one may have {arena.size_bytes}.")
    buffer = await arena.take(piece.size_bytes)
    try:
        await exchange.read_into(memoryview(buffer.data.data))
    except BaseException:
        buffer.free()
        raise
    return Delivery(piece, buffer.data, buffer.free, proof, digest_of)


def require_form(body: AdoptBody) -> None:
    """Raises GenerationStays for a source of another version, which would fail later, behind its stop."""
    if body.form != FORM:
        raise GenerationStays(
            f"The source runs another version: it makes moves of form {body.form}, this engine takes form {FORM}."
        )


def require_expected(entry: Adopted, head: BlockHead, piece: StatePiece) -> None:
    """Raises StateInvalid for a block that cannot come now."""
    if entry.manifest is not None:
        raise StateInvalid("Behind the manifest pieces come by ADOPT_REST.")
    if head.kind == "checkpoint":
        if head.tokens or entry.body.idle:
            raise StateInvalid("Only of a running generation checkpoints come before the manifest, and without tokens.")
    elif head.kind != "block" or not 0 < piece.tokens == len(head.tokens):
        raise StateInvalid("A block's head does not fit its tokens.")


def free_slot(cache: PrefixCache, body: AdoptBody) -> int:
    """Raises NoCellsFree where none is idle, or as many run as may."""
    wanted = body.raw_logits
    if not body.idle and not cache.free_slots:
        raise NoCellsFree("Every slot of the engine works.")
    slot = cache.best_slot(Source(), raw_logits=wanted) or cache.best_slot(Source(), raw_logits=not wanted)
    if slot is None:
        raise NoCellsFree("Every slot of the engine works.")
    stale = [one for one in cache.slots if _is_stale(cache, one, body)] if len(slot.sequence) else []
    if stale:
        # Rather than another conversation's; nobody needs what is left of this one here.
        slot = min(stale, key=lambda one: one.has_raw_logits != wanted)
        slot.sequence.clear()
        cache.host.unlink(slot.index)
    return slot.index


def _is_stale(cache: PrefixCache, slot: Slot, body: AdoptBody) -> bool:
    """Whether the slot has an older form of the conversation, of which nothing could be lent to the one that comes."""
    sequence = slot.sequence
    if not (slot.idle and len(sequence) and body.session):
        return False
    if (sequence.origin.tenant, sequence.origin.session) != (body.tenant, body.session):
        return False
    return not (cache.can_share and longest_marked(sequence.tokens, body.marks))
