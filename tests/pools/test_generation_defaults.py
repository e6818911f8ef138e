"""A model's own defaults: only known keys within bounds, kept as short as possible."""

from typing import Any

import pytest

from pools.catalogue import lookup
from pools.generation_defaults import GenerationDefaults


def test_only_what_differs_is_kept_and_comes_back() -> None:
    defaults = GenerationDefaults(max_tokens=512, temperature=0.2)
    assert defaults.as_dict() == {"max_tokens": 512, "temperature": 0.2}
    assert GenerationDefaults.from_dict(defaults.as_dict()) == defaults
    assert GenerationDefaults.from_dict({}) == GenerationDefaults()


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"temprature": 1}, "temprature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 5.1}, "between 0 and 5"),
        ({"top_k": 1.5}, "whole number"),
        ({"max_tokens": -1}, "max_tokens"),
    ],
)
def test_what_cannot_be_used_is_named(values: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        GenerationDefaults.from_dict(values)


def test_the_small_default_model_does_not_talk_for_minutes() -> None:
    assert 0 < lookup("smollm2-135m").defaults.max_tokens <= 1024
