"""Constrained generations in the core, and requests through a whole engine, on models of random weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from engines.errors import ConstraintFailed
from engines.runtime.constraint import ConstraintCompiler
from engines.runtime.core import EngineCore
from engines.runtime.generation import Generation
from engines.runtime.sampler import SamplingParams
from tests.engine_client import post
from tests.engine_process import EngineProcess
from tests.engines.runtime.constrained import chat_prompt, spec_of
from tests.engines.runtime.test_core import finished, generation, prompt_of, run, running
from tests.synthetic_gguf import SyntheticModel

OPEN = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
    },
    "required": ["colour", "count", "tags"],
    "additionalProperties": False,
}


def constrained(core: EngineCore, prompt: list[int], count: int, params: SamplingParams, **fields: Any) -> Generation:
    assert core.llama is not None
    compiler = ConstraintCompiler(core.llama.vocabulary)
    return generation(prompt, count, params=params, constraint=compiler.compile(spec_of(**fields)))


@pytest.mark.parametrize("path", ["host", "backend"])
async def test_answers_keep_their_form_on_both_sampling_paths(
    tiny_model: Callable[..., SyntheticModel], path: str
) -> None:
    model = tiny_model("llama")
    async with running(model, sampling=path, slots=3, whole_vocabulary_slots=2) as core:
        works = [
            constrained(core, prompt_of(model, 20 + seed), 200, replace(OPEN, seed=seed), json_schema=SCHEMA)
            for seed in range(4)
        ]
        core.submit(*works)
        for work in works:
            last = await finished(work)
            assert last.finish_reason == "stop"
            Draft202012Validator(SCHEMA).validate(json.loads(last.text))


async def test_an_answer_goes_on_in_its_form_after_giving_way(tiny_model: Callable[..., SyntheticModel]) -> None:
    model = tiny_model("llama")
    async with running(model, slots=3, context_tokens=256, cache_tokens=256) as core:
        works = [
            constrained(core, prompt_of(model, 60, start), 120, replace(OPEN, seed=start), regex="[a-z]{120}")
            for start in range(3)
        ]
        core.submit(*works)
        for work in works:
            last = await finished(work)
            assert last.error is None and last.text.isalpha() and len(last.text) <= 120
        assert sum(work.preemptions for work in works) > 0


async def test_log_probabilities_are_those_of_the_model(tiny_model: Callable[..., SyntheticModel]) -> None:
    model = tiny_model("llama")
    prompt = prompt_of(model, 20)
    params = SamplingParams(temperature=0, top_logprobs=5)
    async with running(model) as core:
        free = await run(core, prompt, 1, params=params)
        unbound = generation(prompt, 1, params=params)
        core.submit(unbound)
        natural = (await finished(unbound)).logprobs[0]
        bound = constrained(core, prompt, 1, params, regex="[xyz]")
        core.submit(bound)
        forced = (await finished(bound)).logprobs[0]
        assert free.tokens[-1] == natural.token != forced.token
        assert forced.top == natural.top
        assert forced.logprob < natural.logprob


async def test_a_form_that_cannot_be_followed_ends_its_request_alone(
    tiny_model: Callable[..., SyntheticModel],
) -> None:
    model = tiny_model("llama", tie_free=True)
    async with running(model) as core:
        doomed = constrained(core, prompt_of(model, 20), 400, replace(OPEN, seed=1), regex="[a-z]{9}")
        doomed.forced.extend(b"abc5")
        healthy = generation(prompt_of(model, 30), 40)
        core.submit(doomed, healthy)
        assert isinstance((await finished(doomed)).error, ConstraintFailed)
        assert (await finished(healthy)).error is None
        assert healthy.tokens[30:] == model.follow(10, 40)


async def test_forced_tokens_move_the_form_on(tiny_model: Callable[..., SyntheticModel]) -> None:
    model = tiny_model("llama")
    async with running(model) as core:
        assert core.llama is not None
        spec = spec_of(chat_prompt(opens_thought=True), json_schema=SCHEMA)
        constraint = ConstraintCompiler(core.llama.vocabulary).compile(spec)
        work = generation(prompt_of(model, 20), 300, params=replace(OPEN, seed=2), constraint=constraint)
        work.forced.extend(b"Enough.\n</think>\n\n")
        core.submit(work)
        text = (await finished(work)).text
        Draft202012Validator(SCHEMA).validate(json.loads(text.removeprefix("Enough.\n</think>\n\n")))


@pytest.fixture(scope="module")
def random_engine(
    tiny_model: Callable[..., SyntheticModel], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    with EngineProcess(tmp_path_factory.mktemp("constrained"), tiny_model("llama").path, context_tokens=2048) as engine:
        yield engine


def ask(engine: EngineProcess, **fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": "go"}], "temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0}
    return post(engine, "/v1/chat/completions", {**body, **fields})


def test_a_schema_is_kept_by_every_choice(random_engine: EngineProcess) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
    answer = ask(random_engine, response_format=wanted, n=4, seed=3, max_tokens=500).value
    contents = [choice["message"]["content"] for choice in answer["choices"]]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}
    assert len(set(contents)) > 1
    for content in contents:
        Draft202012Validator(SCHEMA).validate(json.loads(content))


def test_max_tokens_cuts_an_answer_inside_its_form(random_engine: EngineProcess) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    answer = ask(random_engine, response_format=wanted, max_tokens=3).value
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"].startswith("{")


def test_what_does_not_compile_is_a_400_that_says_where(random_engine: EngineProcess) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)"}}, "required": ["a"]}
    refusal = ask(
        random_engine, response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    )
    assert refusal.status == 400
    assert refusal.value["error"]["param"] == "response_format.json_schema.schema"
    assert "/properties/a: regex parse error" in refusal.value["error"]["message"]


def test_a_required_call_comes_back_as_a_call(random_engine: EngineProcess) -> None:
    function = {"name": "paint", "parameters": SCHEMA, "strict": True}
    answer = ask(
        random_engine,
        tools=[{"type": "function", "function": function}],
        tool_choice="required",
        parallel_tool_calls=False,
        enable_thinking=False,
        max_tokens=500,
        seed=5,
    ).value
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "paint"
    Draft202012Validator(SCHEMA).validate(json.loads(call["function"]["arguments"]))


def test_a_regular_expression_and_a_grammar_bind_plain_completions_too(random_engine: EngineProcess) -> None:
    for fields in ({"regex": "(yes|no)!"}, {"grammar": 'root ::= ("yes" | "no") "!"'}):
        answer = post(random_engine, "/v1/completions", {"prompt": "x", "max_tokens": 20, **fields}).value
        assert answer["choices"][0]["text"] in ("yes!", "no!")
        assert answer["choices"][0]["finish_reason"] == "stop"
