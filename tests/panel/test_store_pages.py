"""What people see of a host's store and its snapshots, and what they never see."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from engines.models import Engine, Store, StoreSample
from engines.store_rows import StoreView, store_views
from hydra_site.pool_snapshot import attention_of, take_snapshot, to_wire
from pools.db import in_db
from sessions.models import ChatSession, Snapshot
from tests.panel.page import SmallPool

NOW = datetime(2026, 1, 2, tzinfo=UTC)
SECRET = "5ec2e7" * 10


@pytest.fixture
def store(small_pool: SmallPool) -> Store:
    Engine.objects.update(rpc_port=31001, rpc_secret=SECRET)
    return Store.objects.create(
        host_id=small_pool.engine.host_id,
        state="ready",
        address="127.0.0.1",
        port=31002,
        http_port=31003,
        secret=SECRET,
        pid=42,
        pid_start_time=1.0,
        capacity_bytes=1 << 30,
        used_bytes=256 << 20,
        stored_bytes=100 << 20,
        logical_bytes=250 << 20,
        snapshots_stored=7,
        hits=30,
        misses=10,
        last_seen_at=timezone.now(),
    )


@pytest.fixture
def browser(admin: User, client: Client) -> Iterator[Client]:
    client.force_login(admin)
    return client


def sample(store: Store, slot: int, **values: Any) -> StoreSample:
    names = ("used_bytes", "stored_bytes", "logical_bytes", "snapshots_stored", "misses", "evictions", "errors")
    figures = dict.fromkeys(names, 0)
    figures |= {"taken_at": timezone.now(), "process_start_time": 1.0, "hits": 0, **values}
    return StoreSample.objects.create(store=store, slot=slot, **figures)


async def test_the_pool_page_is_told_of_each_hosts_store_and_not_how_to_reach_it(store: Store) -> None:
    snapshot, _ = await take_snapshot(None)
    (told,) = to_wire(snapshot)["stores"]
    assert (told["host_id"], told["state"]) == (store.host_id, "ready")
    assert (told["used_bytes"], told["capacity_bytes"], told["snapshots"]) == (256 << 20, 1 << 30, 7)
    assert (told["dedup_ratio"], told["hit_share"]) == (2.5, None)
    text = json.dumps(to_wire(snapshot))
    assert SECRET not in text
    assert not any(str(port) in text for port in (31001, 31002, 31003))
    await in_db(Store.objects.update, state="off")
    without, _ = await take_snapshot(snapshot)
    assert without.stores == ()


def test_found_look_ups_are_those_of_the_last_hour_and_of_one_process(store: Store) -> None:
    sample(store, 1, hits=5, misses=5)
    assert store_views()[0].hit_share == 0.5
    sample(store, 2, hits=14, misses=6)
    assert store_views()[0].hit_share == 0.9
    sample(store, 3, hits=1, misses=3, process_start_time=2.0)
    assert store_views()[0].hit_share == 0.25


def test_a_store_that_does_not_come_up_wants_attention(store: Store) -> None:
    view = store_views()[0]
    failed = StoreView(**{**vars(view), "state": "failed", "restarts": 3, "last_error": "it did not answer"})
    (told,) = attention_of((), (), (failed,))
    assert (told.severity, told.message) == ("warning", "it did not answer")
    once = StoreView(**{**vars(view), "state": "failed", "restarts": 1})
    assert attention_of((), (), (once, view)) == ()


def test_the_admin_shows_stores_and_engines_without_their_secrets(store: Store, browser: Client) -> None:
    sample(store, 1)
    pages = [
        reverse("admin:engines_store_changelist"),
        reverse("admin:engines_store_change", args=[store.pk]),
        reverse("admin:engines_storesample_changelist"),
        reverse("admin:engines_engine_change", args=[Engine.objects.get().pk]),
    ]
    for page in pages:
        answer = browser.get(page)
        assert answer.status_code == 200
        assert SECRET not in answer.content.decode()


def test_a_session_that_is_deleted_in_the_admin_takes_its_snapshots_along(store: Store, browser: Client) -> None:
    chat = ChatSession.objects.create(key_hash="a" * 64, model_name="tiny")
    Snapshot.objects.create(chat=chat, store=store, name="kv/a", saved_at=NOW, last_seen_at=NOW)
    assert browser.get(reverse("admin:hydra_sessions_snapshot_changelist")).status_code == 200
    answer = browser.post(reverse("admin:hydra_sessions_chatsession_delete", args=[chat.pk]), {"post": "yes"})
    assert answer.status_code == 302
    assert not ChatSession.objects.exists()
    assert not Snapshot.objects.exists()
