"""Jobs: their states, their messages, and the processes that do them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from queue import Empty
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.db.models.functions import Now
from django.test import Client

from engines import launch
from hydra_site.celery import app
from pools import job_process, job_runner, jobs, services, tasks
from pools.choices import JobKind
from pools.errors import HostUnknown
from pools.job_admin import checked_subject
from pools.models import Job, Model, Variant, VariantFile
from tests.local_hub import COMMIT, LocalHub
from tests.native.small_source import write_pinned_source
from tests.rows import CPU, HOST, add_model
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def home(tmp_path: Path, settings: Any) -> Path:
    settings.HYDRA_HOME = tmp_path
    settings.HYDRA_HOST_NAME = "here"
    services.record_probe("here", HOST, [CPU])
    return tmp_path


def told(job_id: int) -> jobs.JobView:
    """The job as everybody sees it."""
    (job,) = [job for job in jobs.job_views() if job.id == job_id]
    return job


def messages(host_name: str) -> list[int]:
    """The jobs whose messages wait in a host's slow queue, which is empty afterwards."""
    found = []
    with app.connection_for_read() as connection:
        queue = connection.SimpleQueue(f"host.{host_name}.slow")
        while True:
            try:
                message = queue.get(block=False)
            except Empty:
                queue.close()
                return found
            message.ack()
            assert message.headers["task"] == "pools.tasks.run_job"
            assert message.headers["expires"]
            found.append(message.payload[0][0])


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LocalHub]:
    with LocalHub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        yield hub


def state(job_id: int) -> str:
    return Job.objects.get(pk=job_id).state


def test_asking_twice_makes_one_job_and_one_message(home: Path, django_capture_on_commit_callbacks: Any) -> None:
    messages("here")
    with django_capture_on_commit_callbacks(execute=True):
        job_id = jobs.enqueue("here", JobKind.BUILD, "sm_86")
        assert jobs.enqueue("here", JobKind.BUILD, "sm_86") == job_id
        other = jobs.enqueue("here", JobKind.DOWNLOAD, "sm_86")
    assert other != job_id
    assert messages("here") == [job_id, other]
    with pytest.raises(HostUnknown, match="'there'"):
        jobs.enqueue("there", JobKind.BUILD, "sm_86")


def test_a_job_runs_once_on_its_own_host_and_tells_how_far_it_is(home: Path) -> None:
    job_id = jobs.enqueue("here", JobKind.DOWNLOAD, "hf:own/tiny/tiny.gguf", "tiny")
    assert jobs.claim(job_id, "there") is None
    job = jobs.claim(job_id, "here")
    assert job is not None
    assert (job.state, job.name, job.percent) == ("running", "tiny", None)
    assert jobs.claim(job_id, "here") is None
    assert jobs.progress(job_id, "downloading", 30, 120)
    (seen,) = jobs.job_views("here", only_open=True)
    assert (seen.stage, seen.percent) == ("downloading", 25.0)
    assert jobs.finish(job_id, {"path": "/x"})
    assert not jobs.finish(job_id, {})
    assert not jobs.fail(job_id, "late")
    assert jobs.job_views("here", only_open=True) == ()
    done = told(job_id)
    assert (done.state, done.result, done.ended_at is not None) == ("done", {"path": "/x"}, True)


def test_a_cancelled_job_takes_no_progress_and_can_be_asked_for_again(home: Path) -> None:
    job_id = jobs.enqueue("here", JobKind.BUILD, "cpu")
    assert jobs.claim(job_id, "here")
    assert jobs.cancel(job_id)
    assert not jobs.cancel(job_id)
    assert not jobs.progress(job_id, "compiling", 1, 2)
    assert not jobs.put_back(job_id)
    assert state(job_id) == "cancelled"
    assert jobs.enqueue("here", JobKind.BUILD, "cpu") != job_id


