"""Snapshot rows follow the manifests of real stores, and sessions that end take their bytes along."""

from __future__ import annotations

import contextlib
import hashlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from engines import store_calls, store_launch, store_rows, store_watch
from engines.errors import EngineUnreachable
from engines.models import Store
from engines.store_calls import StoreCaller
from engines.wire_store import SnapshotEntry
from pools import services as pools
from sessions import snapshots, tasks
from sessions.models import ChatSession, Snapshot, Turn
from sessions.snapshots import Sweep
from tests.engine_process import free_port
from tests.engines.store.saving import save_one
from tests.rows import CPU, HOST

pytestmark = pytest.mark.django_db(transaction=True)

PATIENCE_S = 60.0
OLD_S = snapshots.UNKNOWN_GRACE_S + 60


class HostStore:
    """A host with its row, and its store's process. The store outlives the rows of a test."""

    def __init__(self, host_name: str, directory: Path) -> None:
        self.host_name = host_name
        self.directory = directory

    def add(self) -> None:
        pools.record_probe(self.host_name, HOST, [CPU])
        deadline = time.monotonic() + PATIENCE_S
        while not (endpoint := store_rows.endpoint(self.host_name)) or not endpoint.ready:
            store_watch.look_at_store(self.host_name, self.directory)
            assert time.monotonic() < deadline
            time.sleep(0.05)
        self.endpoint = endpoint
        self.caller.delete(self.names())

    @property
    def caller(self) -> StoreCaller:
        return StoreCaller(self.endpoint.address, self.endpoint.port, self.endpoint.secret)

    def save(self, name: str, chat: ChatSession | str = "", data: bytes | None = None, **values: Any) -> None:
        session = chat if isinstance(chat, str) else chat.key_hash
        place = self.endpoint.address, self.endpoint.port, self.endpoint.secret
        save_one(*place, name, data or name.encode(), session=session, **values)

    def names(self) -> list[str]:
        return [entry.name for page in self.caller.snapshots() for entry in page]

    def stored_bytes(self) -> float:
        return self.caller.info().status["stored_bytes"]

    def rows(self) -> list[str]:
        return sorted(Snapshot.objects.filter(store_id=self.endpoint.store_id).values_list("name", flat=True))

    def end(self) -> None:
        store_launch.end_store(self.directory)
        store_launch.forget_memory(self.directory)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], HostStore]]:
    """Stores of several hosts of this machine, each with a home of its own."""
    made: dict[str, HostStore] = {}

    def store_of(host_name: str) -> HostStore:
        if host_name not in made:
            made[host_name] = HostStore(host_name, tmp_path_factory.mktemp(host_name) / "store")
        return made[host_name]

    yield store_of
    for store in made.values():
        store.end()


@pytest.fixture
def here(stores: Callable[[str], HostStore], settings: Any, db: None) -> HostStore:
    settings.HYDRA_STORE_BYTES = 32 << 20
    settings.HYDRA_HOST_NAME = "here"
    store = stores("here")
    store.add()
    return store


@pytest.fixture
def there(stores: Callable[[str], HostStore], here: HostStore) -> HostStore:
    store = stores("there")
    store.add()
    return store


def chat(title: str, age_s: float = 0.0) -> ChatSession:
    at = timezone.now() - timedelta(seconds=age_s)
    key = hashlib.sha256(title.encode()).hexdigest()
    return ChatSession.objects.create(key_hash=key, title=title, model_name="tiny", last_active_at=at)


class Forwarder:
    """Passes so many connections on to a store, and refuses those after: what a page is asked for on breaks."""

    def __init__(self, port: int, connections: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run, args=(connections,), daemon=True)
        self._thread.start()

    def _run(self, connections: int) -> None:
        for _ in range(connections):
            near, _ = self._listener.accept()
            with near, socket.create_connection(("127.0.0.1", self._target)) as far:
                self._relay(near, far)
        self._listener.close()

    @staticmethod
    def _relay(near: socket.socket, far: socket.socket) -> None:
        other = {near: far, far: near}
        while True:
            for ready in select.select([near, far], [], [])[0]:
                try:
                    data = ready.recv(1 << 16)
                except ConnectionError:
                    return
                if not data:
                    return
                other[ready].sendall(data)

    def join(self) -> None:
        self._thread.join(PATIENCE_S)


def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if all that was saved until now were older than the grace."""
    monkeypatch.setattr(snapshots, "UNKNOWN_GRACE_S", -1.0)


Told = Callable[[str], list[tuple[str, list[Any]]]]


@pytest.fixture
def told() -> Told:
    """What waits for a host's head, as (task, arguments), and is taken out of its queue by that."""
    from hydra_site.celery import app

    def taken(host_name: str) -> list[tuple[str, list[Any]]]:
        found = []
        with (
            app.connection_for_read() as connection,
            connection.SimpleQueue(f"host.{host_name}.fast") as queue,
            contextlib.suppress(queue.Empty),
        ):
            while True:
                message = queue.get_nowait()
                message.ack()
                found.append((message.headers["task"], message.decode()[0]))
        return found

    for host_name in ("here", "there"):
        taken(host_name)
    return taken


