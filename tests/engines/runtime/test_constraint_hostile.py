"""Grammars that strangers may send to do harm: each is refused or followed, within bounds of memory."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from typing import Any

import pytest

from engines.api_schema import parse_chat_request
from engines.errors import ConstraintFailed, InvalidRequest
from engines.runtime.constraint import ConstraintCompiler
from engines.runtime.llama import Vocabulary
from tests.engines.runtime.constrained import Driver, chat_prompt, spec_of

MAX_GROWTH_BYTES = 400 << 20


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def doubling(keyword: str, last: dict[str, Any]) -> dict[str, Any]:
    """Each definition holds the next one twice."""
    definitions: dict[str, Any] = {"d30": last}
    for level in range(30):
        inner = {"$ref": f"#/$defs/d{level + 1}"}
        definitions[f"d{level}"] = (
            {"type": "object", "properties": {"a": inner, "b": inner}}
            if keyword == "properties"
            else {keyword: [inner] * 2}
        )
    return {"$ref": "#/$defs/d0", "$defs": definitions}


REFUSED_SCHEMAS: dict[str, Any] = {
    "huge enum": {"enum": [f"value {i}" for i in range(100_000)]},
    "many objects as values": {"enum": [{"a": i} for i in range(2000)]},
    "deep nesting": nested(500),
    "too many properties": {"type": "object", "properties": {f"p{i}": {} for i in range(10_000)}},
    "too many properties in all": {
        "anyOf": [{"type": "object", "properties": {f"p{i}_{j}": {} for j in range(500)}} for i in range(10)]
    },
    "reference to itself": {"$ref": "#"},
    "references in a circle": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "reference to nothing": {"$ref": "#/$defs/none"},
    "reference to the web": {"$ref": "https://example.com/schema.json"},
    "reference to a file": {"$ref": "file:///etc/passwd"},
    "reference that is no text": {"$ref": 5},
    "look-ahead": {"type": "string", "pattern": "^(?=a)b$"},
    "long pattern": {"type": "string", "pattern": "a?" * 5000},
    "minLength of a billion": {"type": "string", "minLength": 10**9},
    "minItems of a billion": {"type": "array", "minItems": 10**9},
    "multipleOf 0": {"type": "integer", "multipleOf": 0},
    "multipleOf below 0": {"type": "integer", "multipleOf": -2},
    "multipleOf of a large prime": {"type": "integer", "multipleOf": 999_983},
    "multipleOf of many primes": {"allOf": [{"type": "integer", "multipleOf": p} for p in (997, 991, 983)]},
    "contradictory bounds": {"type": "integer", "minimum": 5, "maximum": 3},
    "contradictory lengths": {"type": "string", "minLength": 5, "maxLength": 3},
    "contradictory counts": {"type": "array", "minItems": 5, "maxItems": 3},
    "no value": {"enum": []},
    "no type of that name": {"type": "strin"},
    "a type that is no name": {"type": 5},
    "properties that are none": {"type": "object", "properties": [1]},
    "a boundless number": {"type": "number", "minimum": -1e300, "maximum": 1e300},
    "unions times unions": {
        "allOf": [{"anyOf": [{"type": "object", "properties": {f"p{i}_{j}": {}}} for j in range(4)]} for i in range(10)]
    },
    "overlapping pattern properties": {"type": "object", "patternProperties": {"^a": {"type": "null"}, "b$": {}}},
    "hundreds of pattern properties": {"type": "object", "patternProperties": {f"^p{i}$": {} for i in range(500)}},
    "thousands of branches": {"oneOf": [{"type": "object", "properties": {f"p{i}": {}}} for i in range(2000)]},
    "a keyword that is not enforced": {"type": "array", "uniqueItems": True},
}
FOLLOWED_SCHEMAS: dict[str, Any] = {
    "doubling properties": doubling("properties", {"type": "null"}),
    "doubling anyOf": doubling("anyOf", {"type": "integer"}),
    "doubling allOf": doubling("allOf", {"type": "integer"}),
    "a tree": {"type": "object", "properties": {"c": {"type": "array", "items": {"$ref": "#"}}}, "required": ["c"]},
    "an endless chain": {"type": "object", "properties": {"c": {"$ref": "#"}}, "required": ["c"]},
    "exponential pattern": {"type": "string", "pattern": "^(a|aa)+$"},
    "pattern of a large automaton": {"type": "string", "pattern": "a.{30}b.{30}"},
    "a million letters": {"type": "string", "maxLength": 1_000_000},
    "thousands of words": {"enum": [f"word {i}" for i in range(4000)]},
    "long words": {"enum": ["x" * 1000 + str(i) for i in range(200)]},
    "hundreds of optional properties": {"type": "object", "properties": {f"p{i}": {} for i in range(500)}},
    "deep but bounded": nested(25),
}
REFUSED_REGEXES = ("(?=a)b", "(?<!a)b", r"(a)\1", r"a\b", "(", "[", "a{5,2}", "(" * 4000 + "a" + ")" * 4000, "x" * 9000)
FOLLOWED_REGEXES = (
    "(a|aa)+",
    "((a*)*)*b",
    "(.*a){20}",
    "(.|\n)*a.{200}b",
    "a{1000000}",
    "(((a{100}){100}){100}){100}",
    "((([a-z]{0,100}){0,100}){0,100})",
    r"(\w{1,50}\W){1,50}",
    r"\p{L}{1,300}\p{N}{1,300}",
    "|".join(f"word{i}" for i in range(900)),
)
REFUSED_GRAMMARS: dict[str, str] = {
    "twenty thousand parentheses": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000,
    "a hundred parentheses": "root ::= " + "(" * 100 + '"a"' + ")" * 100,
    "a rule of itself": "root ::= root",
    "thirty thousand rules": "\n".join(
        ["root ::= r0", *(f'r{i} ::= "a" r{i + 1}' for i in range(30_000)), 'r30000 ::= "b"']
    ),
    "two thousand rules": "\n".join(
        ["root ::= r0", *(f'r{i} ::= "a" r{i + 1} | "b"' for i in range(2000)), 'r2000 ::= "b"']
    ),
    "a missing rule": "root ::= other",
    "no root": 'other ::= "a"',
    "nothing": "",
    "no grammar": "{}",
    "an endless number": 'root ::= "a"{' + "9" * 5000 + "}",
    "a half pair": 'root ::= "\\ud800"',
    "beyond Unicode": 'root ::= "\\U00FFFFFF"',
    "an open text": 'root ::= "a',
    "an open class": "root ::= [a",
}
FOLLOWED_GRAMMARS: dict[str, str] = {
    "ambiguous without end": 'root ::= a a a a a a\na ::= [a-z]* | a a | ""',
    "ambiguous": 'root ::= root root | "a"',
    "left recursion": 'root ::= root "a" | "b"',
    "empty recursion": 'root ::= "" root | ""',
    "a million times": 'root ::= ("a" b){1000000}\nb ::= b "x" | "y"',
    "doubling terminals": "\n".join(
        ["root ::= t0", *(f"t{i} ::= t{i + 1} t{i + 1}" for i in range(30)), 't30 ::= "a"']
    ),
    "repeated terminals": "root ::= t0{100}\nt0 ::= t1{100}\nt1 ::= t2{100}\nt2 ::= [a-z]{0,100}",
}


@pytest.fixture(scope="module")
def compiler(smollm2_vocabulary: Vocabulary) -> ConstraintCompiler:
    return ConstraintCompiler(smollm2_vocabulary)


@pytest.fixture(autouse=True)
def _bounded_memory() -> Any:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < MAX_GROWTH_BYTES


@pytest.fixture
def attempt(smollm2_vocabulary: Vocabulary, compiler: ConstraintCompiler) -> Callable[..., None]:
    """Compiles and answers; the only ways out are an answer, a cut one, or one of the two errors."""
    driver = Driver(smollm2_vocabulary)

    def follow(**fields: Any) -> None:
        try:
            constraint = compiler.compile(spec_of(**fields))
            driver.answer(constraint, 1, random_tokens=30, most_tokens=60)
        except InvalidRequest as error:
            assert error.param in fields and len(error.message) < 600
        except ConstraintFailed as error:
            assert len(error.message) < 600

    return follow


def refused(compiler: ConstraintCompiler, **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        compiler.compile(spec_of(**fields))
    assert caught.value.http_status == 400 and len(caught.value.message) < 600
    return caught.value


@pytest.mark.parametrize("name", REFUSED_SCHEMAS)
def test_schemas_that_are_refused(compiler: ConstraintCompiler, name: str) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "json_schema": REFUSED_SCHEMAS[name]})
    with pytest.raises(InvalidRequest) as caught:
        request = parse_chat_request(body.encode())
        compiler.compile(spec_of(json_schema=request.json_schema))
    assert caught.value.param == "json_schema"


@pytest.mark.parametrize("name", FOLLOWED_SCHEMAS)
def test_schemas_that_are_followed_within_bounds(attempt: Callable[..., None], name: str) -> None:
    attempt(json_schema=FOLLOWED_SCHEMAS[name])


@pytest.mark.parametrize("pattern", REFUSED_REGEXES, ids=range(len(REFUSED_REGEXES)))
def test_regular_expressions_that_are_refused(compiler: ConstraintCompiler, pattern: str) -> None:
    assert refused(compiler, regex=pattern).param == "regex"


@pytest.mark.parametrize("pattern", FOLLOWED_REGEXES, ids=range(len(FOLLOWED_REGEXES)))
def test_regular_expressions_that_are_followed_within_bounds(attempt: Callable[..., None], pattern: str) -> None:
    attempt(regex=pattern)


@pytest.mark.parametrize("name", REFUSED_GRAMMARS)
def test_grammars_that_are_refused(compiler: ConstraintCompiler, name: str) -> None:
    assert refused(compiler, grammar=REFUSED_GRAMMARS[name]).param == "grammar"


@pytest.mark.parametrize("name", FOLLOWED_GRAMMARS)
def test_grammars_that_are_followed_within_bounds(attempt: Callable[..., None], name: str) -> None:
    attempt(grammar=FOLLOWED_GRAMMARS[name])


@pytest.mark.parametrize(
    "raw",
    [
        b'{"messages": [{"role": "user", "content": "x"}], "json_schema": {"type": "object", "properties": {1: {}}}}',
        b'{"messages": [{"role": "user", "content": "x"}], "json_schema": {"const": "\\ud800"}}',
        b'{"messages": [{"role": "user", "content": "x"}], "json_schema": {"properties": {"\\udfff": {}}}}',
        b'{"messages": [{"role": "user", "content": "x"}], "json_schema": {"minimum": 1e999}}',
        b'{"messages": [{"role": "user", "content": "x"}], "json_schema": []}',
        b'{"messages": [{"role": "user", "content": "x"}], "regex": "\\ud800"}',
    ],
    ids=[
        "a key that is no text",
        "half a pair",
        "half a pair as a key",
        "infinity",
        "a list",
        "half a pair in a regex",
    ],
)
def test_what_is_no_schema_is_refused(compiler: ConstraintCompiler, raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        request = parse_chat_request(raw)
        compiler.compile(spec_of(json_schema=request.json_schema, regex=request.regex))


@pytest.mark.parametrize("tool_format", ["hermes_json", "qwen_xml"])
@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "string"},
        {"type": "object", "properties": {"a": nested(500)}},
        {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 999_983}}},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}},
    ],
    ids=["no object", "deep nesting", "a large prime", "reference to nothing"],
)
def test_tools_that_are_refused(compiler: ConstraintCompiler, parameters: dict[str, Any], tool_format: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    body = {"messages": [{"role": "user", "content": "x"}], "tools": tools}
    with pytest.raises(InvalidRequest) as caught:
        request = parse_chat_request(json.dumps(body).encode())
        compiler.compile(
            spec_of(chat_prompt(tool_format=tool_format), tools=[tool.model_dump() for tool in request.tools or ()])
        )
    assert str(caught.value.param).startswith("tools")
