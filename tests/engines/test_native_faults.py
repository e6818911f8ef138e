"""Engines that native code ends: which library their next start takes, and what their rows say."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import llama_cpp
import pytest

from engines import build_trust, detached, launch, native_faults, native_library, renewal, services, tasks
from engines.build_trust import Fault
from engines.config import EngineConfig
from engines.ending import fault_of
from engines.models import Engine
from engines.native_library import builds
from hydra_site.attention import build_warnings
from pools import jobs
from pools import services as pools
from pools.choices import JobKind, JobState
from pools.models import Job
from tests.engines.test_native_library import put
from tests.engines.test_renewal import library_of, nobody_asked_for, on_a_card, row, until
from tests.rows import add_engine, add_model
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db(transaction=True)

ROOT = Path(__file__).resolve().parent.parent.parent
WHEEL = Path(llama_cpp.__file__).parent / "lib"
ILLEGAL = "__builtin_trap();"
ASSERTS = 'fputs("ggml.c:7: GGML_ASSERT(n > 0) failed\\n", stderr); abort();'
NO_MEMORY = 'fputs("CUDA error: out of memory\\n", stderr); abort();'


@pytest.fixture
def engine(home: Path, tiny_model: Callable[..., SyntheticModel], monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.delenv(native_library.LIBRARY_VARIABLE, raising=False)
    return add_engine(add_model(tiny_model("llama").path, home / "models"))


def build(home: Path, key: str, day: int, statements: str = "", archs: tuple[str, ...] = ("cpu",)) -> Path:
    """The wheel's library as a build of this host; with `statements` in C it does these as soon as it is loaded."""
    library = put(home, key, archs, f"2026-11-{day:02}T00:00:00+00:00")
    for path in WHEEL.iterdir():
        (library / path.name).symlink_to(path)
    if statements:
        (library / "libllama.so").unlink()
        source = (
            f"#include <stdio.h>\n#include <stdlib.h>\n__attribute__((constructor)) void f(void) {{ {statements} }}\n"
        )
        command = ["c++", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library / "libllama.so")]
        subprocess.run(command, input=source.encode(), check=True)
    return library


def fail_to_start(engine: Engine) -> Engine:
    services.start(engine.pk)
    tasks.start_engine(engine.pk, row(engine).epoch)
    return until(engine, "failed")


def come_up(engine: Engine) -> Engine:
    services.start(engine.pk)
    tasks.start_engine(engine.pk, row(engine).epoch)
    return until(engine, "ready")


def crash(engine: Engine, number: signal.Signals) -> Engine:
    os.kill(row(engine).pid, number)
    return until(engine, "failed")


def marked(home: Path) -> list[str]:
    return [build.folder.name for build in builds(home) if build.trust.is_marked]


def test_a_library_that_crashes_as_it_is_loaded_is_given_up_for_the_one_before(engine: Engine, home: Path) -> None:
    old, new = build(home, "old", 1), build(home, "new", 2, ILLEGAL)
    first = fail_to_start(engine)
    assert first.last_error == "its process ended\nFatal Python error: Illegal instruction"
    assert (marked(home), launch.library_environment(home, "")) == ([], {"LLAMA_CPP_LIB_PATH": str(new)})
    second = fail_to_start(engine)
    assert "(build new) is not used for it any more: 2 native faults, the last SIGILL" in second.last_error
    assert second.last_error.endswith("its next start takes build old")
    assert marked(home) == ["new"]
    assert [(fault.engine, fault.signal) for fault in build_trust.read(new.parent).faults] == [
        (str(engine.pk), "SIGILL")
    ] * 2
    come_up(engine)
    assert library_of(engine, home) == str(old)
    nobody_asked_for(2 * renewal.IDLE_S, engine)
    assert renewal.renew_idle("here") == 0, "the newer one is not taken again"


def test_an_engine_that_runs_well_is_given_no_older_library(engine: Engine, home: Path) -> None:
    build(home, "old", 1)
    new = build(home, "new", 2)
    come_up(engine)
    for number in ("1", "2"):
        at = datetime.now(UTC).isoformat(timespec="seconds")
        build_trust.blame(new.parent, Fault(at, "SIGSEGV", "another", engine.variant.path, number))
    assert launch.library_environment(home, "", engine.variant.path) != {"LLAMA_CPP_LIB_PATH": str(new)}
    nobody_asked_for(2 * renewal.IDLE_S, engine)
    assert renewal.renew_idle("here") == 0