# --- rows follow manifests -------------------------------------------------------------------------


def test_a_sweep_writes_what_is_saved_and_drops_what_is_gone(here: HostStore) -> None:
    one, two = chat("one"), chat("two")
    here.save("kv/a", one, n_past=7)
    here.save("kv/b", one, b"checkpoint", kind="checkpoint", n_past=9)
    here.save("kv/c", two)
    assert snapshots.sweep("here") == Sweep(listed=3, written=3)
    assert here.rows() == ["kv/a", "kv/b", "kv/c"]
    longest, shorter = snapshots.snapshots_of(one.pk)
    assert (longest.name, longest.tokens, longest.has_checkpoint) == ("kv/b", 9, True)
    assert (shorter.name, shorter.tokens, shorter.size_bytes, shorter.has_checkpoint) == ("kv/a", 7, 4, False)
    assert len(shorter.fingerprint) == 32
    assert (shorter.host_name, shorter.store_port, shorter.ready) == ("here", here.endpoint.port, True)
    assert snapshots.sweep("here") == Sweep(listed=3)
    here.caller.delete(["kv/a"])
    assert snapshots.sweep("here") == Sweep(listed=2, dropped=1)
    assert here.rows() == ["kv/b", "kv/c"]


def test_a_row_follows_a_manifest_that_was_saved_again(here: HostStore) -> None:
    one = chat("one")
    here.save("kv/a", one, n_past=7)
    snapshots.sweep("here")
    here.save("kv/a", one, b"longer", n_past=8)
    assert snapshots.sweep("here") == Sweep(listed=1, written=1)
    assert snapshots.snapshots_of(one.pk)[0].tokens == 8


def test_many_manifests_come_page_by_page(here: HostStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_calls, "PAGE", 2)
    one = chat("one")
    for number in range(4):
        # Else the store keeps the last four of a session alone.
        here.save(f"kv/{number}", one)
    here.save("kv/other", chat("two"))
    assert snapshots.sweep("here") == Sweep(listed=5, written=5)


def test_what_a_head_recorded_is_kept_and_older_news_changes_nothing(here: HostStore) -> None:
    one = chat("one")
    here.save("kv/a", one, n_past=7)
    (entry,) = next(here.caller.snapshots())
    assert snapshots.record("here", [entry]) == 1
    assert snapshots.record("here", [entry]) == 0
    older = SnapshotEntry(**{**vars(entry), "n_past": 3, "modified": entry.modified - 5})
    assert snapshots.record("here", [older]) == 0
    assert snapshots.snapshots_of(one.pk)[0].tokens == 7
    nobodys = SnapshotEntry(**{**vars(entry), "name": "kv/b", "session": "f" * 64})
    assert snapshots.record("here", [nobodys]) == 0
    assert snapshots.record("nowhere", [entry]) == 0


def test_a_manifest_with_odd_figures_does_not_stop_the_sweep_of_the_others(here: HostStore) -> None:
    one = chat("one")
    entry = SnapshotEntry("kv/a", one.key_hash, 1 << 40, 1 << 70, "f", False, False, 1e18)
    odd = [replace(entry, name=name) for name in ("", "n\0", "n" * 2000)]
    odd += [replace(entry, name="kv/b", modified=float("nan")), replace(entry, name="kv/c", session="s\0")]
    assert snapshots.record("here", [*odd, entry]) == 2
    assert here.rows() == ["kv/a", "kv/b"]


