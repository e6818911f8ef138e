"""`POST /continue`: the rest of a streamed answer whose engine was lost, to the site that read its beginning.

The body is what the site kept of the stream, the journal, and the request's own body behind it. The answer goes on as the lost
engine's would have, to the byte; or it is written again from one of its events on, for a client that was read to by another site.
Only a site may ask for this: it stands beyond the secret of the engine, and no client's request is passed on to here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from aiohttp import web

from engines.errors import ContextTooShort, InvalidRequest, StateIncompatible
from engines.runtime.fingerprint import tokenizer_digest
from engines.runtime.generation import Generation
from engines.runtime.http_follow import RESUMPTION
from engines.runtime.journal import Journal, read_journal
from engines.runtime.llama import Vocabulary
from engines.runtime.operations import SSE, Operation
from engines.runtime.preparation import Preparation
from engines.runtime.replay import Replayed, Room, replay

if TYPE_CHECKING:
    from engines.runtime.operations import Handler

PATH_HEADER = "X-Hydra-Path"
JOURNAL_BYTES_HEADER, ELAPSED_HEADER, FROM_HEADER = "X-Hydra-Journal-Bytes", "X-Hydra-Elapsed-S", "X-Hydra-From-Event"
# Sent where nobody else goes on with the answer: one that ends early is better than one that breaks off.
MAY_CUT_HEADER = "X-Hydra-May-Cut"
# No site keeps a longer one; the request's own body has its usual bound behind it.
MAX_JOURNAL_BYTES = 9 << 20
CONTINUED_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
_NUMBER = re.compile(r"[0-9]{1,12}(\.[0-9]{1,6})?")


class Resumption:
    """How far a request came elsewhere. `body` is its own; with `from_event` its stream is written again from that event on, and
    with `may_cut` it ends where the context does, should that be sooner than where it began."""

    def __init__(
        self, journal: Journal, body: bytes, elapsed_s: float, from_event: int | None, *, may_cut: bool = False
    ) -> None:
        self.journal, self.body, self.from_event, self.may_cut = journal, body, from_event, may_cut
        self.replayed = Replayed((), {})
        self._elapsed_s = elapsed_s

    def require_fits(self, context_tokens: int) -> None:
        """Raises ContextTooShort for an answer that would be cut, as far as the journal tells."""
        ended = {entry.choice for entry in self.journal.entries if entry.reason is not None}
        longest = max((most for choice, most in enumerate(self.journal.most) if choice not in ended), default=0)
        if longest > context_tokens and not self.may_cut:
            raise ContextTooShort(
                f"The answer may take {longest} tokens, its prompt included; this engine's context holds {context_tokens}."
            )

    def bring(self, generations: Sequence[Generation], vocabulary: Vocabulary, context_tokens: int) -> None:
        """Brings the request's generations there. Raises StateIncompatible for another model's tokens, and as `replay` does."""
        if tokenizer_digest(vocabulary) != self.journal.head.tokenizer:
            raise StateIncompatible("The answer's beginning is in another model's tokens.")
        room = Room(context_tokens, self.may_cut)
        self.replayed = replay(self.journal, generations, vocabulary, self._elapsed_s, room)

    def unfinished(self, generations: Sequence[Generation]) -> list[Generation]:
        """Those that have something to say yet."""
        return [one for one in generations if one.choice not in self.replayed.ended and one.outcome is None]


class ContinueEndpoint:
    def __init__(self, preparation: Preparation, served: Iterable[Operation]) -> None:
        self._preparation = preparation
        self._handlers: dict[str, Handler] = {
            operation.path: operation.handler for operation in served if operation.path in CONTINUED_PATHS
        }

    def operations(self) -> list[Operation]:
        return [
            Operation(
                "POST",
                "/continue",
                self.go_on,
                "The rest of a streamed answer whose engine was lost.",
                answers=(SSE,),
                statuses=(400, 413, 422, 429, 503, 504),
            )
        ]

    async def go_on(self, request: web.Request) -> web.StreamResponse:
        handler = self._handlers.get(request.headers.get(PATH_HEADER, ""))
        if handler is None:
            raise InvalidRequest(f"{PATH_HEADER} names an endpoint whose answers can be continued.", param=PATH_HEADER)
        journal_bytes = int(_number(request, JOURNAL_BYTES_HEADER))
        from_event = int(_number(request, FROM_HEADER)) if FROM_HEADER in request.headers else None
        if journal_bytes > MAX_JOURNAL_BYTES:
            raise InvalidRequest(f"A journal has at most {MAX_JOURNAL_BYTES} bytes.", param=JOURNAL_BYTES_HEADER)
        limit_bytes = self._preparation.config.max_body_bytes + journal_bytes
        raw = await request.clone(client_max_size=limit_bytes).read()
        if journal_bytes > len(raw):
            raise InvalidRequest("The body is shorter than its journal.", param=JOURNAL_BYTES_HEADER)
        journal = await self._preparation.run(read_journal, raw[:journal_bytes])
        elapsed_s, may_cut = _number(request, ELAPSED_HEADER), request.headers.get(MAY_CUT_HEADER) == "1"
        resumption = Resumption(journal, raw[journal_bytes:], elapsed_s, from_event, may_cut=may_cut)
        # Before anything is computed of a prompt for nothing.
        resumption.require_fits(self._preparation.config.context_tokens)
        request[RESUMPTION] = resumption
        return await handler(request)


def _number(request: web.Request, header: str) -> float:
    text = request.headers.get(header, "0")
    if not _NUMBER.fullmatch(text):
        raise InvalidRequest(f"{header} is a number.", param=header)
    return float(text)