def test_the_sweep_sends_what_nobody_took_and_puts_back_what_fell_silent(
    home: Path, django_capture_on_commit_callbacks: Any
) -> None:
    messages("here")
    lost, silent, fine = (jobs.enqueue("here", JobKind.BUILD, arch) for arch in ("sm_60", "sm_86", "sm_90"))
    for job_id in (silent, fine):
        assert jobs.claim(job_id, "here")
    assert jobs.sweep() == 0
    long_ago = Now() - timedelta(seconds=jobs.SILENT_S + 5)
    Job.objects.filter(pk=lost).update(sent_at=long_ago)
    Job.objects.filter(pk=silent).update(seen_at=long_ago)
    with django_capture_on_commit_callbacks(execute=True):
        assert jobs.sweep() == 3
    assert [state(job_id) for job_id in (lost, silent, fine)] == ["queued", "queued", "running"]
    assert sorted(messages("here")) == [lost, silent]
    # A job whose head dies of it every time is given up.
    Job.objects.filter(pk=silent).update(state="running", seen_at=long_ago, attempts=jobs.MAX_ATTEMPTS)
    jobs.sweep()
    assert state(silent) == "failed"
    Job.objects.filter(pk=silent).update(ended_at=Now() - timedelta(days=jobs.KEPT_DAYS + 1))
    jobs.sweep()
    assert not Job.objects.filter(pk=silent).exists()


def test_a_run_that_was_given_up_writes_nothing_into_the_next(home: Path) -> None:
    job_id = jobs.enqueue("here", JobKind.BUILD, "cpu")
    first = jobs.claim(job_id, "here")
    assert first is not None
    Job.objects.update(seen_at=Now() - timedelta(seconds=jobs.SILENT_S + 5))
    jobs.sweep()
    second = jobs.claim(job_id, "here")
    assert second is not None and second.attempt == first.attempt + 1
    assert not jobs.progress(job_id, "late", 1, 2, attempt=first.attempt)
    assert not jobs.put_back(job_id, attempt=first.attempt)
    assert not jobs.fail(job_id, "late", attempt=first.attempt)
    assert not jobs.finish(job_id, {}, attempt=first.attempt)
    assert jobs.finish(job_id, {"library": "x"}, attempt=second.attempt)


def test_what_opens_a_file_behind_a_url_is_for_its_process_only(home: Path) -> None:
    url = "https://models.example/tiny.gguf?X-Signature=secret"
    job = told(jobs.enqueue("here", JobKind.DOWNLOAD, url))
    assert job.subject == "https://models.example/tiny.gguf?…"
    assert "secret" not in repr(job) and "secret" not in str(Job.objects.get())
    assert job_runner.command(job, home)[-2] == url


def test_a_download_becomes_a_model_with_its_file_on_this_host(home: Path, hub: LocalHub, tiny_model: Any) -> None:
    model: SyntheticModel = tiny_model("llama")
    hub.files["own/tiny", "tiny-F32.gguf"] = model.path.read_bytes()
    job_id = jobs.enqueue("here", JobKind.DOWNLOAD, "hf:own/tiny:F32", "tiny")
    tasks.run_job(job_id)
    job = told(job_id)
    assert job.state == "done", job.message
    variant = Variant.objects.get()
    assert (variant.model.name, variant.is_verified) == ("tiny", True)
    assert variant.source == f"hf:own/tiny/tiny-F32.gguf@{COMMIT}"
    assert variant.content_digest == job.result["sha256"]
    assert services.variant_paths("here") == {variant.pk: job.result["path"]}
    assert Path(job.result["path"]).is_relative_to(home / "models")
    # The same file under the same name stays one variant, and keeps what is known of it.
    add_model(Path(job.result["path"]), home / "models")
    assert Variant.objects.get().is_verified
    assert VariantFile.objects.count() == 1


def test_a_download_that_fails_says_why(home: Path, hub: LocalHub) -> None:
    hub.files["own/tiny", "letter.gguf"] = b"Dear model"
    for reference, words in {
        "hf:own/tiny/none.gguf": "the hub has no",
        "hf:own/tiny/letter.gguf": "not a GGUF",
    }.items():
        job_id = jobs.enqueue("here", JobKind.DOWNLOAD, reference)
        tasks.run_job(job_id)
        job = told(job_id)
        assert (job.state, words in job.message, bool(job.hint)) == ("failed", True, True)
    assert not Model.objects.exists()


def test_a_build_that_cannot_be_made_says_why(home: Path) -> None:
    job_id = jobs.enqueue("here", JobKind.BUILD, "sm_1")
    tasks.run_job(job_id)
    job = told(job_id)
    assert (job.state, "known: cpu, sm_60" in job.message) == ("failed", True)


