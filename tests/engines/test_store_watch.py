"""A host's store, kept by its head: real processes on tmpfs, real rows."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from engines import launch, store_calls, store_launch, store_rows, store_watch, tasks
from engines import services as engines
from engines.models import Engine, Store, StoreSample
from engines.process import ProcessRecord
from engines.rpc_client import Patience
from engines.store.config import StoreConfig
from engines.store_calls import StoreCaller
from engines.store_rows import Figures
from hydra_site.supervisor import leftovers
from hydra_site.supervisor.home import Home
from pools import services as pools
from tests.rows import CPU, HOST, add_engine, add_model
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db(transaction=True)

PATIENCE_S = 60.0
MB = 1 << 20


@pytest.fixture
def home(home: Path, settings: Any) -> Iterator[Path]:
    """One whose host has a store; what runs for that is ended, too, its memory given back."""
    settings.HYDRA_STORE_BYTES = 32 * MB
    yield home
    forget(home / "store")


def forget(directory: Path) -> None:
    store_launch.end_store(directory)
    store_launch.forget_memory(directory)


def probed(host_name: str = "here") -> int:
    return pools.record_probe(host_name, HOST, [CPU])


def row(host_name: str = "here") -> Store:
    return Store.objects.get(host__name=host_name)


def look_until(state: str, directory: Path, host_name: str = "here") -> Store:
    """Look as often as it takes; what one look does is told by the states in between."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        store_watch.look_at_store(host_name, directory)
        if row(host_name).state == state:
            return row(host_name)
        assert time.monotonic() < deadline, (row(host_name).state, row(host_name).last_error)
        time.sleep(0.05)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE_S
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        launch.reap()
        time.sleep(0.02)


def caller(store: Store) -> StoreCaller:
    assert store.port
    return StoreCaller(store.address, store.port, store.secret)


def save(store: Store, name: str, data: bytes = b"some state", session: str = "") -> None:
    from tests.engines.store.saving import save_one

    save_one(store.address, store.port or 0, store.secret, name, data, session=session)


def memory(directory: Path) -> Path:
    told = store_launch.read_config(directory)
    assert told is not None
    return told.folder


def test_a_host_gets_a_store_as_soon_as_it_was_probed(home: Path) -> None:
    store_watch.look_at_store("here", home / "store")
    assert not Store.objects.exists(), "a host that nobody knows yet"
    probed()
    store = look_until("ready", home / "store")
    told = store_launch.read_config(home / "store")
    assert told is not None
    assert (store.port, store.http_port, store.secret) == (told.port, told.http_port, told.secret)
    assert (store.capacity_bytes, store.version, store.last_error) == (32 * MB, "S1", "")
    assert told.keep
    assert memory(home / "store").is_dir()
    assert (home / "store" / "config.json").stat().st_mode & 0o777 == 0o600
    assert store.secret not in (home / "store" / "store.log").read_text()
    assert store.secret not in str(ProcessRecord.from_file(home / "store" / "run.json"))
    assert store.secret not in repr(store_rows.endpoint("here"))


def test_a_killed_store_comes_back_at_its_port_with_what_it_held_and_engines_stay(
    home: Path, tiny_model: Callable[..., SyntheticModel]
) -> None:
    engine = add_engine(add_model(tiny_model("llama").path, home / "models"))
    engines.start(engine.pk)
    tasks.start_engine(engine.pk, Engine.objects.get().epoch)
    store = look_until("ready", home / "store")
    told = launch.read_config(home / "engines" / str(engine.pk))
    assert told is not None
    assert (told.store_host, told.store_port, told.store_secret) == (store.address, store.port, store.secret)
    tasks.await_ready(engine.pk, Engine.objects.get().pid)
    assert Engine.objects.get().state == "ready"
    save(store, "kv/one")
    assert store.pid
    kill(store.pid)
    tasks.probe_host("here")
    failed_once = row()
    assert failed_once.restarts == 1
    assert failed_once.last_error.startswith("its process ended")
    again = look_until("ready", home / "store")
    assert (again.port, again.secret, again.restarts) == (store.port, store.secret, 1)
    assert again.pid != store.pid
    assert [entry.name for page in caller(again).snapshots() for entry in page] == ["kv/one"]
    serving = Engine.objects.get()
    assert (serving.state, launch.health(serving.http_port or 0)) == ("ready", "ok")
    rpc = engines.engine_rpc(engine.pk)
    assert rpc is not None
    assert (rpc.port, rpc.secret) == (told.rpc_port, told.rpc_secret)
    assert rpc.secret
    assert rpc.secret not in repr(rpc)


