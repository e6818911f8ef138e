"""What of a host wants a look."""

from __future__ import annotations

import dataclasses
from datetime import timedelta

from hydra_site.attention import build_warnings, host_warnings
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
