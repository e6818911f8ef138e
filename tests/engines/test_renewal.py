"""Engines and the llama.cpp that is built while they run: taken when nobody is kept waiting and nothing is lost."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from django.db.models import F

from engines import launch, loading, renewal, services, store_launch, store_watch, tasks
from engines.http_secret import http_secret
from engines.models import Engine
from pools import jobs
from pools import services as pools
from pools.choices import JobKind, JobState
from pools.models import Job
from pools.probe import GpuReading
from tests.engines.test_native_library import put
from tests.rows import CPU, HOST, add_engine, add_model
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db(transaction=True)

PATIENCE_S = 60.0
CONTEXT_TOKENS = 4096
CARD = GpuReading(
    kind="cuda",
    index=0,
    uuid="GPU-1",
    name="RTX 3060",
    arch="sm_86",
    memory_total_bytes=12 << 30,
    memory_used_bytes=1 << 30,
    temperature_c=40.0,
    utilization_percent=0.0,
    power_w=10.0,
)


@pytest.fixture
def engine(home: Path, tiny_model: Callable[..., SyntheticModel]) -> Engine:
    made = add_engine(add_model(tiny_model("llama").path, home / "models"))
    Engine.objects.filter(pk=made.pk).update(context_tokens=CONTEXT_TOKENS)
    return row(made)


@pytest.fixture
def store(home: Path, settings: Any) -> Iterator[None]:
    """The host has a store."""
    settings.HYDRA_STORE_BYTES = 32 << 20
    pools.record_probe("here", HOST, [CPU])
    store_watch.look_at_store("here", home / "store")
    yield
    store_launch.end_store(home / "store")
    store_launch.forget_memory(home / "store")


def row(engine: Engine) -> Engine:
    return Engine.objects.get(pk=engine.pk)


def until(engine: Engine, state: str) -> Engine:
    """Look at the host and take what is due until the engine is in this state."""
    deadline = time.monotonic() + PATIENCE_S
    while row(engine).state != state:
        assert time.monotonic() < deadline, (row(engine).state, row(engine).last_error)
        tasks.probe_host("here")
        now = row(engine)
        step = {"draining": tasks.drain_engine, "stopped": tasks.start_engine}.get(now.state)
        if step is not None and now.commanded_at is not None:
            step(engine.pk, now.epoch)
        time.sleep(0.1)
    return row(engine)


def started(engine: Engine) -> Engine:
    services.start(engine.pk)
    return until(engine, "ready")


def build_for_the_cpu(home: Path) -> Path:
    """The wheel's library once more, as a build of this host."""
    library = put(home, "own", ("cpu",), "2026-11-03T00:00:00+00:00")
    library.rmdir()
    library.symlink_to(Path(llama_cpp.__file__).parent / "lib")
    return library


def nobody_asked_for(seconds: float, engine: Engine) -> None:
    Engine.objects.filter(pk=engine.pk).update(state_since=F("state_since") - timedelta(seconds=seconds))


def cached_tokens(engine: Engine, text: str) -> int:
    """Asks the engine, and says how much of the prompt it had."""
    running = row(engine)
    secret = http_secret(running.rpc_secret, running.host.address)
    request = urllib.request.Request(
        f"{running.base_url}/v1/completions",
        json.dumps({"model": "tiny", "prompt": text, "max_tokens": 4, "temperature": 0}).encode(),
        {"Content-Type": "application/json", "X-Hydra-Session": "one", "Authorization": f"Bearer {secret}"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        usage = json.load(answer)["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def library_of(engine: Engine, home: Path) -> str | None:
    process = launch.find(home / "engines" / str(engine.pk))
    assert process is not None
    return launch.library_of(process)


def test_an_idle_engine_takes_the_library_that_was_built_for_it(engine: Engine, home: Path) -> None:
    first = started(engine)
    nobody_asked_for(2 * renewal.IDLE_S, engine)
    assert (library_of(engine, home), renewal.renew_idle("here")) == ("", 0), "there is no other"
    library = build_for_the_cpu(home)
    Engine.objects.update(state_since=first.state_since)
    assert renewal.renew_idle("here") == 0, "it may be asked any moment"
    nobody_asked_for(2 * renewal.IDLE_S, engine)
    assert renewal.renew_idle("here") == 1
    assert (row(engine).state, row(engine).wanted) == ("draining", "running")
    # Whoever asks meanwhile waits for it, and for no other one.
    assert loading.want("tiny").node == "here"
    assert Engine.objects.count() == 1
    again = until(engine, "ready")
    assert again.pid != first.pid
    assert library_of(engine, home) == str(library)
    nobody_asked_for(2 * renewal.IDLE_S, engine)
    assert renewal.renew_idle("here") == 0, "once is enough"


def test_without_a_store_it_keeps_what_it_holds(engine: Engine, home: Path) -> None:
    started(engine)
    cached_tokens(engine, "abc " * 20)
    build_for_the_cpu(home)
    nobody_asked_for(2 * renewal.IDLE_S, engine)
    assert renewal.renew_idle("here") == 0
    assert row(engine).state == "ready"


def test_with_a_store_its_conversations_go_on_behind_it(store: None, engine: Engine, home: Path) -> None:
    first = started(engine)
    # Long enough that an engine takes it from the store, which it does where that is faster, on a fast machine too.
    text = "abc " * 900
    assert cached_tokens(engine, text) == 0
    build_for_the_cpu(home)
    nobody_asked_for(2 * renewal.IDLE_S, engine)
    assert renewal.renew_idle("here") == 1
    assert until(engine, "ready").pid != first.pid
    assert cached_tokens(engine, text) > 3000, "it was computed again"


def on_a_card(engine: Engine) -> Engine:
    pools.record_probe("here", HOST, [CPU, CARD])
    card = next(gpu.id for host in pools.host_views() for gpu in host.gpus if gpu.kind == "cuda")
    Engine.objects.filter(pk=engine.pk).update(gpu_id=card)
    return row(engine)


def test_an_engine_waits_while_llama_cpp_is_built_for_its_card_and_tells_why_it_was_not(
    engine: Engine, home: Path
) -> None:
    on_a_card(engine)
    job_id = jobs.enqueue("here", JobKind.BUILD, "sm_60 sm_86")
    services.start(engine.pk)
    tasks.start_engine(engine.pk, row(engine).epoch)
    waiting = row(engine)
    assert (waiting.state, waiting.restarts, waiting.pid) == ("failed", 0, None)
    assert f"being built for its card, which is sm_86 (job {job_id})" in waiting.last_error
    Job.objects.update(state=JobState.FAILED, message="needs CUDA 11.1 or newer", hint="get one")
    services.start(engine.pk)
    tasks.start_engine(engine.pk, row(engine).epoch)
    assert row(engine).last_error.endswith("ended: needs CUDA 11.1 or newer get one")
    # As soon as there is one it is not kept any longer: its process starts, which on this machine finds no card.
    put(home, "fat", ("sm_60", "sm_86"), "2026-11-03T00:00:00+00:00")
    services.start(engine.pk)
    tasks.start_engine(engine.pk, row(engine).epoch)
    assert "being built" not in row(engine).last_error
    assert row(engine).pid is not None


def test_where_nobody_asked_for_a_build_the_engine_itself_says_what_to_do(engine: Engine, home: Path) -> None:
    on_a_card(engine)
    services.start(engine.pk)
    tasks.start_engine(engine.pk, row(engine).epoch)
    failed = until(engine, "failed")
    assert "manage.py build-native --arch sm_86" in failed.last_error
