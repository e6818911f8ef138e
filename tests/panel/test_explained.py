"""How the router's explanation becomes rows and bars."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import Any

from hydra_site.explained import bar, explained
from sessions.services import TurnView

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def a_turn(explanation: dict[str, Any] | None, **values: Any) -> TurnView:
    fields = {
        "request_id": uuid.uuid4(), "state": "done", "engine_name": "a", "route": "solo", "is_background": False,
        "started_at": NOW, "prompt_tokens": 9, "cached_tokens": 7, "completion_tokens": 2, "queue_s": 0.5,
        "first_token_s": 2.0, "predicted_first_token_s": 1.5, "duration_s": 5.0, "error_code": "",
        "explanation": explanation,
    }  # fmt: skip
    return TurnView(**{**fields, **values})


def a_candidate(mode: str, cost_s: float, **terms: float) -> dict[str, Any]:
    return {"engine": "a", "mode": mode, "cost_s": cost_s, "cached_tokens": 7, "terms": terms}


def test_of_two_forms_of_one_engine_only_the_chosen_one_is_marked() -> None:
    solo, pd = (
        a_candidate("solo", 4.0, prefill_s=4.0),
        a_candidate("pd", 10.0, restore_s=2.5, decode_s=7.5, queue_s=0.0),
    )
    entry = explained(a_turn({"why": "w", "chosen": solo, "candidates": [solo, pd], "refusals": []}))
    assert [(choice.is_chosen, choice.dearer_s) for choice in entry.choices] == [(True, None), (False, 6.0)]
    assert [(part.name, part.x, part.width) for part in entry.choices[1].parts] == [
        ("restore", "0.00%", "25.00%"),
        ("decode", "25.00%", "75.00%"),
    ]
    assert [(part.name, part.x, part.width) for part in entry.happened] == [
        ("queue", "0.00%", "5.00%"),
        ("reading", "5.00%", "15.00%"),
        ("writing", "20.00%", "30.00%"),
    ]


def test_what_was_not_kept_or_has_not_happened_is_left_out() -> None:
    entry = explained(a_turn(None, first_token_s=None, duration_s=None))
    assert (entry.why, entry.choices, entry.refusals, entry.happened) == ("", (), (), ())
    assert entry.guessed_prompt_tokens is None


def test_nothing_could_be_chosen() -> None:
    refusal = {"engine": "a", "mode": "solo", "reason": "its waiting line is full", "detail": ""}
    entry = explained(a_turn({"why": "no engine can take it", "chosen": None, "candidates": [], "refusals": [refusal]}))
    assert entry.refusals == (refusal,)


def test_a_bar_without_any_length_is_no_error() -> None:
    assert [part.width for part in bar([("queue", 0.0)], 0.0)] == ["0.00%"]


def test_what_came_stands_under_the_names_of_what_was_expected() -> None:
    solo = a_candidate("solo", 4.0, queue_s=1.0, prefill_s=3.0)
    came = {"fixed_s": 0.5, "decode_s": 1.0, "queue_s": 1.5, "restore_s": 0.0, "prefill_s": 2.0}
    entry = explained(a_turn({"chosen": solo, "candidates": [solo], "refusals": [], "came": came}, duration_s=5.0))
    assert [(part.name, part.seconds) for part in entry.happened] == [
        ("queue", 1.5), ("fixed", 0.5), ("prefill", 2.0), ("decode", 1.0),
    ]  # fmt: skip


def test_a_split_tells_how_it_stands_and_no_more_than_is_known() -> None:
    plan = {"split": {"prefill": "a", "decode": "b", "state": "running"}}
    running = explained(a_turn(plan, state="running")).split
    assert running is not None
    assert (running.prefill, running.decode, running.runs, running.fell_back) == ("a", "b", True, "")
    lost = explained(a_turn(plan, state="failed")).split
    assert lost is not None
    assert (lost.runs, lost.fell_back) == (False, "nobody knows what came of it")
