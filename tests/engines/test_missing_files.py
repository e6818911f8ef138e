"""An engine on a host that lacks its model's file: fetched from where it came from, and started then."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engines import launch, services, tasks
from engines.models import Engine
from pools import jobs
from pools import services as pools
from pools import tasks as pool_tasks
from pools.models import Job, Variant, VariantFile
from tests.local_hub import COMMIT, LocalHub
from tests.rows import CPU, HOST, add_engine, add_model

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def engine(tmp_path: Path, settings: Any, tiny_model: Any) -> Iterator[Engine]:
    """An engine of a model that another host fetched; here is no file of it."""
    settings.HYDRA_HOME = tmp_path
    settings.HYDRA_HOST_NAME = "here"
    pools.record_probe("there", HOST, [CPU])
    variant = add_model(
        tiny_model("llama").path, tmp_path / "models", source=f"hf:own/tiny/tiny.gguf@{COMMIT}", host_name="there"
    )
    Variant.objects.update(path="/models/of/there/tiny.gguf")
    yield add_engine(variant)
    for directory in (tmp_path / "engines").glob("*"):
        launch.end_engine(directory)


def start(engine: Engine) -> Engine:
    services.start(engine.pk)
    tasks.start_engine(engine.pk, Engine.objects.get(pk=engine.pk).epoch)
    return Engine.objects.get(pk=engine.pk)


def test_the_file_is_fetched_and_the_engine_starts_with_it(
    engine: Engine, tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalHub(files={("own/tiny", "tiny.gguf"): tiny_model("llama").path.read_bytes()}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        waiting = start(engine)
        assert (waiting.state, waiting.restarts) == ("failed", 0)
        (job,) = jobs.job_views("here")
        assert f"job {job.id}" in waiting.last_error
        assert start(engine).last_error == waiting.last_error  # one job, however often it is tried
        pool_tasks.run_job(job.id)
    (done,) = jobs.job_views("here")
    assert done.state == "done", done
    # Each host has its own path; the variant is the same.
    assert Variant.objects.count() == 1
    assert VariantFile.objects.count() == 2
    running = start(engine)
    assert running.state == "starting"
    assert launch.read_config(tmp_path / "engines" / str(engine.pk)).model_path == done.result["path"]


def test_a_fetch_that_failed_is_told_and_not_repeated(engine: Engine) -> None:
    start(engine)
    Job.objects.update(state="failed", message="the hub has no such file")
    failed = start(engine)
    assert (failed.state, failed.restarts) == ("failed", 1)
    assert "ended: the hub has no such file" in failed.last_error
    assert Job.objects.count() == 1
