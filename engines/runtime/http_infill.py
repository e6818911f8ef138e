"""`POST /infill`: the text at an editor's cursor, between what stands before and behind it."""

from __future__ import annotations

from aiohttp import web

from engines.api_constraint import constraint_spec
from engines.api_infill import InfillRequest, parse_infill_request
from engines.runtime.fill_in_middle import fill_in_middle, with_files
from engines.runtime.generation import Generation
from engines.runtime.http_stream import collect, stream
from engines.runtime.native_answer import NativeAnswer
from engines.runtime.operations import GENERATES, JSON, SSE, Operation
from engines.runtime.origin import read_origin
from engines.runtime.preparation import Preparation
from engines.runtime.request_id import request_id

# Kept free for the answer where the request does not say how long it may be.
ANSWER_TOKENS = 256


class InfillEndpoint:
    def __init__(self, preparation: Preparation) -> None:
        self._preparation = preparation

    def operations(self) -> list[Operation]:
        return [
            Operation(
                "POST",
                "/infill",
                self.infill,
                "Fills in text between a prefix and a suffix, for editors.",
                (InfillRequest,),
                answers=(JSON, SSE),
                statuses=GENERATES,
            )
        ]

    async def infill(self, request: web.Request) -> web.StreamResponse:
        origin = read_origin(request.headers)
        raw = await request.read()
        body, generations = await self._preparation.run_in_turn(self._prepare, raw, request_id(request))
        answer = NativeAnswer(self._preparation.config.model_name)
        async with self._preparation.running(generations, origin):
            if body.sampling.stream:
                return await stream(request, generations, answer)
            pieces = await collect(generations)
        return web.json_response(answer.whole(pieces[0], generations[0]))

    def _prepare(self, raw: bytes, identity: str) -> tuple[InfillRequest, list[Generation]]:
        body = parse_infill_request(raw)
        preparation, vocabulary = self._preparation, self._preparation.llama.vocabulary
        before = body.input_prefix + body.prompt
        preparation.refuse_hopeless(len(before.encode()) + len(body.input_suffix.encode()), "input_prefix")
        prefix = vocabulary.tokenize(before, add_special=False, parse_special=False)
        prompt = fill_in_middle(vocabulary, prefix, body.input_suffix, "input_suffix")
        if body.input_extra:
            answer_tokens = body.sampling.max_new_tokens or ANSWER_TOKENS
            room = preparation.config.context_tokens - len(prompt) - answer_tokens
            prompt = with_files(vocabulary, prompt, body.input_extra, room)
        generations = preparation.generations(body.sampling, [prompt], identity, param="input_prefix")
        preparation.constrain(generations, constraint_spec(body.sampling))
        return body, generations
