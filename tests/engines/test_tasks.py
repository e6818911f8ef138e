"""The head's tasks on real engine processes: start, look, adopt, replace, stop."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engines import launch, services, tasks, watch
from engines.models import Engine
from engines.process import ProcessRecord
from engines.runtime.arena import FOLDER, PREFIX
from tests.rows import add_engine, add_model
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db(transaction=True)

PATIENCE_S = 60.0


@pytest.fixture
def engine(home: Path, db: None, tiny_model: Callable[..., SyntheticModel]) -> Engine:
    return add_engine(add_model(tiny_model("llama").path, home / "models"))


def row(engine: Engine) -> Engine:
    return Engine.objects.get(pk=engine.pk)


def directory(home: Path, engine: Engine) -> Path:
    return home / "engines" / str(engine.pk)


def started(engine: Engine) -> Engine:
    """The engine after its start task ran and its model was loaded."""
    services.start(engine.pk)
    tasks.start_engine(engine.pk, row(engine).epoch)
    deadline = time.monotonic() + PATIENCE_S
    while row(engine).state == "starting" and time.monotonic() < deadline:
        tasks.probe_host("here")
        time.sleep(0.05)
    assert row(engine).state == "ready", row(engine).last_error
    return row(engine)


def wait_gone(pid: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        launch.reap()
        if not Path(f"/proc/{pid}").exists():
            return
        time.sleep(0.02)
    raise AssertionError(f"process {pid} still exists")


def test_an_engine_starts_serves_and_stops(engine: Engine, home: Path) -> None:
    running = started(engine)
    assert launch.health(running.http_port) == "ok"
    assert (services.ready_engines("tiny"))[0].base_url == running.base_url
    record = ProcessRecord.from_file(directory(home, engine) / "run.json")
    assert record is not None
    assert (record.pid, record.is_alive()) == (running.pid, True)
    services.stop(engine.pk)
    tasks.stop_engine(engine.pk, row(engine).epoch)
    assert row(engine).state == "stopped"
    assert not record.is_alive()
    assert not (directory(home, engine) / "run.json").exists()


def test_waiting_for_readiness_ends_when_the_engine_serves(engine: Engine) -> None:
    services.start(engine.pk)
    tasks.start_engine(engine.pk, row(engine).epoch)
    tasks.await_ready(engine.pk, row(engine).pid)
    assert row(engine).state == "ready"


def test_an_engine_that_dies_is_failed_with_its_last_words_and_leaves_no_zombie(engine: Engine, tmp_path: Path) -> None:
    running = started(engine)
    os.kill(running.pid, signal.SIGSEGV)  # as native code does it
    wait_gone(running.pid)
    abandoned = FOLDER / f"{PREFIX}none-{tmp_path.name}"
    abandoned.touch()
    watch.look_at_host("here", Path("/nonexistent"))
    assert not abandoned.exists()
    failed = row(engine)
    assert (failed.state, failed.restarts, failed.pid) == ("failed", 1, None)
    assert failed.last_error == "its process ended\nFatal Python error: Segmentation fault"


def test_an_engine_that_cannot_load_its_model_is_failed(engine: Engine) -> None:
    broken = Path(engine.variant.path)
    engine.variant.path = str(broken.with_name("gone.gguf"))
    engine.variant.save(update_fields=["path"])
    services.start(engine.pk)
    tasks.start_engine(engine.pk, row(engine).epoch)
    tasks.await_ready(engine.pk, row(engine).pid)
    assert row(engine).state == "failed"
    assert "gone.gguf" in row(engine).last_error


def test_a_running_engine_stays_one_process_whatever_is_done_twice_or_forgotten_or_hangs(
    engine: Engine, home: Path
) -> None:
    """Four events on one process, which takes a second to start."""
    running = started(engine)

    tasks.start_engine(engine.pk, running.epoch)
    assert row(engine).pid == running.pid, "a start that comes twice"

    (directory(home, engine) / "run.json").unlink()
    found = launch.find(directory(home, engine))
    assert found is not None and found.pid == running.pid, "a process whose record was never written"

    Engine.objects.update(state="stopped", pid=None, pid_start_time=None, http_port=None)
    tasks.probe_host("here")
    adopted = row(engine)
    assert (adopted.state, adopted.pid, adopted.http_port) == ("ready", running.pid, running.http_port)

    os.kill(running.pid, signal.SIGSTOP)
    try:
        tasks.probe_host("here")
        assert row(engine).state == "unhealthy", "a frozen one gets no requests"
    finally:
        os.kill(running.pid, signal.SIGCONT)
    tasks.probe_host("here")
    assert row(engine).state == "ready"


def test_an_engine_that_nobody_wants_is_ended(engine: Engine) -> None:
    running = started(engine)
    Engine.objects.update(wanted="stopped", state="stopped", pid=None, pid_start_time=None, http_port=None)
    tasks.probe_host("here")
    wait_gone(running.pid)
    assert row(engine).state == "stopped"


def test_the_process_of_a_deleted_row_is_ended(engine: Engine) -> None:
    running = started(engine)
    Engine.objects.all().delete()
    tasks.probe_host("here")
    wait_gone(running.pid)


def test_other_settings_replace_a_running_engine_at_the_next_start_of_the_stack(engine: Engine, home: Path) -> None:
    running = started(engine)
    Engine.objects.update(slots=1)
    tasks.probe_host("here")
    assert row(engine).pid == running.pid, "not in the middle of a run"
    watch.look_at_host("here", home / "engines", after_restart=True)
    wait_gone(running.pid)
    assert row(engine).state == "stopped"


def test_an_engine_that_did_not_survive_the_stack_is_stopped_and_no_failure(engine: Engine, home: Path) -> None:
    running = started(engine)
    os.kill(running.pid, signal.SIGKILL)
    wait_gone(running.pid)
    watch.look_at_host("here", home / "engines", after_restart=True)
    assert (row(engine).state, row(engine).restarts) == ("stopped", 0)


def test_a_probe_meant_for_another_host_does_nothing(engine: Engine) -> None:
    tasks.probe_host("elsewhere")
    assert row(engine).state == "stopped"