def test_a_store_that_dies_again_and_again_is_started_with_growing_pauses(home: Path) -> None:
    probed()
    store = look_until("ready", home / "store")
    Store.objects.update(restarts=4)
    assert store.pid
    kill(store.pid)
    store_watch.look_at_store("here", home / "store")
    store_watch.look_at_store("here", home / "store")
    assert (row().state, row().restarts, row().pid) == ("failed", 5, None)
    Store.objects.update(state_since=timezone.now() - timedelta(seconds=17))
    look_until("ready", home / "store")
    Store.objects.update(state_since=timezone.now() - timedelta(hours=1))
    store_watch.look_at_store("here", home / "store")
    assert row().restarts == 0, "steady by now"


def test_a_running_store_is_adopted_by_a_row_that_lost_it(home: Path) -> None:
    probed()
    store = look_until("ready", home / "store")
    Store.objects.all().delete()
    adopted = look_until("ready", home / "store")
    assert (adopted.pid, adopted.port, adopted.secret) == (store.pid, store.port, store.secret)


def test_a_store_takes_the_secret_of_the_pool_that_its_host_has_joined(home: Path) -> None:
    probed()
    store = look_until("ready", home / "store")
    save(store, "kv/one")
    Store.objects.all().delete()
    probed("first")
    first = store_rows.ensure_store("first")
    assert first is not None
    assert store_rows.settle_secret(first.store_id, "f" * 64) == "f" * 64
    store_watch.look_at_store("here", home / "store", after_restart=True)
    joined = look_until("ready", home / "store")
    assert joined.secret == "f" * 64
    assert [entry.name for page in caller(joined).snapshots() for entry in page] == ["kv/one"]


@pytest.mark.soak
def test_another_size_replaces_the_store_at_the_next_start_of_the_stack_and_loses_nothing(
    home: Path, settings: Any
) -> None:
    probed()
    store = look_until("ready", home / "store")
    save(store, "kv/one")
    settings.HYDRA_STORE_BYTES = 48 * MB
    store_watch.look_at_store("here", home / "store")
    assert row().pid == store.pid, "not in the middle of a run"
    store_watch.look_at_store("here", home / "store", after_restart=True)
    larger = look_until("ready", home / "store")
    assert (larger.capacity_bytes, larger.port, larger.restarts) == (48 * MB, store.port, 0)
    assert [entry.name for page in caller(larger).snapshots() for entry in page] == ["kv/one"]
    for number in range(3):
        save(larger, f"kv/{number}", bytes([number]) * 7 * MB)
    settings.HYDRA_STORE_BYTES = 16 * MB
    store_watch.look_at_store("here", home / "store", after_restart=True)
    smaller = look_until("ready", home / "store")
    assert smaller.capacity_bytes == 16 * MB
    assert store_launch.memory_bytes(home / "store") <= 16 * MB, "more than it may have was given back"
    assert list(caller(smaller).snapshots()) == []
    settings.HYDRA_STORE_BYTES = 0
    folder = memory(home / "store")
    store_watch.look_at_store("here", home / "store")
    assert row().state == "off"
    assert not folder.exists()
    assert store_rows.endpoint("here") is None


def test_a_port_that_somebody_took_is_given_up(home: Path) -> None:
    import socket

    probed()
    store = look_until("ready", home / "store")
    store_launch.end_store(home / "store")
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind((store.address, store.port))
        other.listen()
        moved = look_until("ready", home / "store")
    assert moved.port != store.port
    assert moved.secret == store.secret


