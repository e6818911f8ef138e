"""`POST /v1/chat/completions`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from aiohttp import web

from engines.api_constraint import constraint_spec
from engines.api_schema import ChatRequest, parse_chat_request
from engines.runtime.answers import ChatAnswer, event
from engines.runtime.chat_output import ChatFormat
from engines.runtime.generation import Generation, Piece, Stats
from engines.runtime.http_follow import asked_body, begun_at, origin_of
from engines.runtime.http_stream import COMMENT_PING, collect, stream
from engines.runtime.operations import GENERATES, JSON, SSE, Operation
from engines.runtime.preparation import Images, Preparation
from engines.runtime.request_id import request_id
from engines.runtime.thinking_budget import ThinkingBudget


@dataclass(frozen=True)
class PreparedChat:
    """A chat that is ready to run: its generations share one mailbox, and `form` says how their text is to be read."""

    body: ChatRequest
    generations: list[Generation]
    form: ChatFormat


def prepare_chat(
    preparation: Preparation, body: ChatRequest, identity: str, param: str, images: Images = ()
) -> PreparedChat:
    """`body` as generations. `param` names the client's field of the conversation in errors. Any thread."""
    prompt = preparation.chat_prompt(body, param, images)
    generations = preparation.generations(
        body,
        [prompt.tokens],
        identity,
        cuts=prompt.cuts,
        system_cut=prompt.system_cut,
        spans=prompt.spans,
        param=param,
    )
    preparation.constrain(generations, constraint_spec(body, prompt))
    for generation in generations:
        generation.thinking_budget = ThinkingBudget.of(body, prompt, preparation.llama.vocabulary)
    form = ChatFormat.of(body, prompt)
    if form.functions:
        # Not the id alone: a client may send several requests of a conversation under one.
        form = replace(form, call_seed=f"{identity} {hashlib.sha256(str(prompt.tokens).encode()).hexdigest()}")
    return PreparedChat(body, generations, form)


async def prepared_chat(
    preparation: Preparation,
    read: Callable[[], ChatRequest],
    identity: str,
    param: str,
    *,
    translated: bool = False,
) -> PreparedChat:
    """The same for what `read` gives, with its images; `translated` from another API's shape. For the event loop."""

    def finish(_asked: ChatRequest, chat: ChatRequest, images: Images) -> PreparedChat:
        return prepare_chat(preparation, chat, identity, param, images)

    return await preparation.run_chat(read, lambda chat: chat, finish, param, translated=translated)


class ChatEndpoint:
    def __init__(self, preparation: Preparation) -> None:
        self._preparation = preparation

    def operations(self) -> list[Operation]:
        return [
            Operation(
                "POST",
                "/v1/chat/completions",
                self.chat,
                "The next message of a conversation.",
                (ChatRequest,),
                answers=(JSON, SSE),
                statuses=GENERATES,
            )
        ]

    async def chat(self, request: web.Request) -> web.StreamResponse:
        identity, origin = request_id(request), origin_of(request)
        raw = await asked_body(request)
        ready = await prepared_chat(self._preparation, lambda: parse_chat_request(raw), identity, "messages")
        model_name = self._preparation.config.model_name
        vocabulary = self._preparation.llama.vocabulary
        answer = ChatAnswer(identity, model_name, vocabulary, ready.form, begun_at(request))
        async with self._preparation.running(ready.generations, origin):
            if ready.body.stream:
                return await stream(request, ready.generations, ChatStream(answer, ready.body))
            pieces = await collect(ready.generations)
        return web.json_response(answer.whole(pieces, ready.generations, with_logprobs=bool(ready.body.logprobs)))


class ChatStream:
    """A ChatAnswer as a stream: an opening chunk for each choice, usage where it is asked for, and [DONE]."""

    ping = COMMENT_PING

    def __init__(self, answer: ChatAnswer, body: ChatRequest) -> None:
        self._answer = answer
        self._with_usage = body.include_usage

    def opening(self, generations: Sequence[Generation]) -> bytes:
        return b"".join(event(self._answer.opening(generation.choice)) for generation in generations)

    def frames(self, piece: Piece, generation: Generation) -> list[bytes]:
        return self._answer.frames(piece, generation)

    def passed(self, piece: Piece, generation: Generation) -> None:
        self.frames(piece, generation)

    def closing(self, all_stats: Sequence[Stats]) -> bytes:
        return (event(self._answer.usage_chunk(all_stats)) if self._with_usage else b"") + b"data: [DONE]\n\n"
