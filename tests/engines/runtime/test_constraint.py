"""One constraint: what may come next, where the text may end, and how its place is found again."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from engines.errors import ConstraintFailed, InvalidRequest
from engines.runtime.constraint import Constraint, ConstraintCompiler
from engines.runtime.llama import Vocabulary
from engines.runtime.sampler import SamplingParams
from tests.engines.runtime.constrained import Driver, chat_prompt, may_end, spec_of, takes

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compiler(smollm2_vocabulary: Vocabulary) -> ConstraintCompiler:
    return ConstraintCompiler(smollm2_vocabulary)


@pytest.fixture
def person(compiler: ConstraintCompiler) -> Constraint:
    return compiler.compile(spec_of(json_schema=PERSON))


def tokens_of(vocabulary: Vocabulary, text: str) -> list[int]:
    return vocabulary.tokenize(text, add_special=False, parse_special=False)


def allowed_tokens(vocabulary: Vocabulary, constraint: Constraint) -> set[int]:
    row = np.zeros(vocabulary.size, dtype=np.float32)
    constraint.mask(row)
    return set(np.flatnonzero(row == 0).tolist())


@pytest.mark.parametrize(
    "text", ['{"name": "Ada", "age": 36}', '{"name":"Ada","age":36}', '{"name": "é\\n\\"", "age": 0}']
)
def test_what_the_schema_allows_is_taken_and_may_end(
    smollm2_vocabulary: Vocabulary, person: Constraint, text: str
) -> None:
    assert takes(smollm2_vocabulary, person, text) is None
    assert may_end(smollm2_vocabulary, person)


@pytest.mark.parametrize(
    "text",
    ['{"name": 5', '{"age"', "[", " {", '{"name": "Ada", "age": -1', '{"name":  "', '{\n"name"', '{"name": "a\nb"'],
)
def test_what_the_schema_forbids_and_endless_white_space_are_refused(
    smollm2_vocabulary: Vocabulary, person: Constraint, text: str
) -> None:
    assert takes(smollm2_vocabulary, person, text) is not None


def test_only_end_tokens_follow_a_complete_answer(smollm2_vocabulary: Vocabulary, person: Constraint) -> None:
    for token in tokens_of(smollm2_vocabulary, '{"name": "Ada", "age": 36}'):
        assert not allowed_tokens(smollm2_vocabulary, person) & smollm2_vocabulary.end_tokens
        person.accept(token)
    assert allowed_tokens(smollm2_vocabulary, person) == set(smollm2_vocabulary.end_tokens)
    assert not person.done
    person.accept(smollm2_vocabulary.eos)
    assert person.done


def test_control_tokens_are_never_allowed_inside(smollm2_vocabulary: Vocabulary, person: Constraint) -> None:
    control = {token for token, piece in enumerate(smollm2_vocabulary.pieces) if not piece}
    assert control - smollm2_vocabulary.end_tokens
    for token in tokens_of(smollm2_vocabulary, '{"name": "<|im_end|> is text", "age": 1'):
        assert not allowed_tokens(smollm2_vocabulary, person) & control
        person.accept(token)


def test_the_few_and_the_many_allowed_tokens_are_those_of_the_mask(
    smollm2_vocabulary: Vocabulary, person: Constraint
) -> None:
    seen_few = seen_many = False
    for token in tokens_of(smollm2_vocabulary, '{"name": "Ada Lovelace", "age": 36}'):
        allowed = person.allowed()
        masked = allowed_tokens(smollm2_vocabulary, person)
        seen_few |= allowed is not None
        seen_many |= allowed is None
        assert allowed is None or allowed.tolist() == sorted(masked)
        assert token in masked
        person.accept(token)
    assert seen_few and seen_many


def test_a_forbidden_token_ends_the_constraint_with_an_error(
    smollm2_vocabulary: Vocabulary, person: Constraint
) -> None:
    (bracket,) = tokens_of(smollm2_vocabulary, "[")
    with pytest.raises(ConstraintFailed):
        person.accept(bracket)


def test_copies_go_their_own_ways(smollm2_vocabulary: Vocabulary, person: Constraint) -> None:
    assert takes(smollm2_vocabulary, person, '{"name": "A') is None
    other = person.copy()
    assert takes(smollm2_vocabulary, person, 'da", "age": 1}') is None
    assert takes(smollm2_vocabulary, other, 'lan", "age": 2') is None
    assert may_end(smollm2_vocabulary, person) and not allowed_tokens(smollm2_vocabulary, other) <= set(
        smollm2_vocabulary.end_tokens
    )


def test_the_place_is_found_again_by_replaying_the_tokens(smollm2_vocabulary: Vocabulary, person: Constraint) -> None:
    tokens = tokens_of(smollm2_vocabulary, '{"name": "Ada", "age": 3')
    for token in tokens:
        person.accept(token)
    elsewhere = ConstraintCompiler(smollm2_vocabulary).compile(person.spec)
    elsewhere.accept(tokens[0])
    elsewhere.replay(tokens)
    assert allowed_tokens(smollm2_vocabulary, elsewhere) == allowed_tokens(smollm2_vocabulary, person)


def test_a_seed_repeats_and_choices_differ(smollm2_vocabulary: Vocabulary, compiler: ConstraintCompiler) -> None:
    driver = Driver(smollm2_vocabulary)

    def answer(seed: int) -> str:
        constraint = compiler.compile(spec_of(json_schema=PERSON))
        return driver.answer(constraint, seed, random_tokens=10, most_tokens=300)[0]

    assert answer(1) == answer(1) != answer(2)


def test_the_mask_has_the_last_word_over_biases(smollm2_vocabulary: Vocabulary, compiler: ConstraintCompiler) -> None:
    (letter,) = tokens_of(smollm2_vocabulary, "x")
    (brace,) = tokens_of(smollm2_vocabulary, "{")
    driver = Driver(smollm2_vocabulary, SamplingParams(temperature=0, logit_bias=((letter, 1000.0), (brace, -50.0))))
    text, ended = driver.answer(
        compiler.compile(spec_of(json_schema={"type": "object", "maxProperties": 0})), 0, random_tokens=9, most_tokens=9
    )
    assert (text, ended) == ("{}", True)


def test_a_ban_on_end_tokens_cannot_carry_an_answer_on(
    smollm2_vocabulary: Vocabulary, compiler: ConstraintCompiler
) -> None:
    banned = tuple((token, float("-inf")) for token in sorted(smollm2_vocabulary.end_tokens))
    driver = Driver(smollm2_vocabulary, SamplingParams(temperature=1.0, logit_bias=banned))
    answer = driver.answer(compiler.compile(spec_of(regex="ab")), 0, random_tokens=9, most_tokens=9)
    assert answer == ("ab", True)


def test_a_ban_on_all_that_is_allowed_ends_with_an_error(
    smollm2_vocabulary: Vocabulary, compiler: ConstraintCompiler
) -> None:
    banned = tuple((token, float("-inf")) for token, piece in enumerate(smollm2_vocabulary.pieces) if piece[:1] == b"a")
    driver = Driver(smollm2_vocabulary, SamplingParams(temperature=0, logit_bias=banned))
    with pytest.raises(ConstraintFailed):
        driver.answer(compiler.compile(spec_of(regex="ab")), 0, random_tokens=9, most_tokens=9)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a": [1, {"b": null}], "c": "d"}'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": PERSON}}},
            '{"name": "x", "age": 1}',
        ),
        ({"response_format": {"type": "json_object", "schema": PERSON}}, '{"name": "x", "age": 1}'),
        ({"regex": r"a/b \d{2}[\n/]"}, "a/b 12\n"),
        ({"guided_regex": "(yes|no)"}, "no"),
        ({"grammar": 'root ::= "caf\\u00e9" ws [0-9]{1,3}\nws ::= [ \\t]*'}, "café 123"),
        ({"grammar": 'root ::= answer+\nanswer ::= "a" | "(" answer ")"'}, "a((a))a"),
    ],
    ids=["json_object", "json_schema", "llama-server's schema", "regex", "guided_regex", "GBNF", "recursive GBNF"],
)
def test_each_field_constrains(
    smollm2_vocabulary: Vocabulary, compiler: ConstraintCompiler, fields: dict[str, Any], text: str
) -> None:
    constraint = compiler.compile(spec_of(**fields))
    assert takes(smollm2_vocabulary, constraint, text) is None
    assert may_end(smollm2_vocabulary, constraint)
    assert takes(smollm2_vocabulary, compiler.compile(spec_of(**fields)), "Sure! Here") is not None


def test_the_form_begins_behind_reasoning_that_the_prompt_opened(
    smollm2_vocabulary: Vocabulary, compiler: ConstraintCompiler
) -> None:
    spec = spec_of(chat_prompt(opens_thought=True), response_format={"type": "json_object"})
    constraint = compiler.compile(spec)
    assert takes(smollm2_vocabulary, constraint, "Let me see: {x}. </thinker>") is None
    assert not may_end(smollm2_vocabulary, constraint)
    assert takes(smollm2_vocabulary, constraint, "</think>\n\n") is None
    assert takes(smollm2_vocabulary, constraint.copy(), "x") is not None
    assert takes(smollm2_vocabulary, constraint, '{"a": 1}') is None
    assert may_end(smollm2_vocabulary, constraint)


def test_equal_forms_are_compiled_once(compiler: ConstraintCompiler) -> None:
    first = compiler._cached.copy()
    compiler.compile(spec_of(json_schema={**PERSON, "title": "fresh"}))
    compiler.compile(spec_of(json_schema={**PERSON, "title": "fresh"}))
    assert len(compiler._cached) == len(first) + 1


def test_what_was_compiled_lately_is_kept_within_bounds(compiler: ConstraintCompiler) -> None:
    for number in range(80):
        compiler.compile(spec_of(regex=f"a{{{number + 1}}}"))
    assert len(compiler._cached) == 64


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (
            {"type": "object", "properties": {"a": {"properties": {"b": {"format": "colour", "type": "string"}}}}},
            "/properties/a/properties/b",
        ),
        ({"type": "array", "items": {"not": {"type": "null"}}}, "/items"),
        ({"anyOf": [{"type": "null"}, {"type": "string", "pattern": "(?=a)"}]}, "/anyOf/1"),
    ],
)
def test_a_refusal_says_where(compiler: ConstraintCompiler, schema: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        compiler.compile(
            spec_of(response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}})
        )
    assert refused.value.param == "response_format.json_schema.schema"
    assert f"schema: {place}: " in refused.value.message


def test_not_strict_leaves_out_what_cannot_be_enforced(
    smollm2_vocabulary: Vocabulary, compiler: ConstraintCompiler
) -> None:
    schema = {
        "type": "array",
        "uniqueItems": True,
        "items": {"type": "string", "format": "colour", "pattern": "^(?!x)"},
    }
    described = {"name": "n", "strict": False, "schema": schema}
    constraint = compiler.compile(spec_of(response_format={"type": "json_schema", "json_schema": described}))
    assert takes(smollm2_vocabulary, constraint, json.dumps(["x", "x"])) is None
