"""From a request to the form of its answer, before anything is compiled."""

from __future__ import annotations

from typing import Any

import pytest

from engines.api_constraint import ConstraintSpec, constraint_spec
from engines.api_constraint_schema import is_regular, schema_grammar
from engines.errors import InvalidRequest
from tests.engines.runtime.constrained import chat_prompt, chat_request, spec_of

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]


def form(prompt: Any = None, **fields: Any) -> ConstraintSpec | None:
    return constraint_spec(chat_request(**fields), prompt)


@pytest.mark.parametrize(
    "fields",
    [{}, {"response_format": {"type": "text"}}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}],
    ids=["nothing", "text", "no calls", "no tools"],
)
def test_a_request_that_asks_for_no_form_has_none(fields: dict[str, Any]) -> None:
    assert form(chat_prompt(), **fields) is None


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, "json_schema"),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema"),
        ({"json_schema": SCHEMA}, "json_schema"),
        ({"regex": "a"}, "regex"),
        ({"guided_regex": "a"}, "regex"),
        ({"grammar": 'root ::= "a"'}, "gbnf"),
        ({"tools": TOOLS}, "tools"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "tools"),
    ],
)
def test_each_field_gives_its_kind(fields: dict[str, Any], kind: str) -> None:
    assert spec_of(chat_prompt(), **fields).kind == kind


def test_equal_requests_give_equal_forms() -> None:
    assert hash(spec_of(json_schema=SCHEMA)) == hash(spec_of(json_schema=SCHEMA))
    assert spec_of(json_schema=SCHEMA) == spec_of(json_schema=SCHEMA) != spec_of(regex="a")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"regex": "a", "json_schema": SCHEMA}, "regex"),
        ({"response_format": {"type": "json_object"}, "grammar": "x"}, "grammar"),
        ({"regex": "a", "tools": TOOLS}, "regex"),
        ({"grammar": "x", "tools": TOOLS}, "grammar"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": 5}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": True}}},
            "response_format.json_schema.schema",
        ),
        ({"regex": ""}, "regex"),
    ],
)
def test_what_contradicts_itself_or_is_missing_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        form(chat_prompt(), **fields)
    assert refused.value.param == param


def test_reasoning_stands_before_the_form_where_the_prompt_opened_it_or_the_model_may() -> None:
    wanted = {"response_format": {"type": "json_object"}}
    opened = spec_of(chat_prompt(opens_thought=True), **wanted)
    assert (opened.begins_after, opened.may_begin_with) == ("</think>", None)
    free = spec_of(chat_prompt(), **wanted)
    assert (free.begins_after, free.may_begin_with) == (None, "<think>")
    assert "<think>" in free.text and "</think>" in free.text and "</think>" in opened.text
    assert "<think>/" in free.lark(free.rules(), knows_thinking=True)
    assert "<think>/" not in free.lark(free.rules(), knows_thinking=False)
    for spec in (spec_of(chat_prompt(), enable_thinking=False, **wanted), spec_of(None, **wanted)):
        assert (spec.begins_after, spec.may_begin_with) == (None, None)


def test_only_the_chosen_function_is_part_of_the_form() -> None:
    tools = [*TOOLS, {"type": "function", "function": {"name": "g"}}]
    choice = {"type": "function", "function": {"name": "g"}}
    (part,) = spec_of(chat_prompt(), tools=tools, tool_choice=choice).parts
    assert part.param == "tools.1.function.parameters" and '\\"g\\"' in part.rules


def test_a_schema_cannot_set_the_compilers_options() -> None:
    grammar = schema_grammar({**SCHEMA, "x-guidance": {"whitespace_flexible": True}}, "p", strict=True)
    assert '"whitespace_flexible":false' in grammar and '"lenient":false' in grammar


@pytest.mark.parametrize("pattern", ["^(?=a)", "(?<!a)b", r"\bword\b", r"(a)\1", r"\k<n>"])
def test_patterns_that_need_backtracking_are_known(pattern: str) -> None:
    assert not is_regular(pattern)
    assert pattern not in schema_grammar({"type": "string", "pattern": pattern}, "p", strict=False)


@pytest.mark.parametrize("pattern", ["^a$", "(?:a|b)+", "(?P<n>a)", r"\d{3}", "[!=]"])
def test_regular_patterns_are_kept(pattern: str) -> None:
    assert is_regular(pattern)


@pytest.mark.parametrize(
    ("parameters", "strict", "refused"),
    [
        ({"type": "object", "properties": {"a": {"type": "string", "format": "email"}}}, True, True),
        ({"type": "object", "properties": {"a": {"type": "string", "format": "email"}}}, False, False),
        ({"type": "object", "properties": {"a<b": {"type": "string"}}}, False, True),
        ({"type": "object", "properties": {"a": {"enum": ["</parameter>"]}}}, False, True),
        ({"type": "object", "properties": {"a": {"type": "array", "items": {"$ref": "#/properties/a"}}}}, False, True),
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "^a|b$"}}}, True, True),
        ({"type": "object", "anyOf": [{"required": ["a"]}], "properties": {"a": {}}}, True, True),
        ({"type": "object", "anyOf": [{"required": ["a"]}], "properties": {"a": {}}}, False, False),
        ({"type": "array"}, False, True),
    ],
)
def test_what_the_xml_format_cannot_carry_is_refused(parameters: dict[str, Any], strict: bool, refused: bool) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters, "strict": strict}}]
    prompt = chat_prompt(tool_format="qwen_xml")
    if not refused:
        assert form(prompt, tools=tools) is not None
        return
    with pytest.raises(InvalidRequest) as caught:
        form(prompt, tools=tools)
    assert caught.value.param == "tools.0.function.parameters"