def test_on_a_processor_the_bindings_own_library_is_behind_all_builds(engine: Engine, home: Path) -> None:
    build(home, "only", 1, ASSERTS)
    for _ in range(2):
        failed = fail_to_start(engine)
    assert "GGML_ASSERT(n > 0) failed" in failed.last_error
    assert failed.last_error.endswith("its next start takes the bindings' own library")
    come_up(engine)
    assert library_of(engine, home) == ""
    # It crashes with that one, too, so that it is the model's fault: others go on with the build, this one does not.
    crash(engine, signal.SIGABRT)
    assert launch.library_environment(home, "") != {}
    assert launch.library_environment(home, "", row(engine).variant.path) == {}


def test_a_crash_soon_after_it_came_up_counts_and_a_later_one_does_not(engine: Engine, home: Path) -> None:
    build(home, "only", 1)
    come_up(engine)
    assert build_trust.read(builds(home)[0].folder).proven_by == (engine.variant.path,)
    Engine.objects.update(ready_at=row(engine).ready_at - timedelta(seconds=native_faults.SOON_S + 1))
    crash(engine, signal.SIGSEGV)
    for _ in range(2):
        assert marked(home) == []
        come_up(engine)
        crash(engine, signal.SIGSEGV)
    assert marked(home) == ["only"]


