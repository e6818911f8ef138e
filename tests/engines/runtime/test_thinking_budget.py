"""Reasoning ends after its budget, never inside of a character or of the marker itself."""

from __future__ import annotations

import pytest

from engines.runtime.thinking_budget import ThinkingBudget

END = [7, 8, 9]


def observe(text: list[bytes], budget_tokens: int, *, opens_thought: bool = False) -> tuple[int, list[int]] | None:
    """After how many tokens which ones were forced."""
    budget = ThinkingBudget(budget_tokens, text, END, opens_thought=opens_thought)
    for token in range(len(text)):
        forced = budget.observe(token)
        if forced is not None:
            assert budget.over
            return token + 1, forced
    return None


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_reasoning_that_the_prompt_opened_ends_after_its_tokens(budget: int) -> None:
    assert observe([b"a", b" b", b" c", b" d"], budget, opens_thought=True) == (budget, END)


def test_reasoning_that_the_model_opens_counts_from_behind_its_marker() -> None:
    assert observe([b"\n", b"<think>", b"\n", b"a", b" b"], 2) == (4, END)
    assert observe([b"<th", b"ink>", b"a", b" b"], 1) == (3, END)
    assert observe([b"<think>", b"a"], 0) == (1, END)


def test_an_answer_without_reasoning_has_no_budget() -> None:
    assert observe([b"a", b" <think>", b"b", b"c"], 1) is None
    assert observe([b" " * 65, b"<think>", b"b", b"c"], 1) is None


def test_reasoning_that_ends_by_itself_is_left_alone() -> None:
    assert observe([b"a", b"</think>", b"b", b"c"], 2, opens_thought=True) is None
    assert observe([b"a", b"</", b"thi", b"nk>", b"b"], 2, opens_thought=True) is None


def test_what_only_began_like_the_end_is_waited_for_and_then_ended() -> None:
    assert observe([b"a", b"</thi", b"s", b"b"], 1, opens_thought=True) == (1, END)
    assert observe([b"a </thi", b"s", b"b"], 1, opens_thought=True) == (2, END)


def test_a_character_is_finished_first() -> None:
    parrot = "🦜".encode()
    assert observe([parrot[:1], parrot[1:3], parrot[3:], b"a"], 1, opens_thought=True) == (3, END)


def test_it_forces_once() -> None:
    budget = ThinkingBudget(1, [b"a"], END, opens_thought=True)
    assert budget.observe(0) == END
    assert budget.observe(0) is None
