"""Guesses about requests, bettered by each answer: tokens of a prompt by its bytes, and how long answers get. By model.

Only guesses: a process that has seen no answer yet goes by what is usual.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

MAX_MODELS = 256
GAIN = 0.1
USUAL_TOKENS_PER_BYTE = 0.25
USUAL_OUTPUT_TOKENS = 256.0
# Very short prompts are mostly the template's own tokens.
TEMPLATE_TOKENS = 12
TELLING_BYTES = 64
USUAL_ANSWERS = 3


@dataclass
class _Model:
    tokens_per_byte: float = USUAL_TOKENS_PER_BYTE
    output_tokens: float = USUAL_OUTPUT_TOKENS
    prompts: int = 0
    answers: int = 0


class Estimates:
    """Of one process."""

    def __init__(self) -> None:
        self._models: OrderedDict[str, _Model] = OrderedDict()

    def prompt_tokens(self, model: str, size_bytes: int) -> int:
        return TEMPLATE_TOKENS + int(size_bytes * self._of(model).tokens_per_byte)

    def output_tokens(self, model: str, most: int | None) -> int:
        """How many tokens an answer may be expected to have that is allowed `most` (None: no bound)."""
        usual = max(1, int(self._of(model).output_tokens))
        return usual if most is None else max(1, min(most, usual))

    def learn(self, model: str, size_bytes: int, prompt_tokens: int, completion_tokens: int) -> None:
        """An answer told what its prompt had and what it got."""
        known = self._of(model)
        if size_bytes >= TELLING_BYTES and prompt_tokens > TEMPLATE_TOKENS:
            known.prompts += 1
            seen = (prompt_tokens - TEMPLATE_TOKENS) / size_bytes
            known.tokens_per_byte += max(GAIN, 1 / known.prompts) * (seen - known.tokens_per_byte)
        if completion_tokens:
            known.answers += 1
            # What is usual counts as some answers: a single one must not decide.
            gain = max(GAIN, 1 / (known.answers + USUAL_ANSWERS))
            known.output_tokens += gain * (completion_tokens - known.output_tokens)

    def _of(self, model: str) -> _Model:
        known = self._models.get(model)
        if known is None:
            known = self._models[model] = _Model()
            if len(self._models) > MAX_MODELS:
                self._models.popitem(last=False)
        return known