@pytest.mark.soak
def test_a_frozen_store_is_told_and_ended_when_it_stays_silent(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probed()
    store = look_until("ready", home / "store")
    assert store.pid
    monkeypatch.setattr(store_launch, "STOP_GRACE_S", 0.2)
    monkeypatch.setattr(store_calls, "PATIENCE", Patience(hello_s=0.5))
    os.kill(store.pid, signal.SIGSTOP)
    store_watch.look_at_store("here", home / "store")
    assert row().state == "unhealthy"
    endpoint = store_rows.endpoint("here")
    assert endpoint is not None
    assert not endpoint.ready
    Store.objects.update(state_since=timezone.now() - timedelta(hours=1))
    store_watch.look_at_store("here", home / "store")
    assert row().state == "failed"
    assert look_until("ready", home / "store").pid != store.pid


def test_two_homes_of_one_machine_have_stores_of_their_own(home: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    probed("here")
    probed("there")
    try:
        one = look_until("ready", home / "store")
        two = look_until("ready", other / "store", "there")
        assert memory(home / "store") != memory(other / "store")
        assert one.port != two.port
        assert one.secret == two.secret, "engines fetch from the other host's store"
        same_name = store_launch.wanted_config(
            other / "store", "here", "127.0.0.1", capacity_bytes=32 * MB, disk_bytes=0, log_level="INFO"
        )
        assert same_name.folder != memory(home / "store")
        save(one, "kv/one")
        save(two, "kv/two")
        assert [entry.name for page in caller(two).snapshots() for entry in page] == ["kv/two"]
        pools.mark_lost_hosts(older_than_s=-1)
        engines.reconcile()
        assert {row("here").state, row("there").state} == {"unhealthy"}
    finally:
        forget(other / "store")


def test_the_last_stop_of_a_home_gives_the_stores_memory_back_and_leaves_its_disk(home: Path, settings: Any) -> None:
    settings.HYDRA_STORE_DISK_BYTES = 32 * MB
    probed()
    store = look_until("ready", home / "store")
    save(store, "kv/one")
    folder = memory(home / "store")
    leftovers.clear(Home(home))
    assert ProcessRecord.from_file(home / "store" / "run.json"), "a new run's head adopts it"
    assert look_until("ready", home / "store").pid == store.pid
    leftovers.end_engines(Home(home))
    assert not folder.exists()
    assert not (home / "store" / "run.json").exists()
    store_watch.look_at_store("here", home / "store", after_restart=True)
    assert row().restarts == 0, "that was no failure"
    again = look_until("ready", home / "store")
    assert again.port == store.port
    deadline = time.monotonic() + PATIENCE_S
    while [entry.name for page in caller(again).snapshots() for entry in page] != ["kv/one"]:
        assert time.monotonic() < deadline, "read back from disk"
        time.sleep(0.05)


# --- samples ---------------------------------------------------------------------------------------


def figures(**values: Any) -> Figures:
    base = {name: 0 for name in Figures.__dataclass_fields__ if name != "version"}
    return Figures(version="S1", **{**base, **values})


def test_a_store_keeps_one_sample_a_minute_of_a_bounded_number(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_rows, "RING_MINUTES", 3)
    probed()
    found = store_rows.ensure_store("here")
    assert found is not None
    Store.objects.update(state="ready", pid=42, pid_start_time=1.0)
    for minute in range(7):
        store_rows.mark_seen(found.store_id, 42, figures(hits=10 * minute, misses=minute, stored_bytes=minute))
        store_rows.mark_seen(found.store_id, 42, figures(hits=10 * minute + 5, misses=minute))
        assert StoreSample.objects.count() == min(3, minute + 1)
        for sample in StoreSample.objects.order_by("taken_at"):
            # As if a minute went by.
            slot, at = (sample.slot - 1) % 3 + 100, sample.taken_at - timedelta(minutes=1)
            StoreSample.objects.filter(pk=sample.pk).update(slot=slot, taken_at=at)
        for sample in StoreSample.objects.all():
            StoreSample.objects.filter(pk=sample.pk).update(slot=sample.slot - 100)
    assert sorted(StoreSample.objects.values_list("hits", flat=True)) == [40, 50, 60]
    (view,) = store_rows.store_views()
    assert view.hit_share == round(20 / 22, 3)
    assert (view.hits, view.misses) == (65, 6)


def test_figures_of_another_process_are_not_written(home: Path) -> None:
    probed()
    found = store_rows.ensure_store("here")
    assert found is not None
    Store.objects.update(state="ready", pid=42, pid_start_time=1.0)
    assert not store_rows.mark_seen(found.store_id, 41, figures(hits=5))
    assert (row().hits, StoreSample.objects.count()) == (0, 0)


def test_what_a_store_does_not_tell_counts_as_nothing() -> None:
    from engines.wire_store import StoreInfoAnswer

    told = Figures.of(StoreInfoAnswer("hydra-store", "S1", 1, "x", (), 1, {"slab_bytes": 8.0}, {"refused_full": 2}))
    assert (told.used_bytes, told.errors, told.hits) == (8, 2, 0)


def test_the_store_is_told_of_its_disk_only_where_it_has_one(tmp_path: Path) -> None:
    without = store_launch.wanted_config(
        tmp_path, "a" * 63, "127.0.0.1", capacity_bytes=1 << 30, disk_bytes=0, log_level="INFO"
    )
    assert (without.disk_directory, without.slab_bytes) == ("", 64 * MB)
    assert len(without.instance) <= 64
    with_disk = store_launch.wanted_config(
        tmp_path, "a", "127.0.0.1", capacity_bytes=1 << 30, disk_bytes=5, log_level="INFO"
    )
    assert (with_disk.disk_directory, with_disk.disk_bytes) == (str(tmp_path / "disk"), 5)
    assert StoreConfig.from_json(with_disk.to_json()) == with_disk
