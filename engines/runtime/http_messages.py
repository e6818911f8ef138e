"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's API on the same chats."""

from __future__ import annotations

from aiohttp import web

from engines.api_messages import CountTokensRequest, MessagesRequest, parse_count_request, parse_messages_request
from engines.runtime.http_chat import PreparedChat, prepare_chat
from engines.runtime.http_errors import MESSAGES_PATH
from engines.runtime.http_stream import collect, stream
from engines.runtime.messages_answer import MessagesAnswer
from engines.runtime.operations import GENERATES, JSON, NEEDS_MODEL, SSE, Operation
from engines.runtime.preparation import Preparation, request_id


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
        identity = request_id(request)
        raw = await request.read()
        ready = await self._preparation.run(self._prepare, raw, identity)
        model_name, vocabulary = self._preparation.config.model_name, self._preparation.llama.vocabulary
        answer = MessagesAnswer(identity, model_name, vocabulary, ready.form)
        with self._preparation.running(ready.generations):
            if ready.body.stream:
                return await stream(request, ready.generations, answer)
            pieces = await collect(ready.generations)
        return web.json_response(answer.whole(pieces[0], ready.generations[0]))

    def _prepare(self, raw: bytes, identity: str) -> PreparedChat:
        return prepare_chat(self._preparation, parse_messages_request(raw), identity, "messages")

    async def count_tokens(self, request: web.Request) -> web.Response:
        count = await self._preparation.run(self._count, await request.read())
        return web.json_response({"input_tokens": count})

    def _count(self, raw: bytes) -> int:
        return len(self._preparation.chat_prompt(parse_count_request(raw), "messages").tokens)
