"""A running generation on its way to another engine: in the line or its prompt, or while it writes.

Its finished blocks are sent while it goes on; then it stops between two of its tokens, and the rest goes. Until the target
has everything, whatever fails lets it go on here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Generator

from engines.errors import (
    DeadlineExceeded,
    EngineUnreachable,
    GenerationStays,
    ProtocolBroken,
    RpcRefused,
    SessionNotHeld,
    StateError,
)
from engines.runtime.core import EngineCore
from engines.runtime.generation import Generation, Piece
from engines.runtime.handoff_idle import Clock, room_of
from engines.runtime.handoff_way import Way
from engines.runtime.prefix import PrefixCache
from engines.runtime.state_export import ExportedPiece
from engines.runtime.state_follow import Leaving
from engines.runtime.state_snapshot import Manifest
from engines.runtime.state_terms import SharingTerms
from engines.wire_handoff import AdoptBody, AskBody, HandoffAnswer, HandoffBody

log = logging.getLogger("hydra.engine.handoff")

# A client's reader that has not taken what was written by then holds the stop up for nothing.
TOLD_S = 2.0
REST_PATIENCE_S = 6.0
ASK_PAUSES_S = (0.0, 0.1, 0.3, 0.6, 1.0)
# While a prompt is computed: how often is looked for finished blocks, and a target told that there will be more.
PROMPT_LOOK_S = 0.004
ALIVE_S = 3.0


class LiveMove:
    """One generation's move. `run` raises StateError, GenerationStays, SlotBusy, DeadlineExceeded, SessionNotHeld (it ended
    before), and what the target refuses with."""

    def __init__(
        self,
        core: EngineCore,
        terms: SharingTerms,
        way: Way,
        body: HandoffBody,
        generation: Generation,
        until: float,
    ) -> None:
        self._core, self._terms, self._way, self._body = core, terms, way, body
        self._generation, self._until = generation, until
        self._clock = Clock()
        self._hidden_bytes = 0

    async def run(self, adopt: AdoptBody) -> HandoffAnswer:
        generation, body, way = self._generation, self._body, self._way
        if not generation.followed:
            raise GenerationStays(
                "Nobody would follow the running request: it has several choices, images, log probabilities, or a form of"
                " answer whose stream cannot be continued elsewhere."
            )
        await way.adopt(adopt)
        self._clock.lap("adopted")
        # The site may open the other end now, so that the stop is not longer than the state's way.
        generation.mailbox.put(Piece(generation.choice, moving=body.handoff))
        async with Leaving(self._core, self._terms, generation, body.fence) as leaving:
            leaving.sent_tokens = way.held_tokens
            if not generation.new_tokens:
                await self._follow_prompt(leaving)
            began_at, began_tokens = time.monotonic(), generation.new_tokens
            await self._follow(leaving)
            step_s = (time.monotonic() - began_at) / max(1, generation.new_tokens - began_tokens)
            self._clock.lap("followed")
            stopped_at = time.monotonic()
            manifest = await leaving.stop()
            self._clock.lap("stopped")
            await self._send_rest(leaving, manifest)
            pause_s = time.monotonic() - stopped_at
            self._clock.lap("rest")
            generation.handoff = body.handoff
            await leaving.commit(body.fence)
            self._clock.lap("freed")
        held = [p for p in manifest.pieces if p.kind == "block" and p.end <= way.held_tokens]
        return HandoffAnswer(
            kind="live",
            tokens=len(manifest.tokens),
            sent_bytes=way.sent_bytes,
            skipped_bytes=sum(piece.size_bytes for piece in held),
            total_bytes=manifest.total_bytes,
            seconds=self._clock.seconds,
            pause_ms=round(pause_s * 1000, 3),
            pause_steps=round(pause_s / step_s, 3) if step_s else 0.0,
            request_id=generation.request_id,
            hidden_bytes=self._hidden_bytes,
            send_s=round(way.send_s, 6),
            way=way.name,
            phases_ms=self._clock.phases_ms,
        )

    # --- while it goes on -----------------------------------------------------------------------

    async def _follow_prompt(self, leaving: Leaving) -> None:
        """Sends what is full until the first token is drawn."""
        told_at = time.monotonic()
        while not self._generation.new_tokens:
            sent_bytes = self._way.sent_bytes
            await self._follow(leaving)
            if self._way.sent_bytes > sent_bytes:
                told_at = time.monotonic()
            elif time.monotonic() - told_at > ALIVE_S:
                await self._way.alive()
                told_at = time.monotonic()
            if self._generation.cancelled or not await leaving.is_under_way():
                raise SessionNotHeld("The request ended before it could move.")
            await asyncio.sleep(PROMPT_LOOK_S)
        self._clock.lap("prompt")

    async def _follow(self, leaving: Leaving) -> None:
        """Sends what is full, until less than a block is missing."""
        generation = self._generation
        async for exported in leaving.finished_blocks(self._way.prove):
            piece = exported.piece
            await self._way.send(exported, generation.tokens[piece.start : piece.end])
            if not generation.new_tokens:
                self._hidden_bytes += piece.size_bytes
            if time.monotonic() > self._until:
                raise DeadlineExceeded("The move's time was up before the generation's blocks had left.")
            await self._way.make_room(exported.buffer.data.nbytes)
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

    async def _send_rest(self, leaving: Leaving, manifest: Manifest) -> None:
        """Returns when the target goes on. Raises when it surely does not, or cannot be asked any more."""
        telling = asyncio.ensure_future(self._told())
        try:
            if self._way.on_shelf:
                await self._place_rest(leaving, manifest, telling)
            else:
                known, rest = leaving.sent_tokens, leaving.unsent_pieces
                exported = leaving.rest(self._way.prove)
                await self._way.send_rest(manifest, known, rest, exported, REST_PATIENCE_S, telling)
        except (EngineUnreachable, ProtocolBroken) as error:
            if not await self._goes_on_there():
                raise
            log.warning("handoff %s: the answer was lost (%s), but the target goes on", self._body.handoff, error)
        finally:
            telling.cancel()
            await asyncio.wait((telling,))
            if not telling.cancelled():
                telling.exception()  # looked at: whoever waited for it got it

    async def _place_rest(self, leaving: Leaving, manifest: Manifest, telling: asyncio.Future[None]) -> None:
        rest = leaving.unsent_pieces

        async def once_told(exported: ExportedPiece | None) -> None:
            if exported is None or exported.piece == rest[-1]:
                await telling

        largest_bytes = max((room_of(self._terms, piece) for piece in rest), default=0)
        await self._way.make_room(largest_bytes)
        pieces = leaving.rest(self._way.prove)
        await self._way.send_pieces(manifest, leaving.sent_tokens, pieces, largest_bytes, once_told)

    async def _goes_on_there(self) -> bool:
        """Asks a target whose answer was lost. One that cannot be reached has its stream read by nobody."""
        for pause_s in ASK_PAUSES_S:
            await asyncio.sleep(pause_s)
            try:
                ask = AskBody(self._body.handoff, self._body.fence, drop=True)
                answer = await self._way.target.adopt_ask(ask)
            except RpcRefused:
                return False
            except (EngineUnreachable, ProtocolBroken) as error:
                log.debug("handoff %s: the target does not answer: %s", self._body.handoff, error)
                continue
            return answer.state == "going"
        return False
