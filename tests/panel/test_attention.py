"""What of a host wants a look."""

from __future__ import annotations

import dataclasses

from hydra_site.attention import host_warnings
from hydra_site.pool_snapshot import attention_of
from pools.services import GpuView, HostView
from tests.panel.test_pool_snapshot import HOST, NOW

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
