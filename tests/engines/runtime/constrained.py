"""Drives a constraint with random logits through the real sampler, and then towards an end."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from engines.api_body import validated
from engines.api_constraint import ConstraintSpec, constraint_spec
from engines.api_schema import ChatRequest
from engines.runtime.chat import Prompt
from engines.runtime.constraint import Constraint
from engines.runtime.llama import Llama, Vocabulary
from engines.runtime.sampler import Sampler, SamplingParams

# What closes open JSON, or brings a text nearer to what a pattern of the tests asks for.
_CLOSING = {b'"': 6.0, b"}": 8.0, b"]": 8.0, b'"}': 5.0, b'"]': 5.0, b"0": 4.0, b"x": 4.0, b"12": 4.0, b"a": 3.0}
_RANDOM = SamplingParams(temperature=1.0, top_k=40, top_p=1.0, min_p=0.0)


def chat_request(**fields: Any) -> ChatRequest:
    return validated(ChatRequest, {"messages": [{"role": "user", "content": "hi"}], **fields})


def chat_prompt(*, opens_thought: bool = False, tool_format: Any = "hermes_json") -> Prompt:
    return Prompt([1], [], opens_thought=opens_thought, tool_format=tool_format)


def spec_of(prompt: Prompt | None = None, **fields: Any) -> ConstraintSpec:
    spec = constraint_spec(chat_request(**fields), prompt)
    assert spec is not None
    return spec


class MarkedVocabulary(Vocabulary):
    """A real vocabulary, of which the last tokens are marks instead, as models have them that were trained to think and call."""

    MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")

    def __init__(self, real: Vocabulary) -> None:
        self.__dict__.update(real.__dict__)
        first = real.size - len(self.MARKS)
        self.marks = {mark: first + place for place, mark in enumerate(self.MARKS)}
        self.pieces = [*real.pieces[:first], *(mark.encode() for mark in self.MARKS)]

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        tokens: list[int] = []
        for part in re.split("(" + "|".join(self.MARKS) + ")", text):
            tokens += (
                [self.marks[part]]
                if part in self.marks
                else super().tokenize(part, add_special=add_special, parse_special=parse_special)
            )
        return tokens


class Driver:
    """Random answers of one vocabulary. A seed means one answer."""

    def __init__(self, vocabulary: Vocabulary, params: SamplingParams = _RANDOM) -> None:
        self.vocabulary = vocabulary
        self._params = params
        # Drawing so much noise anew for every token would take most of the time.
        self._noise = np.random.default_rng(0).normal(0, 2, vocabulary.size * 4).astype(np.float32)
        self._closing = np.array(
            [3 * _CLOSING.get(piece, -0.01 * len(piece)) for piece in vocabulary.pieces], np.float32
        )
        self._closing[sorted(vocabulary.end_tokens)] = 100

    def answer(self, constraint: Constraint, seed: int, *, random_tokens: int, most_tokens: int) -> tuple[str, bool]:
        """The text, and whether it ended by itself within `most_tokens`; from `random_tokens` on it is led to an end."""
        llama = cast(Llama, SimpleNamespace(vocabulary=self.vocabulary))
        sampler = Sampler(self._params, llama, constraint)
        tokens: list[int] = []
        offsets = np.random.default_rng(seed)
        try:
            while len(tokens) < most_tokens:
                start = int(offsets.integers(0, self._noise.size - self.vocabulary.size))
                logits = self._noise[start : start + self.vocabulary.size].copy()
                if len(tokens) >= random_tokens:
                    logits += self._closing
                token, _ = sampler.draw_from_logits(logits)
                if token in self.vocabulary.end_tokens:
                    return self.text(tokens), True
                tokens.append(token)
        finally:
            sampler.close()
        return self.text(tokens), False

    def text(self, tokens: list[int]) -> str:
        return b"".join(self.vocabulary.pieces[token] for token in tokens).decode("utf-8", "replace")


def takes(vocabulary: Vocabulary, constraint: Constraint, text: str) -> str | None:
    """The piece of `text` that the constraint refuses first, None if it takes all of it."""
    row = np.empty(vocabulary.size, dtype=np.float32)
    for token in vocabulary.tokenize(text, add_special=False, parse_special=False):
        row[:] = 0
        constraint.mask(row)
        if row[token] != 0:
            return vocabulary.pieces[token].decode("utf-8", "replace")
        constraint.accept(token)
    return None


def may_end(vocabulary: Vocabulary, constraint: Constraint) -> bool:
    row = np.zeros(vocabulary.size, dtype=np.float32)
    constraint.mask(row)
    return bool((row[sorted(vocabulary.end_tokens)] == 0).any())
