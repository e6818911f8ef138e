"""Tool calls that a grammar lets through are read back by the parser of answers, with arguments that fit the schema."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from engines.errors import InvalidRequest
from engines.runtime.chat_output import ChatFormat, ChatOutput
from engines.runtime.constraint import ConstraintCompiler
from engines.runtime.llama import Vocabulary
from tests.engines.runtime.constrained import (
    Driver,
    MarkedVocabulary,
    chat_prompt,
    chat_request,
    may_end,
    spec_of,
    takes,
)
from tests.engines.runtime.json_schemas import NAMES, schemas

FORMATS = ("hermes_json", "qwen_xml")
# JSON's grammar bounds no exponent, but Python reads such a number as infinity.
_BEYOND_DOUBLES = re.compile(r"\d[eE]\+?\d{3}")
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "pattern": "^[A-Z]", "maxLength": 20},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "place": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"lat": {"type": "number"}}, "required": ["lat"]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "stop-all"}},
]
CALLS = {
    "hermes_json": {
        "weather": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>',
        "stop": '<tool_call>\n{"name": "stop-all", "arguments": {}}\n</tool_call>',
        "unknown": '<tool_call>\n{"name": "get_time", "arguments": {}}',
        "wrong": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 30',
    },
    "qwen_xml": {
        "weather": "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>",
        "stop": "<tool_call>\n<function=stop-all>\n</function>\n</tool_call>",
        "unknown": "<tool_call>\n<function=get_time>\n",
        "wrong": "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n30\n",
    },
}


@pytest.fixture(scope="module")
def compiler(smollm2_vocabulary: Vocabulary) -> ConstraintCompiler:
    return ConstraintCompiler(smollm2_vocabulary)


def read_back(text: str, tool_format: str, **fields: Any) -> list[tuple[str, Any]]:
    """Name and arguments of each call that the parser sees, fed letter by letter; the content must hold no part of them."""
    output = ChatOutput(ChatFormat.of(chat_request(**fields), chat_prompt(tool_format=tool_format)))
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    content = ""
    for delta in [*(output.feed(letter) for letter in text), output.finish()]:
        content += delta.content
        for call in delta.tool_calls:
            names[call.index] = call.name or names[call.index]
            arguments[call.index] = arguments.get(call.index, "") + call.arguments
    assert "tool_call>" not in content
    return [(names[index], json.loads(arguments[index])) for index in sorted(names)]


@pytest.mark.parametrize("tool_format", FORMATS)
def test_a_required_call_is_one_of_the_tools_with_fitting_arguments(
    smollm2_vocabulary: Vocabulary, compiler: ConstraintCompiler, tool_format: str
) -> None:
    calls = CALLS[tool_format]
    spec = spec_of(chat_prompt(tool_format=tool_format), tools=TOOLS, tool_choice="required")
    for text in (calls["weather"], calls["stop"], calls["stop"] + "\n" + calls["weather"]):
        constraint = compiler.compile(spec)
        assert takes(smollm2_vocabulary, constraint, text) is None
        assert may_end(smollm2_vocabulary, constraint)
        assert read_back(text, tool_format, tools=TOOLS)
    for text in (calls["unknown"], calls["wrong"], "Hello", calls["stop"] + "\nDone."):
        assert takes(smollm2_vocabulary, compiler.compile(spec), text) is not None


@pytest.mark.parametrize("tool_format", FORMATS)
def test_a_named_call_is_that_one_alone(
    smollm2_vocabulary: Vocabulary, compiler: ConstraintCompiler, tool_format: str
) -> None:
    calls = CALLS[tool_format]
    choice = {"type": "function", "function": {"name": "stop-all"}}
    spec = spec_of(chat_prompt(tool_format=tool_format), tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    constraint = compiler.compile(spec)
    assert takes(smollm2_vocabulary, constraint.copy(), calls["weather"]) is not None
    assert takes(smollm2_vocabulary, constraint, calls["stop"]) is None
    assert may_end(smollm2_vocabulary, constraint)
    assert takes(smollm2_vocabulary, constraint, "\n<tool_call>") is not None


@pytest.mark.parametrize("tool_format", FORMATS)
def test_free_text_turns_into_a_fitting_call_where_a_call_begins(
    smollm2_vocabulary: Vocabulary, compiler: ConstraintCompiler, tool_format: str
) -> None:
    calls = CALLS[tool_format]
    spec = spec_of(chat_prompt(tool_format=tool_format), tools=TOOLS)
    for text in (
        "No call, but <b>tags</b> {and} braces.",
        "I look.\n\n" + calls["weather"],
        calls["stop"] + "\n" + calls["stop"],
    ):
        constraint = compiler.compile(spec)
        assert takes(smollm2_vocabulary, constraint, text) is None
        assert may_end(smollm2_vocabulary, constraint)
    for text in ("I look. " + calls["unknown"], calls["wrong"], "<tool_call> is a tag"):
        assert takes(smollm2_vocabulary, compiler.compile(spec), text) is not None


def test_a_call_without_its_outer_tag_is_constrained_too(
    smollm2_vocabulary: Vocabulary, compiler: ConstraintCompiler
) -> None:
    spec = spec_of(chat_prompt(tool_format="qwen_xml"), tools=TOOLS)
    bare = CALLS["qwen_xml"]["weather"].removeprefix("<tool_call>\n")
    constraint = compiler.compile(spec)
    assert takes(smollm2_vocabulary, constraint, "I look.\n" + bare) is None
    assert may_end(smollm2_vocabulary, constraint)
    assert takes(smollm2_vocabulary, compiler.compile(spec), "I look.\n<function=get_time>") is not None


@pytest.mark.parametrize("tool_format", FORMATS)
def test_with_a_form_for_the_content_an_answer_is_a_call_or_of_that_form(
    smollm2_vocabulary: Vocabulary, compiler: ConstraintCompiler, tool_format: str
) -> None:
    prompt = chat_prompt(tool_format=tool_format, opens_thought=True)
    spec = spec_of(prompt, tools=TOOLS, response_format={"type": "json_object"})
    for text in ('{"a": 1}', CALLS[tool_format]["stop"]):
        constraint = compiler.compile(spec)
        assert takes(smollm2_vocabulary, constraint, "Hm, <tool_call> maybe.\n</think>\n\n" + text) is None
        assert may_end(smollm2_vocabulary, constraint)
    assert takes(smollm2_vocabulary, compiler.compile(spec), "Hm.\n</think>\n\nHello") is not None


@pytest.mark.parametrize("marked", [False, True], ids=["spelt out", "as tokens"])
@pytest.mark.parametrize("tool_format", FORMATS)
def test_marks_count_where_they_stand_however_they_are_written(
    smollm2_vocabulary: Vocabulary, tool_format: str, marked: bool
) -> None:
    vocabulary = MarkedVocabulary(smollm2_vocabulary) if marked else smollm2_vocabulary
    calls = CALLS[tool_format]
    spec = spec_of(chat_prompt(tool_format=tool_format), tools=TOOLS, enable_thinking=True)
    compiler = ConstraintCompiler(vocabulary)
    for text in (
        "Hello.",
        "a < b, << c, <tool> and </tool_call>",
        "<" + calls["weather"],
        "Look:" + calls["stop"] + "\n\n" + calls["weather"],
    ):
        constraint = compiler.compile(spec)
        assert takes(vocabulary, constraint, text) is None
        assert may_end(vocabulary, constraint)
    for text in ("<<tool_call>x", "a<tool_call><tool_call>", "<tool_call></tool_call>"):
        assert takes(vocabulary, compiler.compile(spec), text) is not None


@pytest.mark.parametrize("tool_format", FORMATS)
def test_a_model_may_think_first_and_what_it_thinks_of_calls_is_free(
    smollm2_vocabulary: Vocabulary, tool_format: str
) -> None:
    vocabulary = MarkedVocabulary(smollm2_vocabulary)
    calls = CALLS[tool_format]
    compiler = ConstraintCompiler(vocabulary)
    draft = "<think>\nShall I write " + calls["unknown"] + "? No.\n</think>\n\n"
    for fields in ({}, {"tool_choice": "required"}, {"response_format": {"type": "json_object"}}):
        spec = spec_of(chat_prompt(tool_format=tool_format), tools=TOOLS, **fields)
        constraint = compiler.compile(spec)
        assert takes(vocabulary, constraint, draft) is None
        assert takes(vocabulary, constraint.copy(), calls["unknown"]) is not None
        assert takes(vocabulary, constraint, calls["weather"]) is None
        assert may_end(vocabulary, constraint)
        constraint = compiler.compile(spec)
        assert takes(vocabulary, constraint, "<think>\nEndless thoughts") is None
        assert not may_end(vocabulary, constraint)
    unthinking = spec_of(
        chat_prompt(tool_format=tool_format), tools=TOOLS, tool_choice="required", enable_thinking=False
    )
    assert takes(vocabulary, compiler.compile(unthinking), "<think>") is not None


@pytest.mark.parametrize("tool_format", FORMATS)
def test_as_many_tools_as_agents_bring_are_followed(smollm2_vocabulary: Vocabulary, tool_format: str) -> None:
    vocabulary = MarkedVocabulary(smollm2_vocabulary)
    functions = [
        {
            "name": f"server-{number}_do",
            "description": "Does it.",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string", "pattern": "^(?!/etc)"},
                    "mode": {"type": "string", "enum": ["read", "write", f"mode {number}"]},
                    "limit": {"type": "integer", "minimum": 1, "default": 10},
                    "where": {"type": "object", "additionalProperties": {"type": "string", "format": "uri-reference"}},
                    "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
                    "query": {"anyOf": [{"type": "string"}, {"type": "null"}], "title": "Query"},
                },
                "required": ["path"],
                "$schema": "http://json-schema.org/draft-07/schema#",
            },
        }
        for number in range(80)
    ]
    tools = [{"type": "function", "function": function} for function in functions]
    text = {
        "hermes_json": '<tool_call>\n{"name": "server-7_do", "arguments": {"path": "/etc/x", "mode": "mode 7"}}\n</tool_call>',
        "qwen_xml": "<tool_call>\n<function=server-7_do>\n<parameter=path>\n/etc/x\n</parameter>\n<parameter=mode>\nmode 7\n"
        "</parameter>\n</function>\n</tool_call>",
    }[tool_format]
    constraint = ConstraintCompiler(vocabulary).compile(spec_of(chat_prompt(tool_format=tool_format), tools=tools))
    assert takes(vocabulary, constraint, "I do it.\n" + text) is None
    assert may_end(vocabulary, constraint)


@st.composite
def _tool_parameters(draw: st.DrawFn) -> dict[str, Any]:
    properties, definitions = {}, {}
    for name in draw(st.lists(st.sampled_from(NAMES), max_size=3, unique=True)):
        schema = draw(schemas())
        definitions = schema.pop("$defs")
        properties[name] = schema
    required = [name for name in properties if draw(st.booleans())]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
        "$defs": definitions,
    }


def check_random_tools(
    vocabulary: Vocabulary, compiler: ConstraintCompiler, tool_format: str, count: int
) -> Counter[str]:
    """Holds `count` required calls of strict tools, drawn from noise, against parser and validator."""
    driver = Driver(vocabulary)
    outcomes: Counter[str] = Counter()

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(_tool_parameters())
    def check(parameters: dict[str, Any]) -> None:
        function = {"name": "f", "parameters": parameters, "strict": True}
        fields: dict[str, Any] = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
        fields["parallel_tool_calls"] = False
        try:
            constraint = compiler.compile(
                spec_of(chat_prompt(tool_format=tool_format), **fields, enable_thinking=False)
            )
        except InvalidRequest as error:
            assert error.param == "tools.0.function.parameters"
            outcomes["refused"] += 1
            return
        text, ended = driver.answer(constraint, sum(outcomes.values()), random_tokens=60, most_tokens=800)
        if not ended or _BEYOND_DOUBLES.search(text):
            outcomes["cut"] += 1
            return
        ((name, arguments),) = read_back(text, tool_format, **fields)
        problems = [error.message for error in Draft202012Validator(parameters).iter_errors(arguments)]
        assert name == "f" and not problems, (problems, text, parameters)
        outcomes["valid"] += 1

    check()
    return outcomes


@pytest.mark.parametrize("tool_format", FORMATS)
def test_random_tools_are_called_as_their_schemas_say(
    smollm2_vocabulary: Vocabulary, compiler: ConstraintCompiler, tool_format: str
) -> None:
    outcomes = check_random_tools(smollm2_vocabulary, compiler, tool_format, 40)
    assert outcomes["valid"] >= 8, outcomes


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("tool_format", FORMATS)
def test_a_thousand_random_tools_are_called_as_their_schemas_say(
    smollm2_vocabulary: Vocabulary, compiler: ConstraintCompiler, tool_format: str
) -> None:
    outcomes = check_random_tools(smollm2_vocabulary, compiler, tool_format, 1000)
    assert outcomes["valid"] > 250, outcomes