def test_a_sweep_that_breaks_off_drops_nothing(here: HostStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second page does not come any more."""
    one = chat("one")
    for name in ("kv/a", "kv/b", "kv/c"):
        here.save(name, one)
    snapshots.sweep("here")
    here.caller.delete(["kv/b"])
    monkeypatch.setattr(store_calls, "PAGE", 1)
    forwarder = Forwarder(here.endpoint.port, connections=1)
    Store.objects.filter(host__name="here").update(port=forwarder.port)
    with pytest.raises(EngineUnreachable):
        snapshots.sweep("here")
    forwarder.join()
    assert here.rows() == ["kv/a", "kv/b", "kv/c"]


def test_manifests_of_deleted_sessions_go_after_a_grace_and_those_of_others_never(
    here: HostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.save("kv/known", chat("one"))
    here.save("kv/deleted", "e" * 64)
    here.save("kv/shared system prompt")
    here.save("kv/by hand", "my own session")
    assert snapshots.sweep("here").deleted == 0, "its row may be on its way"
    later(monkeypatch)
    assert snapshots.sweep("here") == Sweep(listed=4, deleted=1)
    assert here.names() == ["kv/by hand", "kv/known", "kv/shared system prompt"]


def test_two_hosts_are_kept_apart(here: HostStore, there: HostStore) -> None:
    one = chat("one")
    here.save("kv/a", one)
    there.save("kv/a", one)
    there.save("kv/b", one)
    snapshots.sweep("here")
    snapshots.sweep("there")
    assert (here.rows(), there.rows()) == (["kv/a"], ["kv/a", "kv/b"])
    assert sorted((view.host_name, view.name) for view in snapshots.snapshots_of(one.pk)) == [
        ("here", "kv/a"),
        ("there", "kv/a"),
        ("there", "kv/b"),
    ]
    there.caller.delete(["kv/a"])
    snapshots.sweep("there")
    snapshots.sweep("here")
    assert (here.rows(), there.rows()) == (["kv/a"], ["kv/b"])


def test_a_host_without_a_store_has_no_snapshots(here: HostStore) -> None:
    here.save("kv/a", chat("one"))
    snapshots.sweep("here")
    store_rows.mark_off(here.endpoint.store_id)
    assert snapshots.sweep("here") == Sweep(dropped=1)


# --- the end of sessions ---------------------------------------------------------------------------


def test_deleting_a_session_frees_its_bytes_on_every_host(
    here: HostStore, there: HostStore, told: Told, settings: Any
) -> None:
    one, two = chat("one"), chat("two")
    for store in (here, there):
        store.save("kv/a", one, b"a" * 100_000)
        store.save("kv/b", two, b"b" * 100_000)
        snapshots.sweep(store.host_name)
    before = here.stored_bytes()
    Turn.objects.create(chat=one, request_id="12345678123456781234567812345678", model_name="tiny")
    assert snapshots.delete_chat(one.pk, None)
    assert not Snapshot.objects.filter(chat_id=one.pk).exists()
    for host in ("here", "there"):
        assert told(host) == [("sessions.tasks.forget_sessions", [host, [one.key_hash]])]
        settings.HYDRA_HOST_NAME = host
        tasks.forget_sessions(host, [one.key_hash])
    assert (here.names(), there.names()) == (["kv/b"], ["kv/b"])
    assert before - here.stored_bytes() == 100_000
    settings.HYDRA_HOST_NAME = "here"
    tasks.forget_sessions("there", [two.key_hash])
    assert there.names() == ["kv/b"], "another host's head has that task"


def test_a_session_that_came_back_keeps_its_bytes(here: HostStore) -> None:
    one = chat("one")
    here.save("kv/a", one)
    assert snapshots.forget("here", [one.key_hash, "no key", ""]) == 0
    assert here.names() == ["kv/a"]


def test_sessions_that_nobody_used_for_long_expire_with_their_snapshots(
    here: HostStore, told: Told, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.HYDRA_SESSION_RETENTION_DAYS = 2
    monkeypatch.setattr(snapshots, "SESSIONS_AN_EXPIRY", 2)
    monkeypatch.setattr(snapshots, "NAMES_A_TASK", 1)
    fresh = chat("fresh", age_s=86400)
    stale = [chat(f"stale {number}", age_s=3 * 86400 + number) for number in range(5)]
    here.save("kv/a", stale[0])
    snapshots.sweep("here")
    assert snapshots.expire_chats() == 5
    assert list(ChatSession.objects.all()) == [fresh]
    assert sorted(keys[0] for _, (_, keys) in told("here")) == sorted(old.key_hash for old in stale)
    assert not Snapshot.objects.exists()
    monkeypatch.setattr(snapshots, "MOST_EXPIRIES", 1)
    for number in range(5):
        chat(f"stale again {number}", age_s=3 * 86400)
    assert snapshots.expire_chats() == 2, "bounded a call"


def test_a_snapshot_can_be_deleted_alone(here: HostStore, told: Told) -> None:
    one = chat("one")
    here.save("kv/a", one)
    here.save("kv/b", one)
    snapshots.sweep("here")
    assert snapshots.delete_snapshots([Snapshot.objects.get(name="kv/a").pk]) == 1
    assert told("here") == [("sessions.tasks.drop_snapshots", ["here", ["kv/a"]])]
    tasks.drop_snapshots("here", ["kv/a"])
    assert (here.names(), here.rows()) == (["kv/b"], ["kv/b"])


def test_the_sweep_task_leaves_other_hosts_alone_and_survives_a_silent_store(
    here: HostStore, caplog: pytest.LogCaptureFixture
) -> None:
    one = chat("one")
    here.save("kv/a", one)
    tasks.sweep_store("there")
    assert here.rows() == []
    tasks.sweep_store("here")
    assert here.rows() == ["kv/a"]
    Store.objects.filter(host__name="here").update(port=free_port())
    tasks.sweep_store("here")
    assert "could not be swept" in caplog.text
    assert here.rows() == ["kv/a"]
