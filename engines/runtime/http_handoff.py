"""`POST /handoffs/{id}/stream`: the rest of an answer whose generation moved here, to the site that read its beginning elsewhere.

The body is the request's own, once more: it says how the answer's text is to be read. The answer goes on exactly where the
other engine's stream ended, as the request's own endpoint would have written it.
"""

from __future__ import annotations

from collections.abc import Iterable

from aiohttp import web

from engines.errors import InvalidRequest
from engines.runtime.handoff_in import ArrivingHandoffs
from engines.runtime.http_follow import ADOPTED
from engines.runtime.operations import JSON, SSE, Operation, Parameter
from engines.runtime.request_id import request_id

PATH_HEADER = "X-Hydra-Path"
FOLLOWED_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


class HandoffEndpoint:
    def __init__(self, arriving: ArrivingHandoffs, served: Iterable[Operation]) -> None:
        self._arriving = arriving
        self._handlers = {operation.path: operation.handler for operation in served if operation.path in FOLLOWED_PATHS}

    def operations(self) -> list[Operation]:
        handoff = Parameter("id", "path", {"type": "string"}, "The handoff, as the stream named it.")
        return [
            Operation(
                "POST",
                "/handoffs/{id}/stream",
                self.go_on,
                "The rest of an answer whose request moved here from another engine.",
                (),
                (handoff,),
                answers=(JSON, SSE),
                statuses=(404, 503),
            )
        ]

    async def go_on(self, request: web.Request) -> web.StreamResponse:
        handler = self._handlers.get(request.headers.get(PATH_HEADER, ""))
        if handler is None:
            raise InvalidRequest(f"{PATH_HEADER} names an endpoint whose answers can be continued.", param=PATH_HEADER)
        request[ADOPTED] = self._arriving.expected(request.match_info["id"], request_id(request))
        return await handler(request)
