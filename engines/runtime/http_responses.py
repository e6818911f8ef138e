"""`POST /v1/responses`: OpenAI's newer API on the same chats."""

from __future__ import annotations

from aiohttp import web

from engines.api_responses import ResponsesRequest, parse_responses_request
from engines.api_schema import ChatRequest
from engines.runtime.http_chat import PreparedChat, prepare_chat
from engines.runtime.http_follow import asked_body, begun_at, origin_of
from engines.runtime.http_stream import collect, stream
from engines.runtime.operations import GENERATES, JSON, SSE, Operation
from engines.runtime.preparation import Images, Preparation
from engines.runtime.request_id import request_id
from engines.runtime.responses_answer import ResponsesAnswer


class ResponsesEndpoint:
    def __init__(self, preparation: Preparation) -> None:
        self._preparation = preparation

    def operations(self) -> list[Operation]:
        return [
            Operation(
                "POST",
                "/v1/responses",
                self.create,
                "The next response of a conversation, as typed items.",
                (ResponsesRequest,),
                answers=(JSON, SSE),
                statuses=GENERATES,
            )
        ]

    async def create(self, request: web.Request) -> web.StreamResponse:
        identity, origin = request_id(request), origin_of(request)
        raw = await asked_body(request)

        def finish(asked: ResponsesRequest, chat: ChatRequest, images: Images) -> tuple[ResponsesRequest, PreparedChat]:
            return asked, prepare_chat(self._preparation, chat, identity, "input", images)

        body, ready = await self._preparation.run_chat(
            lambda: parse_responses_request(raw), ResponsesRequest.chat, finish, "input", translated=True
        )
        for generation in ready.generations:
            # Its events are numbered.
            generation.counts_pieces = body.stream
        model_name, vocabulary = self._preparation.config.model_name, self._preparation.llama.vocabulary
        answer = ResponsesAnswer(identity, model_name, vocabulary, body, ready.form, begun_at(request))
        async with self._preparation.running(ready.generations, origin):
            if body.stream:
                return await stream(request, ready.generations, answer)
            pieces = await collect(ready.generations)
        return web.json_response(answer.whole(pieces[0], ready.generations[0]))
