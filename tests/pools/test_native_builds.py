"""What a start of a host asks for by itself: each build once, as a job that everybody sees."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from engines import launch
from hydra_site.native_builds import ask_for_builds
from native import toolkits
from pools import job_runner, jobs, services, tasks
from pools.choices import JobKind
from pools.models import Job
from tests.engines.test_renewal import CARD
from tests.native.small_source import write_pinned_source
from tests.native.test_build_request import write_tool
from tests.native.test_toolkits import CUDA_13
from tests.rows import CPU, HOST

pytestmark = pytest.mark.django_db


@pytest.fixture
def home(tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    settings.HYDRA_HOME = tmp_path
    settings.HYDRA_HOST_NAME = "here"
    services.record_probe("here", HOST, [CPU])
    monkeypatch.setenv("HYDRA_NATIVE_BUILDS", "auto")
    monkeypatch.setattr(job_runner, "BUILD_NICENESS", 0)  # else it waits for the tests beside it
    monkeypatch.delenv("LLAMA_CPP_LIB_PATH", raising=False)
    return tmp_path


def subjects() -> list[str]:
    assert set(Job.objects.values_list("kind", flat=True)) <= {JobKind.BUILD}
    return sorted(Job.objects.values_list("subject", flat=True))


def test_a_first_start_gets_a_library_for_its_cpu_and_later_ones_ask_for_nothing(home: Path) -> None:
    write_pinned_source(home)
    (told,) = ask_for_builds("here", home, [CPU])
    (job,) = jobs.job_views("here", only_open=True)
    assert (job.subject, f"job {job.id}" in told) == ("cpu", True)
    assert ask_for_builds("here", home, [CPU]) == []
    tasks.run_job(job.id)
    (job,) = jobs.job_views("here")
    assert job.state == "done", job.message
    assert launch.library_environment(home, "") == {"LLAMA_CPP_LIB_PATH": job.result["library"]}
    assert ask_for_builds("here", home, [CPU]) == []
    assert subjects() == ["cpu"]


def test_a_build_that_failed_is_tried_again_only_when_somebody_asks_or_the_tools_are_others(
    home: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask_for_builds("here", home, [CPU])
    Job.objects.update(state="failed", message="no room")
    assert ask_for_builds("here", home, [CPU]) == []
    assert [build.message for build in jobs.ended_builds()] == ["no room"]
    jobs.enqueue("here", JobKind.BUILD, "cpu")
    assert subjects() == ["cpu", "cpu"]
    assert jobs.ended_builds() == (), "the newer one is not over"
    Job.objects.update(state="cancelled")
    assert ask_for_builds("here", home, [CPU]) == []
    tools = tmp_path_factory.mktemp("tools")
    write_tool(tools, "another-c++", "another compiler")
    monkeypatch.setenv("CXX", str(tools / "another-c++"))
    assert len(ask_for_builds("here", home, [CPU])) == 1


def test_cards_get_one_library_together_and_one_that_nobody_can_build_for_none(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [dataclasses.replace(CARD, index=index, arch=arch) for index, arch in ((1, "sm_60"), (2, "sm_20"))]
    monkeypatch.setattr(toolkits, "find_toolkits", lambda *_: [])
    of_cards, of_cpu = ask_for_builds("here", home, [CPU, CARD, *others])
    assert "sm_60 (Tesla P100) needs CUDA 8.0 to 12.9; here is no toolkit" in of_cards
    assert "is being built for cpu" in of_cpu
    assert subjects() == ["cpu", "sm_60 sm_86"]
    # Without a toolkit the job says what is needed, and does not come again by itself.
    build = jobs.newest_build("here", "sm_86")
    assert (
        build is not None and build == jobs.newest_build("here", "sm_60") and jobs.newest_build("here", "sm_8") is None
    )


def test_a_card_without_a_toolkit_keeps_no_other_one_waiting(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolkits, "find_toolkits", lambda *_: [CUDA_13])
    old = dataclasses.replace(CARD, index=1, arch="sm_60")
    told = ask_for_builds("here", home, [CPU, CARD, old])
    assert [line.split(" (job")[0] for line in told] == [
        "llama.cpp is being built for sm_86 in the background",
        "llama.cpp cannot be built for sm_60",
        "llama.cpp is being built for cpu in the background",
    ]
    assert subjects() == ["cpu", "sm_60", "sm_86"]


def test_who_wants_none_or_has_chosen_a_library_is_left_alone(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", "/somewhere")
    assert ask_for_builds("here", home, [CPU]) == []
    monkeypatch.delenv("LLAMA_CPP_LIB_PATH")
    monkeypatch.setenv("HYDRA_NATIVE_BUILDS", "off")
    assert ask_for_builds("here", home, [CPU]) == []
    assert subjects() == []


def test_without_a_compiler_nothing_is_asked_for_and_the_reason_told(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    (told,) = ask_for_builds("here", home, [CPU])
    assert "no C++ compiler" in told and "apt install build-essential" in told
    assert subjects() == []
