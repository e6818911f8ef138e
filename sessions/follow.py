"""How a relayed answer follows its generation to another engine.

An engine's stream says `hydra.moving` while the other engine takes the generation in; that one's continuation is opened at
once, so that it is there when the first token is. It says `hydra.moved` as its last word; an engine that dies after the move
could not say that any more, and the continuation tells. `hydra.stays` says that the move came to nothing: the continuation is let
go, which ends what might go on there all the same. These events stay inside; the client sees one unbroken stream.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
from django.db import Error as DatabaseError

from engines.client import ANSWER_TIMEOUT_S, EngineClient
from engines.errors import EngineError, EngineUnreachable, GenerationMoved, HandoffUnknown
from engines.services import EngineEndpoint
from pools.db import in_db_within
from sessions import handoffs
from sessions.dialects import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from sessions.engine_call import EngineCall

# What an engine can continue is what it would have sent.
FOLLOWED = frozenset(dialect.path for dialect in (CHAT, COMPLETIONS, RESPONSES, MESSAGES))
MARK = b"event: hydra."
FOLLOWS_HEADER, PATH_HEADER, BEGUN_HEADER = "X-Hydra-Follows", "X-Hydra-Path", "X-Hydra-Begun-At"
ARRIVAL_TRIES = 3
ARRIVAL_PAUSE_S = 0.3
# A lost engine's move was committed or was not; the other one knows within its own patience with a silent source.
LOST_PATIENCE_S = 25.0
# The row says where it goes. A target that nobody asks for the answer gives it up a little later.
ROW_PATIENCE_S, ROW_PAUSE_S, DATABASE_PATIENCE_S = 12.0, 0.3, 3.0
MAX_NAME_CHARS = 64
MAX_REFUSAL_BYTES = 1 << 16

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Continuation:
    """Where an answer goes on."""

    endpoint: EngineEndpoint
    response: aiohttp.ClientResponse


class Follower:
    """Of one answer; `close` it. `moved` is set once the engine has said that it has sent all it ever will; `target` is who was
    asked to go on, and `lost` that one where it could not be reached. `created` tells when the answer says it was begun (seconds
    since 1970), 0 where nobody knows."""

    def __init__(
        self,
        call: EngineCall,
        request_id: uuid.UUID,
        headers: Callable[[], dict[str, str]],
        created: Callable[[], int] = lambda: 0,
    ) -> None:
        self.moved = False
        self.target: EngineEndpoint | None = None
        self.lost: EngineEndpoint | None = None
        self._call, self._request_id, self._headers, self._created = call, request_id, headers, created
        self._handoff = ""
        self._coming: asyncio.Task[Continuation] | None = None

    @property
    def expects(self) -> bool:
        """Whether some engine was about to take the generation in."""
        return bool(self._handoff)

    def heard(self, frame: bytes) -> None:
        """An event between engine and site: `moving`, `moved` or `stays`."""
        name, _, data = frame[len(MARK) :].partition(b"\ndata: ")
        handoff = str(json.loads(data)["handoff"])[:MAX_NAME_CHARS]
        if name == b"stays":
            if handoff == self._handoff:
                self.close()
            return
        self.moved = name == b"moved"
        self.expect(handoff)

    def expect(self, handoff: str) -> None:
        if handoff != self._handoff:
            self._drop()
            self._handoff, self.target, self.lost = handoff, None, None
            self._coming = asyncio.create_task(self._opened(handoff), name=f"follow-{handoff}")

    async def arrived(self) -> Continuation:
        """The answer as it goes on. Raises an EngineError when it does not. One in one piece begins to come when it is done:
        where it has surely moved it is waited for as long as the request has time, which the caller bounds."""
        patience_s = None if self.moved and not self._call.stream else LOST_PATIENCE_S
        for tries_left in reversed(range(ARRIVAL_TRIES)):
            assert self._coming is not None
            try:
                async with asyncio.timeout(patience_s):
                    arrived = await self._coming
            except (EngineUnreachable, HandoffUnknown) as error:
                if not tries_left or not self.moved:
                    self.lost = self.target if isinstance(error, EngineUnreachable) else None
                    raise
                logger.info("handoff %s: %s; asking again", self._handoff, error)
                await asyncio.sleep(ARRIVAL_PAUSE_S)
                self._coming = asyncio.create_task(self._opened(self._handoff))
            except TimeoutError as error:
                self.lost = self.target
                raise EngineUnreachable("The engine that took the request over does not go on.") from error
            else:
                self._coming, self._handoff, self.moved = None, "", False
                return arrived
        raise AssertionError("unreachable: the last try returns or raises")

    async def _opened(self, handoff: str) -> Continuation:
        self.target = endpoint = await _target_of(handoff)
        headers = {**self._headers(), PATH_HEADER: self._call.dialect.path}
        if created := self._created():
            headers[BEGUN_HEADER] = str(created)
        response = await EngineClient(endpoint.base_url, endpoint.secret).call(
            "POST",
            f"/handoffs/{handoff}/stream",
            self._call.raw,
            request_id=str(self._request_id),
            # It says nothing until the generation is there, and nothing between the pieces of a whole answer.
            silence_s=ANSWER_TIMEOUT_S,
            headers=headers,
        )
        if response.status != 200:
            moved_on = await _moved_on(response)
            response.close()
            if moved_on:
                raise GenerationMoved("It moved on.", param=moved_on)
            raise HandoffUnknown(f"The engine {endpoint.name} does not go on with the request ({response.status}).")
        return Continuation(endpoint, response)

    def close(self) -> None:
        """Whatever was opened and not taken is let go, which ends a generation that nobody reads."""
        self._drop()
        self._handoff = ""

    def _drop(self) -> None:
        if self._coming is not None:
            self._coming.cancel()
            self._coming.add_done_callback(_let_go)
            self._coming = None


async def _target_of(handoff: str) -> EngineEndpoint:
    """Raises HandoffUnknown, also where the database has not answered for ROW_PATIENCE_S, and NoEngineReady."""
    until_s = time.monotonic() + ROW_PATIENCE_S
    while True:
        try:
            return await in_db_within(DATABASE_PATIENCE_S, handoffs.target_of, handoff)
        except DatabaseError as error:
            if time.monotonic() + ROW_PAUSE_S > until_s:
                raise HandoffUnknown(f"Where {handoff} goes nobody can tell: {error}") from error
            logger.info("handoff %s: the database does not answer, asking again: %s", handoff, error)
        await asyncio.sleep(ROW_PAUSE_S)


async def _moved_on(response: aiohttp.ClientResponse) -> str:
    """The next handoff, where an answer in one piece moved on meanwhile."""
    try:
        error = json.loads(await response.content.read(MAX_REFUSAL_BYTES))["error"]
        return str(error["param"]) if error["code"] == GenerationMoved.code else ""
    except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError):
        return ""


def _let_go(coming: asyncio.Task[Continuation]) -> None:
    if coming.cancelled():
        return
    if coming.exception() is None:
        coming.result().response.close()
    elif not isinstance(coming.exception(), EngineError):
        logger.error("a continuation could not be opened: %r", coming.exception())
