"""Answers to random JSON schemas, drawn from noise, held against a validator of its own."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from jsonschema import Draft202012Validator, FormatChecker

from engines.errors import InvalidRequest
from engines.runtime.constraint import ConstraintCompiler
from engines.runtime.llama import Vocabulary
from tests.engines.runtime.constrained import Driver, spec_of
from tests.engines.runtime.json_schemas import schemas

RANDOM_TOKENS, MOST_TOKENS = 40, 1500
_FORMATS = FormatChecker(("email", "ipv4", "ipv6", "uuid"))
_DATE = re.compile(r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])")


@_FORMATS.checks("date")
def _is_date(value: object) -> bool:
    """By its form alone: a grammar knows no leap years, and Python no year 0."""
    return not isinstance(value, str) or _DATE.fullmatch(value) is not None


@pytest.fixture(scope="module")
def compiler(smollm2_vocabulary: Vocabulary) -> ConstraintCompiler:
    return ConstraintCompiler(smollm2_vocabulary)


def check_random_schemas(vocabulary: Vocabulary, compiler: ConstraintCompiler, count: int) -> Counter[str]:
    """What became of `count` schemas. Fails on the first answer that its schema does not allow."""
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
    @given(schemas())
    def check(schema: dict[str, Any]) -> None:
        try:
            constraint = compiler.compile(spec_of(json_schema=schema))
        except InvalidRequest as error:
            assert error.param == "json_schema"
            outcomes["refused"] += 1
            return
        text, ended = driver.answer(
            constraint, sum(outcomes.values()), random_tokens=RANDOM_TOKENS, most_tokens=MOST_TOKENS
        )
        if not ended:
            outcomes["cut"] += 1
            return
        problems = [
            error.message
            for error in Draft202012Validator(schema, format_checker=_FORMATS).iter_errors(json.loads(text))
        ]
        assert not problems, (problems, text, schema)
        outcomes["valid"] += 1

    check()
    return outcomes


def test_answers_to_random_schemas_are_valid(smollm2_vocabulary: Vocabulary, compiler: ConstraintCompiler) -> None:
    outcomes = check_random_schemas(smollm2_vocabulary, compiler, 200)
    assert outcomes["valid"] > 120 and outcomes["cut"] < 10, outcomes


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_answers_to_thousands_of_schemas_are_valid(
    smollm2_vocabulary: Vocabulary, compiler: ConstraintCompiler
) -> None:
    outcomes = check_random_schemas(smollm2_vocabulary, compiler, 5000)
    assert outcomes["valid"] > 3000 and outcomes["cut"] < 250, outcomes
