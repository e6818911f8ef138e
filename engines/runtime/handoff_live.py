"""Running generations on their way to another engine: in the line or their prompt, or while they write.

Their finished blocks are sent while they go on; then they stop between two of their tokens, and the rest goes. Until the target
has everything, whatever fails lets them go on here. The choices of one request move together: they stop in one step, go on there
when the last one is there, and those that have ended are told of.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass

from engines.errors import (
    DeadlineExceeded,
    EngineUnreachable,
    GenerationStays,
    ProtocolBroken,
    RpcRefused,
    SessionNotHeld,
    StateError,
)
from engines.rpc_handoff import HandoffClient
from engines.runtime.core import EngineCore
from engines.runtime.generation import Generation, Piece
from engines.runtime.handoff_idle import Clock, room_of
from engines.runtime.handoff_way import Way, require_going
from engines.runtime.prefix import PrefixCache
from engines.runtime.state_export import ExportedPiece
from engines.runtime.state_follow import Leaving
from engines.runtime.state_sizes import blocks_bytes
from engines.runtime.state_snapshot import Manifest, require_tellable
from engines.runtime.state_terms import SharingTerms
from engines.runtime.state_together import LastWord, commit_together, stop_together
from engines.wire_handoff import AdoptBody, AdoptedAnswer, AskBody, HandoffAnswer, HandoffBody

log = logging.getLogger("hydra.engine.handoff")

# A client's reader that has not taken what was written by then holds the stop up for nothing.
TOLD_S = 2.0
# All that is left of all choices leaves within this time of the stop, or stays: well before a stop ends by itself.
REST_LIMIT_S = 6.0
# A target whose answer was lost is asked for so long: one that heard nothing gives the move up in this time.
UNHEARD_S, ASK_PATIENCE_S, ASK_PAUSE_S = 10.0, 2.0, 0.2
# While a prompt is computed: how often is looked for finished blocks, and a target told that there will be more.
PROMPT_LOOK_S = 0.004
ALIVE_S = 3.0
# Of a first step at the target: one that is too early is followed by one that is not.
MOST_TRIES = 2
# The mark of a pause's end.
ANSWERED = "answered"


@dataclass(frozen=True, eq=False)
class _Member:
    """One choice on its way."""

    generation: Generation
    way: Way
    leaving: Leaving


class LiveMove:
    """One request's move, begun by one of its generations. `run` raises StateError, GenerationStays, SlotBusy, DeadlineExceeded,
    SessionNotHeld (it ended before), and what the target refuses with. `adopt_of` makes the first word about a generation."""

    def __init__(
        self,
        core: EngineCore,
        terms: SharingTerms,
        target: HandoffClient,
        body: HandoffBody,
        generation: Generation,
        until: float,
        adopt_of: Callable[[Generation, str], AdoptBody],
    ) -> None:
        self._core, self._terms, self._target, self._body = core, terms, target, body
        self._generation, self._until, self._adopt_of = generation, until, adopt_of
        self._members: list[_Member] = []
        self._clock = Clock()
        self._has_said = self._is_there = False
        self._hidden_bytes = 0
        self._block_room = terms.dock.codec.capacity_bytes(terms.block_tokens)
        self._told_at = time.monotonic()

    async def run(self) -> HandoffAnswer:
        generation, body = self._generation, self._body
        if not generation.followed:
            raise GenerationStays(
                "Nobody would follow the running request: it has images, or a form of answer whose stream cannot be continued"
                " elsewhere."
            )
        require_tellable(generation.siblings or (generation,))
        async with AsyncExitStack() as stack:
            try:
                return await self._run(stack, generation)
            except BaseException:
                if self._has_said and not self._is_there:
                    # Whoever opened the other end lets go of it, before anybody waits for a target that may not answer.
                    generation.mailbox.put(Piece(generation.choice, stays=body.handoff))
                raise

    async def _run(self, stack: AsyncExitStack, generation: Generation) -> HandoffAnswer:
        first, body = await self._joined(stack, generation), self._body
        self._clock.lap("adopted")
        # The site may open the other end now, so that the stop is not longer than the state's way.
        self._has_said = True
        generation.mailbox.put(Piece(generation.choice, moving=body.handoff))
        if not generation.new_tokens:
            await self._follow_prompt(first)
        began_at, began_tokens = time.monotonic(), generation.new_tokens
        await self._follow(first)
        step_s = (time.monotonic() - began_at) / max(1, generation.new_tokens - began_tokens)
        await self._join_others(stack)
        self._clock.lap("followed")
        await first.way.awaited()
        self._clock.lap("awaited")
        await self._rehearse(first)
        await self._cleared(self._members)
        self._clock.lap("rehearsed")
        manifests = await stop_together([member.leaving for member in self._members])
        self._clock.lap("stopped")
        moving = [member for member in self._members if member.leaving in manifests]
        answer = await self._send_rests(moving, manifests)
        self._clock.lap("rest")
        await commit_together([member.leaving for member in moving], body.fence)
        self._clock.lap("freed")
        return self._answer([(member, manifests[member.leaving]) for member in moving], answer, step_s)

    def _answer(
        self, moved: Sequence[tuple[_Member, Manifest]], last: AdoptedAnswer | None, step_s: float
    ) -> HandoffAnswer:
        layout, block_tokens = self._terms.layout, self._terms.block_tokens
        held_bytes = sum(blocks_bytes(layout, member.way.held_tokens, block_tokens) for member, _ in moved)
        marks_ms = {} if (marks := moved[0][0].leaving.marks) is None else marks.ms
        pause_ms = marks_ms.get(ANSWERED, 0.0)
        return HandoffAnswer(
            kind="live",
            tokens=sum(manifest.count for _, manifest in moved),
            sent_bytes=sum(member.way.sent_bytes for member in self._members),
            skipped_bytes=held_bytes,
            total_bytes=sum(member.leaving.sent_bytes + manifest.total_bytes for member, manifest in moved),
            seconds=self._clock.seconds,
            pause_ms=pause_ms,
            pause_steps=round(pause_ms / 1000 / step_s, 3) if step_s else 0.0,
            request_id=self._generation.request_id,
            hidden_bytes=self._hidden_bytes,
            send_s=round(sum(member.way.send_s for member in self._members), 6),
            way=self._members[0].way.name,
            phases_ms=self._clock.phases_ms,
            marks_ms=marks_ms,
            target_marks_ms={} if last is None else last.marks_ms,
        )

    async def _joined(self, stack: AsyncExitStack, generation: Generation) -> _Member:
        """The target takes it in."""
        name = self._body.handoff if not self._members else f"{self._body.handoff}+{generation.choice}"
        way = await stack.enter_async_context(Way(self._target, self._terms, name, self._body.fence))
        await way.adopt(self._adopt_of(generation, name))
        leaving = await stack.enter_async_context(Leaving(self._core, self._terms, generation, self._body.fence))
        leaving.skip(way.held_tokens)
        self._members.append(_Member(generation, way, leaving))
        return self._members[-1]

    # --- while it goes on -----------------------------------------------------------------------

    async def _follow_prompt(self, member: _Member) -> None:
        """Sends what is full until the first token is drawn."""
        while not member.generation.new_tokens:
            await self._follow(member)
            await self._alive()
            if member.generation.cancelled or not await member.leaving.is_under_way():
                raise SessionNotHeld("The request ended before it could move.")
            await asyncio.sleep(PROMPT_LOOK_S)
        self._clock.lap("prompt")

    async def _rehearse(self, first: _Member) -> None:
        """Returns when hardly anything is left to be sent and the target has tried the first step, behind which the stop follows
        at once. Where the tokens of that time would make it another one, they are written first."""
        for _ in range(MOST_TRIES):
            for member in self._members:
                await self._follow(member)
                await self._follow_begun(member)
            sent = sum(member.leaving.sent_tokens for member in self._members)
            later = await first.way.rehearse(self._rows_of_step())
            if not later:
                return
            await self._written(sent + later)

    async def _written(self, tokens: int) -> None:
        """Returns when so many tokens of all choices together have rows, or one of them is at its end."""
        generations = [member.generation for member in self._members]
        # The last token of each has none yet.
        while sum(len(one.tokens) - 1 for one in generations) < tokens:
            if any(one.cancelled or one.outcome is not None for one in generations) or time.monotonic() > self._until:
                return
            await self._alive()
            await asyncio.sleep(PROMPT_LOOK_S)

    def _rows_of_step(self) -> int:
        """As many has this generation's part of a step: its last token, and a draft as they are now."""
        drafts, generation = self._core.speculation, self._generation
        wanted = max(drafts.length.chosen, generation.draft_min) if drafts else 0
        return 1 + max(0, min(wanted, generation.longest_draft))

    async def _join_others(self, stack: AsyncExitStack) -> None:
        """Returns when every choice of the request is on its way or has ended; one that waits for a slot is waited for."""
        others = [one for one in self._generation.siblings if one is not self._generation]
        while others:
            running = await self._writing(others)
            waiting = [one for one in others if one not in running and one.outcome is None]
            # One that ends before the last one runs would hold a slot there for nothing.
            for one in running if not waiting else ():
                if not any(member.generation is one for member in self._members):
                    await self._joined(stack, one)
            for member in self._members:
                await self._follow(member)
            if not waiting:
                return
            if self._generation.cancelled:
                raise SessionNotHeld("The request ended before it could move.")
            await self._alive()
            await asyncio.sleep(PROMPT_LOOK_S)

    async def _writing(self, generations: Sequence[Generation]) -> list[Generation]:
        def look(cache: PrefixCache) -> Generator[None, None, list[Generation]]:
            yield from ()
            decoding = [slot.generation for slot in cache.busy if slot.decoding]
            return [one for one in generations if one in decoding]

        return list(await self._core.perform(look))

    async def _alive(self) -> None:
        """Tells a target that has heard nothing for a while that there will be more."""
        if time.monotonic() - self._told_at > ALIVE_S:
            for member in self._members:
                await member.way.alive()
            self._told_at = time.monotonic()

    async def _follow(self, member: _Member) -> None:
        """Sends what is full, until less than a block is missing, and what an earlier cut left."""
        await self._follow_blocks(member)
        # All choices have the same ones.
        if member is self._members[0] and await self._follow_cuts(member):
            await self._follow_blocks(member)

    async def _follow_cuts(self, member: _Member) -> bool:
        """Whether any went."""
        way, went = member.way, False
        for piece in await member.leaving.unsent_cuts():
            await way.make_room(piece.size_bytes)
            exported = await member.leaving.cut(piece, way.prove)
            if exported is None:
                continue
            went = True
            await way.send(exported)
            await self._alive()
            if not member.generation.new_tokens:
                self._hidden_bytes += piece.size_bytes
            if time.monotonic() > self._until:
                raise DeadlineExceeded("The move's time was up before the generation's checkpoints had left.")
        if went:
            await way.make_room(self._block_room)
        return went

    async def _follow_begun(self, member: _Member) -> None:
        """Sends what there is of the block that is not full yet."""
        exported = await member.leaving.begun_block(member.way.prove)
        if exported is not None:
            await member.way.send(exported, member.generation.tokens[exported.piece.start : exported.piece.end])
            await member.way.make_room(exported.buffer.data.nbytes)

    async def _follow_blocks(self, member: _Member) -> None:
        generation, way = member.generation, member.way
        async for exported in member.leaving.finished_blocks(way.prove):
            piece = exported.piece
            await way.send(exported, generation.tokens[piece.start : piece.end])
            await self._alive()  # the others wait their turn
            if not generation.new_tokens:
                self._hidden_bytes += piece.size_bytes
            if time.monotonic() > self._until:
                raise DeadlineExceeded("The move's time was up before the generation's blocks had left.")
            await way.make_room(exported.buffer.data.nbytes)
        if time.monotonic() > self._until:
            raise DeadlineExceeded("The move's time was up before the generation's prompt was computed.")

    # --- the stop -------------------------------------------------------------------------------

    async def _told(self) -> None:
        """Returns once all text that was made here has gone out."""

        def nothing(_cache: PrefixCache) -> Generator[None, None, None]:
            yield from ()

        # What the stop's step had to say is handed to the event loop before an errand of a later turn is.
        await self._core.perform(nothing)
        told = asyncio.Event()
        self._generation.mailbox.put(Piece(self._generation.choice, moving=self._body.handoff, told=told))
        try:
            async with asyncio.timeout(TOLD_S):
                await told.wait()
        except TimeoutError as error:
            raise StateError("The answer's reader is too slow to follow now.") from error

    async def _send_rests(self, moving: Sequence[_Member], manifests: dict[Leaving, Manifest]) -> AdoptedAnswer | None:
        """Returns when the target goes on, with its last word where that was heard. Raises when it surely does not, or cannot be
        asked any more."""
        telling = asyncio.ensure_future(self._told())
        try:
            async with asyncio.timeout(REST_LIMIT_S):
                for member in moving:
                    last = LastWord(telling, [one.leaving for one in moving] if member is moving[-1] else ())
                    answer = await self._send_rest(member, manifests[member.leaving], last)
                    if member is not moving[-1]:
                        await member.way.settled()
                require_going(answer)
            self._arrived(moving)
            return answer
        except (EngineUnreachable, ProtocolBroken, TimeoutError) as error:
            if not await self._goes_on_there():
                if isinstance(error, TimeoutError):
                    raise DeadlineExceeded("The request's state did not leave in the time of a stop.") from error
                raise
            self._arrived(moving)
            log.warning("handoff %s: the answer was lost (%s), but the target goes on", self._body.handoff, error)
            return None
        finally:
            telling.cancel()
            await asyncio.wait((telling,))
            if not telling.cancelled():
                telling.exception()  # looked at: whoever waited for it got it

    def _arrived(self, moving: Sequence[_Member]) -> None:
        """The target goes on: whatever fails from here on, also this engine's end, nobody goes on here or ends it there."""
        self._is_there = True
        for member in moving:
            if member.leaving.marks is not None:
                member.leaving.marks.note(ANSWERED)
        for member in self._members:
            member.way.is_there = True
        for member in moving:
            member.generation.handoff = self._body.handoff
            member.leaving.is_there = True

    async def _cleared(self, members: Sequence[_Member]) -> None:
        """Of several members each must leave room on the shelf to the next one, whose largest piece may need all of it."""
        for member in members if len(members) > 1 else ():
            await member.way.settled()

    async def _send_rest(self, member: _Member, manifest: Manifest, last: Awaitable[None]) -> AdoptedAnswer:
        """What the target says of the last of it."""
        leaving, way = member.leaving, member.way
        # What is on its way out is let go of at once where the target refuses.
        # Where a card copies the last part the processors are free to prove it meanwhile.
        late = way.on_shelf and self._terms.dock.codec.queues
        async with aclosing(leaving.rest(way.prove, late=late)) as pieces:
            if way.on_shelf:
                return await self._place_rest(leaving, way, manifest, pieces, last)
            rest = leaving.unsent_pieces
            return await way.send_rest(manifest, rest, pieces, REST_LIMIT_S, last)

    async def _place_rest(
        self,
        leaving: Leaving,
        way: Way,
        manifest: Manifest,
        pieces: AsyncIterator[ExportedPiece],
        last: Awaitable[None],
    ) -> AdoptedAnswer:
        rest = leaving.unsent_pieces

        async def once_told(exported: ExportedPiece | None) -> None:
            if exported is None or exported.piece == rest[-1]:
                await last
                leaving.mark("told")

        largest_bytes = max((room_of(self._terms, piece) for piece in rest), default=0)
        await way.make_room(largest_bytes)
        return await way.send_pieces(manifest, pieces, largest_bytes, once_told)

    async def _goes_on_there(self) -> bool:
        """Asks a target whose answer was lost until it knows; an open move ends by that. One that cannot be reached for so long
        has given the move up, or is left alone by whoever reads the answer."""
        until = time.monotonic() + UNHEARD_S
        while time.monotonic() < until:
            try:
                async with asyncio.timeout(ASK_PATIENCE_S):
                    answer = await self._target.adopt_ask(AskBody(self._body.handoff, self._body.fence, drop=True))
            except RpcRefused:
                return False
            except (EngineUnreachable, ProtocolBroken, TimeoutError) as error:
                log.debug("handoff %s: the target does not answer: %r", self._body.handoff, error)
                await asyncio.sleep(ASK_PAUSE_S)
            else:
                return answer.state == "going"
        return False
