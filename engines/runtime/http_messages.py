"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's API on the same chats."""

from __future__ import annotations

from aiohttp import web

from engines.api_messages import CountTokensRequest, MessagesRequest, parse_count_request, parse_messages_request
from engines.api_schema import ChatRequest
from engines.runtime.http_chat import prepared_chat
from engines.runtime.http_errors import MESSAGES_PATH
from engines.runtime.http_follow import asked_body, origin_of
from engines.runtime.http_stream import collect, stream
from engines.runtime.messages_answer import MessagesAnswer
from engines.runtime.operations import GENERATES, JSON, NEEDS_MODEL, SSE, Operation
from engines.runtime.preparation import Images, Preparation
from engines.runtime.request_id import request_id


class MessagesEndpoint:
    def __init__(self, preparation: Preparation) -> None:
        self._preparation = preparation

    def operations(self) -> list[Operation]:
        return [
            Operation(
                "POST",
                MESSAGES_PATH,
                self.create,
                "The next message of a conversation, in Anthropic's shapes.",
                (MessagesRequest,),
                answers=(JSON, SSE),
                statuses=GENERATES,
            ),
            Operation(
                "POST",
                MESSAGES_PATH + "/count_tokens",
                self.count_tokens,
                "How many tokens a conversation's prompt has.",
                (CountTokensRequest,),
                statuses=NEEDS_MODEL,
            ),
        ]

    async def create(self, request: web.Request) -> web.StreamResponse:
        identity, origin = request_id(request), origin_of(request)
        raw = await asked_body(request)
        ready = await prepared_chat(
            self._preparation, lambda: parse_messages_request(raw), identity, "messages", translated=True
        )
        model_name, vocabulary = self._preparation.config.model_name, self._preparation.llama.vocabulary
        answer = MessagesAnswer(identity, model_name, vocabulary, ready.form)
        async with self._preparation.running(ready.generations, origin):
            if ready.body.stream:
                return await stream(request, ready.generations, answer)
            pieces = await collect(ready.generations)
        return web.json_response(answer.whole(pieces[0], ready.generations[0]))

    async def count_tokens(self, request: web.Request) -> web.Response:
        raw = await request.read()
        count = await self._preparation.run_chat(
            lambda: parse_count_request(raw), lambda chat: chat, self._count, "messages", translated=True
        )
        return web.json_response({"input_tokens": count})

    def _count(self, _asked: ChatRequest, chat: ChatRequest, images: Images) -> int:
        return len(self._preparation.chat_prompt(chat, "messages", images).tokens)
