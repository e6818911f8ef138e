"""Ends a model's reasoning after so many tokens, by putting the end marker's tokens into its mouth.

Knows no sampler: whoever takes tokens tells each to `observe`, and takes what that returns before drawing again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engines.api_schema import ChatRequest
from engines.runtime.chat import END_THINK, THINK, Prompt
from engines.runtime.llama import Vocabulary
from engines.runtime.text import StopMatcher, whole_characters

if TYPE_CHECKING:
    from engines.runtime.generation import Generation

_THINK = THINK.encode()
# Whitespace before a <think> that the model writes itself; more is none.
_MAX_BEFORE_BYTES = 64


@dataclass(frozen=True)
class BudgetTerms:
    """What a budget began with: `end_of_thought` are the tokens that end reasoning; `opens_thought` tells that the prompt began
    it already."""

    budget_tokens: int
    end_of_thought: tuple[int, ...]
    opens_thought: bool


class ThinkingBudget:
    """One generation's budget. `pieces` are the vocabulary's texts, `end_of_thought` the tokens that end reasoning;
    `opens_thought` tells that the prompt began the reasoning already. Tokens of markers do not count."""

    def __init__(
        self, budget_tokens: int, pieces: Sequence[bytes], end_of_thought: Sequence[int], *, opens_thought: bool
    ) -> None:
        self.terms = BudgetTerms(budget_tokens, tuple(end_of_thought), opens_thought)
        self._left_tokens = budget_tokens
        self._pieces = pieces
        self._end_of_thought = list(end_of_thought)
        self._end = StopMatcher(END_THINK.encode())
        self._before: bytearray | None = None if opens_thought else bytearray()
        self._tail = bytearray()
        self.over = not end_of_thought

    @classmethod
    def of(cls, request: ChatRequest, prompt: Prompt, vocabulary: Vocabulary) -> ThinkingBudget | None:
        """The budget that a request asks for, None if it asks for none."""
        if request.thinking_budget is None:
            return None
        return cls(
            request.thinking_budget, vocabulary.pieces, prompt.end_of_thought, opens_thought=prompt.opens_thought
        )

    @classmethod
    def on(cls, terms: BudgetTerms, pieces: Sequence[bytes]) -> ThinkingBudget:
        """A new one of the same terms."""
        return cls(terms.budget_tokens, pieces, terms.end_of_thought, opens_thought=terms.opens_thought)

    def observe(self, token: int) -> list[int] | None:
        """Tells of a token of the answer, forced ones included. Returns tokens that must follow it, or None.

        A character or an end marker that has begun is let out first, so that nothing is broken off in its middle.
        """
        if self.over:
            return None
        piece = self._pieces[token]
        if self._before is not None:
            return self._observe_before(piece)
        self._left_tokens -= 1
        for byte in piece:
            if self._end.feed(byte):
                self.over = True
                return None
        self._tail = (self._tail + piece)[-4:]
        return self._forced()

    def _observe_before(self, piece: bytes) -> list[int] | None:
        """Whether the model begins to reason at all shows in its first tokens."""
        assert self._before is not None
        self._before += piece
        begun = self._before.lstrip()
        if begun.startswith(_THINK):
            self._before = None
            return self._forced()
        self.over = not _THINK.startswith(begun) or len(self._before) > _MAX_BEFORE_BYTES
        return None

    def _forced(self) -> list[int] | None:
        if self._left_tokens > 0 or self._end.held or whole_characters(self._tail, len(self._tail)) < len(self._tail):
            return None
        self.over = True
        return self._end_of_thought


def spend_budget(generation: Generation, tokens: Sequence[int]) -> int:
    """Lets a generation's budget see tokens of its answer that were drawn elsewhere; returns how many of them were drawn, the
    others having been forced."""
    draws, budget = 0, generation.thinking_budget
    for token in tokens:
        if generation.forced:
            generation.forced.popleft()
            continue
        draws += 1
        if budget is not None:
            generation.forced.extend(budget.observe(token) or ())
    return draws