def test_other_ends_say_nothing_about_the_library(engine: Engine, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(home, "only", 1)
    come_up(engine)
    crash(engine, signal.SIGKILL)
    come_up(engine)
    crash(engine, signal.SIGTERM)
    path = Path(engine.variant.path)
    content = path.read_bytes()
    path.write_bytes(content[:100])
    fail_to_start(engine)
    path.write_bytes(content)
    assert build_trust.read(builds(home)[0].folder).faults == ()
    # Somebody chose a library for all engines of this head: nobody here answers for it.
    chosen = build(home / "elsewhere", "chosen", 1, ILLEGAL)
    monkeypatch.setenv(native_library.LIBRARY_VARIABLE, str(chosen))
    for _ in range(2):
        assert fail_to_start(engine).last_error == "its process ended\nFatal Python error: Illegal instruction"
    assert build_trust.read(chosen.parent).faults == build_trust.read(builds(home)[0].folder).faults == ()


def test_an_abort_for_want_of_memory_says_nothing_about_the_library(engine: Engine, home: Path) -> None:
    library = build(home, "only", 1, NO_MEMORY)
    for _ in range(2):
        assert fail_to_start(engine).last_error == "its process ended\nFatal Python error: Aborted"
    assert build_trust.read(library.parent).faults == ()


def test_a_build_that_was_made_anew_meanwhile_is_another_one(engine: Engine, home: Path) -> None:
    library = build(home, "only", 1)
    come_up(engine)
    manifest = library.parent / "manifest.json"
    manifest.write_text(manifest.read_text().replace("2026-11-01", "2026-11-05"))
    crash(engine, signal.SIGSEGV)
    assert build_trust.read(library.parent).faults == ()


def test_an_engine_on_a_card_without_another_library_says_what_to_do(engine: Engine, home: Path) -> None:
    on_a_card(engine)
    library = build(home, "only", 1, ILLEGAL, ("sm_86",))
    for _ in range(2):
        failed = fail_to_start(engine)
    assert failed.last_error.endswith(
        "there is no other for its card. Build it again on this host: manage.py build-native --arch sm_86"
    )
    held = fail_to_start(engine)
    assert (held.pid, held.restarts) == (None, 0), "no process is made to crash"
    assert "which is sm_86, crashes (build only: 2 native faults" in held.last_error
    assert held.last_error.endswith("Build it again on this host: manage.py build-native --arch sm_86")
    job_id = jobs.enqueue("here", JobKind.BUILD, "sm_86")
    assert f"is being built for its card, which is sm_86 (job {job_id})" in fail_to_start(engine).last_error
    Job.objects.update(state=JobState.FAILED, message="no room")
    assert fail_to_start(engine).last_error.endswith(f"building one (job {job_id}) ended: no room")
    # Built again, it is begun with once more.
    (library.parent / build_trust.RECORD).unlink()
    services.start(engine.pk)
    tasks.start_engine(engine.pk, row(engine).epoch)
    assert row(engine).pid is not None


def test_the_builds_job_and_the_dashboard_tell_of_it_until_it_is_built_again(engine: Engine, home: Path) -> None:
    library = build(home, "only", 1, ILLEGAL)
    job_id = jobs.enqueue("here", JobKind.BUILD, "cpu")
    Job.objects.update(state=JobState.DONE, result={"library": str(library), "built": "in 3 s"})
    for _ in range(2):
        fail_to_start(engine)
    native_faults.tell_of_builds("here")
    (job,) = jobs.ended_builds()
    assert (job.id, job.hint) == (job_id, "Build it again on this host: manage.py build-native --arch cpu")
    assert job.message.startswith("is not used any more: 2 native faults, the last SIGILL at ")
    (warning,) = build_warnings(pools.host_views(), (), (job,))
    assert (warning.subject, warning.message, warning.hint) == (
        "llama.cpp for cpu on here",
        f"{job.message}.",
        job.hint,
    )
    (library.parent / build_trust.RECORD).unlink()
    native_faults.tell_of_builds("here")
    assert [(job.message, job.hint) for job in jobs.ended_builds()] == [("", "")]


def test_a_crash_is_known_by_its_log_where_another_process_began_the_engine(
    home: Path, tiny_model: Callable[..., SyntheticModel]
) -> None:
    config = EngineConfig(str(tiny_model("llama").path), "tiny", threads=1)
    directory = home / "engines" / "1"
    build(home, "only", 1)
    starter = (
        "import sys; from pathlib import Path; from engines import launch; from engines.config import EngineConfig;"
        "launch.launch(EngineConfig.from_json(sys.argv[1]), Path(sys.argv[2]))"
    )
    subprocess.run([sys.executable, "-c", starter, config.to_json(), str(directory)], cwd=ROOT, check=True, timeout=60)
    process = launch.find(directory)
    assert process is not None
    loaded = launch.loaded_build(directory, process.pid)
    assert loaded is not None and loaded.key == "only"
    told = launch.read_config(directory)
    deadline = time.monotonic() + 60
    while told is None or launch.health(told.port) != "ok":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGBUS)
    while process.is_alive():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert detached.exit_code(process.pid, process.start_time) is None
    assert launch.native_fault(directory, loaded) == signal.SIGBUS


def test_a_start_waits_for_a_removal_and_takes_what_is_left(
    home: Path, tiny_model: Callable[..., SyntheticModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(native_library.LIBRARY_VARIABLE, raising=False)
    config = EngineConfig(str(tiny_model("llama").path), "tiny", threads=1)
    build(home, "left", 1)
    removed = build(home, "removed", 2)
    with ThreadPoolExecutor(1) as threads:
        with native_library.removing(home):
            start = threads.submit(launch.launch, config, home / "engines" / "1")
            time.sleep(0.3)  # long enough to choose, if it did not wait
            (removed.parent / "manifest.json").unlink()
        launched = start.result()
    loaded = launch.loaded_build(home / "engines" / "1", launched.record.pid)
    assert loaded is not None and loaded.key == "left"


def test_an_exit_code_is_believed_before_the_log() -> None:
    log = "loading ...Fatal Python error: Floating point exception\n\nThread 0x1:\n"
    assert fault_of(None, log) == signal.SIGFPE
    assert fault_of(-signal.SIGKILL, log) is None
    assert fault_of(-signal.SIGSEGV, "") == signal.SIGSEGV, "a stack that ran over leaves no words"
    assert fault_of(1, log) is None
    assert fault_of(None, "Fatal Python error: init_import_site: Failed to import\n") is None
    assert fault_of(-signal.SIGABRT, "terminate called after throwing an instance of 'std::bad_alloc'\n") is None
