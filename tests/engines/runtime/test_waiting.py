"""Who comes first in the line: by tenant, by priority within it, by owner, by arrival."""

from __future__ import annotations

import time

from engines.runtime.generation import Generation
from engines.runtime.waiting import Turns, WaitingLine
from tests.engines.runtime.test_core import generation


def asked(name: str, tenant: str, **fields: object) -> Generation:
    made = generation([1], **fields)  # type: ignore[arg-type]
    made.request_id, made.tenant = name, tenant
    made.queued_at = time.monotonic()
    return made


def order(waiting: list[Generation], running: list[Generation]) -> list[str]:
    line = WaitingLine(100)
    line.put(waiting, 0)
    return [one.request_id for one in line.in_order(Turns(running))]


def test_no_priority_and_no_name_gets_a_request_past_another_tenant() -> None:
    greedy = [asked(f"greedy {n}", "a", owner=f"user {n}", priority=-100) for n in range(3)]
    modest = asked("modest", "b")
    assert order([*greedy[1:], modest], [greedy[0]]) == ["modest", "greedy 1", "greedy 2"]


def test_who_gives_way_gives_way_to_all() -> None:
    batch, chat = asked("batch", "a", priority=10), asked("chat", "b")
    assert order([batch, chat], [asked("runs", "b"), asked("runs", "b")]) == ["chat", "batch"]


def test_within_a_tenant_urgency_then_the_owner_that_runs_least_then_arrival() -> None:
    first, second = asked("first", "a", owner="x"), asked("second", "a", owner="x")
    other, urgent = asked("other", "a", owner="y"), asked("urgent", "a", owner="x", priority=-1)
    assert order([first, second, other, urgent], [asked("runs", "a", owner="x")]) == [
        "urgent",
        "other",
        "first",
        "second",
    ]


def test_one_name_of_two_tenants_is_two_owners() -> None:
    mine, theirs = asked("mine", "a", owner="user"), asked("theirs", "b", owner="user")
    assert order([mine, theirs], [asked("runs", "a", owner="user")]) == ["theirs", "mine"]


def test_who_begins_in_a_turn_counts_for_those_behind() -> None:
    line = WaitingLine(100)
    line.put([*(asked(f"burst {n}", "a") for n in range(3)), asked("late", "b")], 0)
    turns, began = Turns([]), []
    for one in line.in_order(turns):
        turns.began(one)
        began.append(one.request_id)
    assert began == ["burst 0", "late", "burst 1", "burst 2"]