def test_a_build_becomes_what_the_hosts_engines_load(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_runner, "BUILD_NICENESS", 0)  # else it waits for the tests beside it
    write_pinned_source(home)
    job_id = jobs.enqueue("here", JobKind.BUILD, "cpu")
    tasks.run_job(job_id)
    job = told(job_id)
    assert job.state == "done", job.message
    assert job.done == job.total > 0
    assert launch.library_environment(home, "") == {"LLAMA_CPP_LIB_PATH": job.result["library"]}


def test_what_became_of_a_library_is_told_by_the_job_that_built_it_and_by_no_other(home: Path) -> None:
    made = {
        subject: jobs.enqueue("here", JobKind.BUILD, subject) for subject in ("cpu", "sm_60 sm_120", "sm_86", "sm_90")
    }
    for job_id in (made["cpu"], made["sm_60 sm_120"], made["sm_86"]):
        jobs.claim(job_id, "here")
        jobs.finish(job_id, {"library": f"/lib-{job_id}"})
    # The second one made two libraries and names the one for sm_120.
    jobs.tell_of_builds(
        "here",
        {
            f"/lib-{made['cpu']}": (("cpu",), "crashes", "build it again"),
            "/for-the-p100": (("sm_60",), "crashes too", ""),
        },
    )
    said = {subject: (told(job_id).message, told(job_id).hint) for subject, job_id in made.items()}
    assert said == {
        "cpu": ("crashes", "build it again"),
        "sm_60 sm_120": ("crashes too", ""),
        "sm_86": ("", ""),
        "sm_90": ("", ""),
    }
    jobs.tell_of_builds("elsewhere", {})
    assert told(made["cpu"]).message == "crashes"
    jobs.tell_of_builds("here", {})
    assert [told(job_id).message for job_id in made.values()] == [""] * 4


def test_a_job_that_is_cancelled_ends_its_process_and_all_that_it_started(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys, time; subprocess.Popen(['sleep', '600']); print('{}', flush=True); time.sleep(600)"
    )
    cancelled = threading.Event()
    threading.Timer(0.5, cancelled.set).start()
    outcome = job_process.run(
        [sys.executable, "-c", script], ROOT, tmp_path / "log", lambda stage, done, total: not cancelled.is_set()
    )
    assert outcome.stopped
    assert outcome.code < 0


def test_what_a_process_writes_besides_json_is_kept_for_the_row(tmp_path: Path) -> None:
    script = "import sys; print('no json'); print('[1]'); sys.exit('out of luck')"
    outcome = job_process.run([sys.executable, "-c", script], ROOT, tmp_path / "log", lambda *_: True)
    assert (outcome.code, outcome.last, outcome.errors) == (1, {}, "out of luck")


# --- the admin ------------------------------------------------------------------------------------


def test_subjects_have_one_form() -> None:
    assert checked_subject("build", " sm_120, sm_86 sm_86") == "sm_86 sm_120"
    assert checked_subject("download", " hf:own/tiny:Q4_K_M ") == "hf:own/tiny:Q4_K_M"
    for kind, subject in (("build", "sm_1"), ("download", "hf:x")):
        with pytest.raises(ValueError, match=r"known|form"):
            checked_subject(kind, subject)


def test_a_person_asks_and_cancels_in_the_admin(home: Path, client: Client) -> None:
    client.force_login(get_user_model().objects.create_superuser("admin", password="secret-enough"))
    host_id = services.host_views()[0].id
    form = {"host": host_id, "kind": "download", "subject": "hf:own/tiny:Q4_K_M", "name": "tiny"}
    assert client.post("/admin/pools/job/add/", {**form, "subject": "hf:x"}).status_code == 200
    assert not Job.objects.exists()
    assert client.post("/admin/pools/job/add/", form).status_code == 302
    job = Job.objects.get()
    assert (job.subject, job.name, job.state) == ("hf:own/tiny:Q4_K_M", "tiny", "queued")
    jobs.claim(job.pk, "here")
    jobs.progress(job.pk, "downloading", 1 << 30, 4 << 30)
    page = client.get("/admin/pools/job/").content.decode()
    assert "25 % of 4.29 GB downloading" in page
    assert client.post("/admin/pools/job/", {"action": "cancel_jobs", "_selected_action": [job.pk]}).status_code == 302
    assert state(job.pk) == "cancelled"
    assert client.post("/admin/pools/job/", {"action": "ask_again", "_selected_action": [job.pk]}).status_code == 302
    assert [job.state for job in Job.objects.all()] == ["queued", "cancelled"]
