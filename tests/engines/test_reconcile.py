"""What reconcile decides, row by row. Pure: no database, no clock."""

from __future__ import annotations

from typing import Any

import pytest

from engines.reconcile import (
    COMMAND_EXPIRES_S,
    LAUNCH_DEADLINE_S,
    LOAD_DEADLINE_S,
    LONGEST_BACKOFF_S,
    MAX_RESTARTS,
    STEADY_S,
    STOP_DEADLINE_S,
    UNHEALTHY_DEADLINE_S,
    EngineFacts,
    Step,
    backoff_s,
    decide,
)


def facts(**changed: Any) -> EngineFacts:
    values: dict[str, Any] = {
        "wanted": "running",
        "state": "ready",
        "host_lost": False,
        "has_process": True,
        "state_age_s": 1.0,
        "commanded_age_s": None,
        "restarts": 0,
    }
    return EngineFacts(**{**values, **changed})


def test_it_leaves_an_engine_alone_that_is_as_wanted() -> None:
    assert decide(facts()) is None
    assert decide(facts(wanted="stopped", state="stopped", has_process=False)) is None
    assert decide(facts(wanted="stopped", state="failed", has_process=False)) is None


def test_it_starts_what_is_wanted_and_stopped() -> None:
    assert decide(facts(state="stopped")) is Step.START


def test_it_stops_what_is_not_wanted_in_every_running_state() -> None:
    for state in ("starting", "ready", "unhealthy"):
        assert decide(facts(wanted="stopped", state=state)) is Step.STOP


@pytest.mark.parametrize(
    ("wanted", "state", "step"), [("running", "stopped", Step.START), ("stopped", "ready", Step.STOP)]
)
def test_it_does_not_repeat_a_command_that_may_still_run(wanted: str, state: str, step: Step) -> None:
    assert decide(facts(wanted=wanted, state=state, commanded_age_s=COMMAND_EXPIRES_S - 1)) is None
    assert decide(facts(wanted=wanted, state=state, commanded_age_s=COMMAND_EXPIRES_S + 1)) is step


def test_the_first_failure_is_repaired_at_once_and_later_ones_after_longer_and_longer_waits() -> None:
    assert decide(facts(state="failed", restarts=1, state_age_s=0)) is Step.START
    assert decide(facts(state="failed", restarts=3, state_age_s=backoff_s(3) - 0.1)) is None
    assert decide(facts(state="failed", restarts=3, state_age_s=backoff_s(3))) is Step.START
    waits = [backoff_s(restarts) for restarts in range(1, 20)]
    assert waits == sorted(waits)
    assert waits[-1] == LONGEST_BACKOFF_S


def test_it_gives_up_on_an_engine_that_fails_again_and_again() -> None:
    assert decide(facts(state="failed", restarts=MAX_RESTARTS, state_age_s=9e9)) is Step.START
    assert decide(facts(state="failed", restarts=MAX_RESTARTS + 1, state_age_s=9e9)) is None


def test_failures_are_forgiven_once_an_engine_runs_steadily() -> None:
    assert decide(facts(restarts=2, state_age_s=STEADY_S - 1)) is None
    assert decide(facts(restarts=2, state_age_s=STEADY_S + 1)) is Step.STEADY


def test_a_start_that_never_made_a_process_is_given_up() -> None:
    assert decide(facts(state="starting", has_process=False, state_age_s=LAUNCH_DEADLINE_S - 1)) is None
    assert decide(facts(state="starting", has_process=False, state_age_s=LAUNCH_DEADLINE_S + 1)) is Step.FAIL_LAUNCH


def test_a_slow_load_has_minutes_and_not_more() -> None:
    assert decide(facts(state="starting", state_age_s=LOAD_DEADLINE_S - 1)) is None
    assert decide(facts(state="starting", state_age_s=LOAD_DEADLINE_S + 1)) is Step.FAIL_LOAD
    # 25 GB from a disk that gives 40 MB a second.
    assert decide(facts(state="starting", state_age_s=LOAD_DEADLINE_S + 625, weights_bytes=25 * 10**9)) is None
    assert (
        decide(facts(state="starting", state_age_s=LOAD_DEADLINE_S + 1251, weights_bytes=25 * 10**9)) is Step.FAIL_LOAD
    )


def test_a_silent_engine_is_given_up() -> None:
    assert decide(facts(state="unhealthy", state_age_s=UNHEALTHY_DEADLINE_S - 1)) is None
    assert decide(facts(state="unhealthy", state_age_s=UNHEALTHY_DEADLINE_S + 1)) is Step.FAIL_SILENT


def test_a_stop_that_hangs_is_repeated_whatever_is_wanted_by_now() -> None:
    for wanted in ("running", "stopped"):
        assert decide(facts(wanted=wanted, state="stopping", state_age_s=STOP_DEADLINE_S - 1)) is None
        assert decide(facts(wanted=wanted, state="stopping", state_age_s=STOP_DEADLINE_S + 1)) is Step.STOP


def test_a_lost_host_gets_no_commands_and_its_engines_no_requests() -> None:
    assert decide(facts(host_lost=True, state="ready")) is Step.LOSE
    for state in ("stopped", "failed", "unhealthy", "stopping"):
        assert decide(facts(host_lost=True, state=state, state_age_s=9e9)) is None
