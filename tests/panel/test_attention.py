"""What of a host wants a look."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import Any

import pytest

from hydra_site.attention import build_warnings, host_warnings, is_waiting
from hydra_site.pool_snapshot import attention_of
from pools.jobs import JobView
from pools.services import GpuView, HostView
from tests.panel.test_pool_snapshot import ENGINE, HOST, NOW

CARD = GpuView(
    id=2,
    kind="cuda",
    index=0,
    name="A card",
    arch="sm_60",
    memory_total_bytes=16,
    memory_used_bytes=8,
    temperature_c=None,
    utilization_percent=None,
    power_w=None,
    last_seen_at=NOW,
)


def subjects(host: HostView) -> list[str]:
    return [warning.subject for warning in host_warnings(host)]


def test_a_host_like_this_site_on_time_and_with_sound_cards_is_quiet() -> None:
    assert subjects(dataclasses.replace(HOST, version="1", clock_offset_s=0.4, gpus=(CARD,))) == []


def test_another_release_and_worse_other_tables_are_told() -> None:
    (minor,) = host_warnings(dataclasses.replace(HOST, version="0.9", version_differs=True))
    (major,) = host_warnings(dataclasses.replace(HOST, version="0.9", version_differs=True, schema_differs=True))
    assert "0.9" in minor.message
    assert "tables differ" in major.message
    assert minor.hint and major.hint


def test_a_clock_that_is_off_is_told_with_its_direction() -> None:
    (warning,) = host_warnings(dataclasses.replace(HOST, clock_offset_s=-7.31))
    assert "-7.3 s" in warning.message
    assert "NTP" in warning.hint


def test_a_driver_speaks_for_its_cards_and_a_fallen_card_for_itself() -> None:
    gone = dataclasses.replace(CARD, problem="NVIDIA's driver is not loaded", problem_hint="Load it.")
    host = dataclasses.replace(HOST, problem=gone.problem, problem_hint=gone.problem_hint, gpus=(gone,))
    assert subjects(host) == ["Host atlas"]
    fallen = dataclasses.replace(CARD, problem="the card has fallen off the bus", problem_hint="Look for Xid.")
    (warning,) = host_warnings(dataclasses.replace(HOST, gpus=(CARD, fallen)))
    assert (warning.subject, warning.hint) == ("A card of atlas", "Look for Xid.")


def test_a_lost_host_has_one_trouble_and_a_retired_one_none() -> None:
    off = dataclasses.replace(HOST, state="lost", clock_offset_s=60.0)
    assert [one.severity for one in attention_of((off,), ())] == ["failure"]
    assert attention_of((dataclasses.replace(off, duty="retired"),), ()) == ()


WAITS = dataclasses.replace(
    ENGINE, state="failed", base_url=None, last_error="llama.cpp is being built for its card, which is sm_60 (job 1)"
)


def test_an_engine_that_waits_for_work_on_its_way_wants_nobodys_look_and_then_says_that_nothing_is_to_be_done() -> None:
    host, on_card = dataclasses.replace(HOST, gpus=(CARD,)), dataclasses.replace(WAITS, gpu_id=CARD.id)
    build = dataclasses.replace(BUILD, state="running", subject="sm_60 sm_86")
    assert is_waiting(on_card)
    assert attention_of((host,), (on_card,), work=(build,)) == ()
    fetched = dataclasses.replace(build, kind="download", subject="tiny")
    assert attention_of((host,), (on_card,), work=(fetched,)) == ()
    others = (dataclasses.replace(build, subject="cpu"), dataclasses.replace(build, host="boreas"))
    (warning,) = attention_of((host,), (on_card,), work=others)
    assert (warning.severity, warning.subject, warning.message) == ("warning", "Engine tiny-atlas", WAITS.last_error)
    assert warning.hint.startswith("It starts by itself")
    failed = dataclasses.replace(build, state="failed", message="no nvcc")
    assert [one.subject for one in attention_of((host,), (on_card,), builds=(failed,))] == [
        "llama.cpp for sm_60 sm_86 on atlas"
    ], "once is enough"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"restarts": 3},
            "started again by itself, 8 times at most; this was failure 3. Its log: engines/1/engine.log",
        ),
        ({"restarts": 9}, "not started again by itself"),
        ({"wanted": "stopped"}, "not started again by itself"),
    ],
)
def test_an_engine_that_failed_says_whether_it_is_tried_again(changes: dict[str, Any], said: str) -> None:
    failed = dataclasses.replace(WAITS, last_error="it ran out of memory", **changes)
    assert not is_waiting(failed)
    (failure,) = attention_of((HOST,), (failed,))
    assert (failure.severity, failure.message) == ("failure", "it ran out of memory")
    assert said in failure.hint


BUILD = JobView(
    id=1,
    host="atlas",
    kind="build",
    subject="cpu",
    name="",
    state="done",
    stage="",
    done=140,
    total=140,
    message="",
    hint="",
    result={"library": "/somewhere", "built": "in 300 s"},
    created_at=NOW - timedelta(hours=1),
    started_at=NOW - timedelta(hours=1),
    ended_at=NOW,
)


def test_a_build_that_failed_is_told_by_its_last_words_and_with_what_to_do() -> None:
    failed = dataclasses.replace(BUILD, state="failed", message="[3/140] Building\ncc1plus: killed\n", hint="--jobs 1")
    (warning,) = build_warnings((HOST,), (), (failed,))
    assert warning.subject == "llama.cpp for cpu on atlas"
    assert warning.message == "was not built: cc1plus: killed"
    assert warning.hint.startswith("--jobs 1 Ask for it again")
    assert list(build_warnings((), (), (failed,))) == [], "its host is gone"


def test_an_engine_that_runs_without_the_library_that_was_built_for_it_is_told_until_it_has_it() -> None:
    before = dataclasses.replace(ENGINE, gpu_id=None, ready_at=NOW - timedelta(minutes=5))
    (warning,) = build_warnings((HOST,), (before,), (BUILD,))
    assert warning.subject == f"Engine {ENGINE.name}"
    host = dataclasses.replace(HOST, gpus=(CARD,))
    on_card = dataclasses.replace(before, gpu_id=CARD.id)
    quiet = [
        (HOST, dataclasses.replace(before, ready_at=NOW + timedelta(seconds=1)), BUILD),
        (HOST, dataclasses.replace(before, state="draining"), BUILD),
        (HOST, before, dataclasses.replace(BUILD, result={"built": "before"})),
        (host, on_card, BUILD),
    ]
    assert [list(build_warnings((where,), (engine,), (build,))) for where, engine, build in quiet] == [[]] * 4
    assert len(list(build_warnings((host,), (on_card,), (dataclasses.replace(BUILD, subject="sm_60 sm_86"),)))) == 1
