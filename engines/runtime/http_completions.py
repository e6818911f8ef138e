"""`POST /v1/completions`: text after text, without messages and without a template."""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web

from engines.api_completions import CompletionBody, CompletionRequest, parse_completion_request
from engines.api_constraint import constraint_spec
from engines.runtime.completion_answer import CompletionAnswer
from engines.runtime.fill_in_middle import fill_in_middle
from engines.runtime.generation import Generation
from engines.runtime.http_follow import asked_body, begun_at, origin_of
from engines.runtime.http_stream import collect, stream
from engines.runtime.http_text import detokenize, require_known
from engines.runtime.llama import Vocabulary
from engines.runtime.operations import GENERATES, JSON, SSE, Operation
from engines.runtime.preparation import Preparation
from engines.runtime.request_id import request_id


@dataclass(frozen=True)
class PreparedCompletion:
    """A request that is ready to run. `echoes` has a text for each choice."""

    body: CompletionRequest
    generations: list[Generation]
    echoes: list[str]


class CompletionEndpoint:
    def __init__(self, preparation: Preparation) -> None:
        self._preparation = preparation

    def operations(self) -> list[Operation]:
        return [
            Operation("POST", path, self.complete, summary, (CompletionBody,), answers=(JSON, SSE), statuses=GENERATES)
            for path, summary in (
                ("/v1/completions", "Continues one or several texts."),
                ("/completions", "The same under llama.cpp's older path."),
            )
        ]

    async def complete(self, request: web.Request) -> web.StreamResponse:
        identity, origin = request_id(request), origin_of(request)
        raw = await asked_body(request)
        ready = await self._preparation.run_in_turn(self._prepare, raw, identity)
        sampling = ready.body.sampling
        answer = CompletionAnswer(
            identity,
            self._preparation.config.model_name,
            self._preparation.llama.vocabulary,
            ready.echoes,
            choices_per_prompt=sampling.n or 1,
            with_logprobs=ready.body.logprobs is not None,
            with_usage=sampling.include_usage,
            created=begun_at(request),
        )
        async with self._preparation.running(ready.generations, origin):
            if sampling.stream:
                return await stream(request, ready.generations, answer)
            return web.json_response(answer.whole(await collect(ready.generations)))

    def _prepare(self, raw: bytes, identity: str) -> PreparedCompletion:
        body = parse_completion_request(raw)
        vocabulary = self._preparation.llama.vocabulary
        self._preparation.refuse_hopeless(
            max(len(text.encode()) for text in (body.suffix or "", *body.texts)), "prompt"
        )
        prompts = [self._tokens(prompt, body, vocabulary) for prompt in body.prompts]
        generations = self._preparation.generations(body.sampling, prompts, identity, param="prompt")
        self._preparation.constrain(generations, constraint_spec(body.sampling))
        choices = body.sampling.n or 1
        echoes = [
            self._echo(prompt, vocabulary) if body.echo else "" for prompt in body.prompts for _ in range(choices)
        ]
        return PreparedCompletion(body, generations, echoes)

    def _tokens(self, prompt: str | list[int], body: CompletionRequest, vocabulary: Vocabulary) -> list[int]:
        if isinstance(prompt, list):
            require_known(vocabulary, prompt, "prompt")
            return prompt if body.suffix is None else fill_in_middle(vocabulary, prompt, body.suffix, "suffix")
        if body.suffix is None:
            return vocabulary.tokenize(prompt, add_special=True, parse_special=True)
        # Code is full of what looks like control tokens.
        prefix = vocabulary.tokenize(prompt, add_special=False, parse_special=False)
        return fill_in_middle(vocabulary, prefix, body.suffix, "suffix")

    def _echo(self, prompt: str | list[int], vocabulary: Vocabulary) -> str:
        return prompt if isinstance(prompt, str) else detokenize(vocabulary, prompt)
