"""Who comes first in the line: by tenant, by priority within it, by owner, by arrival."""

from __future__ import annotations

import time

from engines.runtime.generation import Generation
from engines.runtime.waiting import WaitingLine
from tests.engines.runtime.test_core import generation


def asked(name: str, tenant: str, **fields: object) -> Generation:
    made = generation([1], **fields)  # type: ignore[arg-type]
    made.request_id, made.tenant = name, tenant
    made.queued_at = time.monotonic()
    return made


def order(waiting: list[Generation], running: list[Generation]) -> list[str]:
    line = WaitingLine(100)
    line.put(waiting, 0)
    return [one.request_id for one in line.in_order(line.turns(running))]


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
    turns, began = line.turns([]), []
    for one in line.in_order(turns):
        turns.began(one)
        began.append(one.request_id)
    assert began == ["burst 0", "late", "burst 1", "burst 2"]


def served_one_by_one(line: WaitingLine, arriving: dict[int, Generation]) -> list[str]:
    """Who begins where one runs at a time; `arriving` come to the line when so many have begun."""
    began: list[str] = []
    while True:
        if (late := arriving.get(len(began))) is not None:
            late.queued_at = time.monotonic()
            line.put([late], 0)
        turns = line.turns([])
        first = next(line.in_order(turns), None)
        if first is None:
            return began
        turns.began(first)
        line.begin(first)
        first.started_at = time.monotonic()
        began.append(first.request_id)


def test_one_slot_is_shared_in_turns_however_large_a_crowd() -> None:
    """A word of the crowd does not change that, and whoever comes back later is not held up by those who are new."""
    for crowd, other in (("a", "b"), ("a", "a")):
        line = WaitingLine(100)
        line.put([asked(f"crowd {n}", crowd, owner="x", priority=0 if other == crowd else -9) for n in range(5)], 0)
        late = [asked(f"late {n}", other, owner="y") for n in range(2)]
        assert served_one_by_one(line, {2: late[0], 3: late[1]}) == [
            "crowd 0",
            "crowd 1",
            "crowd 2",
            "late 0",
            "crowd 3",
            "late 1",
            "crowd 4",
        ]


def test_newcomers_never_pass_whoever_came_before_them() -> None:
    line = WaitingLine(100)
    line.put([asked("known 0", "a", owner="known"), asked("known 1", "a", owner="known")], 0)
    newcomers = {count: asked(f"new {count}", "a", owner=f"new {count}") for count in range(1, 5)}
    assert served_one_by_one(line, newcomers) == ["known 0", "known 1", "new 1", "new 2", "new 3", "new 4"]


def test_who_had_to_give_way_had_its_turn() -> None:
    line = WaitingLine(100)
    back, mate = asked("back", "a", owner="x"), asked("mate", "a", owner="x")
    other = asked("other", "b")
    line.put([back, mate, other], 0)
    line.begin(back)
    back.started_at = time.monotonic()
    line.put_back(back)
    assert [one.request_id for one in line.in_order(line.turns([]))] == ["back", "other", "mate"]
    line.begin(back)
    assert [one.request_id for one in line.in_order(line.turns([]))] == ["other", "mate"]
    line.begin(other)
    other.started_at = time.monotonic()
    line.begin(mate)
    assert not line._began
