"""What a snapshot of the pool says, and what it refuses to make up."""

from __future__ import annotations

import dataclasses
import json
from datetime import UTC, datetime

import pytest

from engines.config import SlotView
from engines.models import Engine
from engines.services import EngineView
from hydra_site.pool_snapshot import (
    EngineCard,
    PoolSnapshot,
    SessionPage,
    attention_of,
    cell_of,
    sample_of,
    take_snapshot,
    to_wire,
)
from pools import jobs
from pools.choices import HostDuty, JobKind
from pools.db import in_db
from pools.models import Gpu, Host
from pools.release import this_release
from pools.services import HostView
from sessions.models import ChatSession
from sessions.services import ChatView
from tests.panel.engine_stand_in import IDLE, EngineStandIn
from tests.panel.page import SmallPool

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
DECODING = SlotView(0, "decode", True, "r1", 100, 100, 20, 40, 1024, 41.26)
READING = dataclasses.replace(DECODING, state="prefill", prompt_done_tokens=25, decoded_tokens=0, tokens_per_s=0.0)
HOST = HostView(1, "atlas", "up", "A CPU", 2, 8, 4, 0.1, NOW, ())
ENGINE = EngineView(
    id=1,
    name="tiny-atlas",
    host_id=1,
    gpu_id=1,
    model_name="tiny",
    variant_filename="tiny.gguf",
    quantization="Q8_0",
    wanted="running",
    state="ready",
    epoch=1,
    slots=4,
    context_tokens=1024,
    threads=1,
    base_url="http://127.0.0.1:8081",
    last_error="",
    restarts=0,
    last_seen_at=NOW,
    ready_at=NOW,
)


def test_it_shows_progress_only_while_a_prompt_is_read() -> None:
    assert cell_of(READING).progress == 0.25
    assert cell_of(DECODING).progress is None
    assert cell_of(IDLE).progress is None


def test_it_shows_a_speed_only_while_tokens_are_written() -> None:
    assert cell_of(DECODING).tokens_per_s == 41.3
    assert cell_of(READING).tokens_per_s is None


def test_an_idle_slots_context_is_what_it_keeps_for_the_next_turn() -> None:
    assert cell_of(DECODING).context_used_tokens == 120
    assert cell_of(dataclasses.replace(IDLE, cached_tokens=77)).context_used_tokens == 77


def test_a_sample_sums_only_the_engines_that_answered() -> None:
    answered = EngineCard(ENGINE, (cell_of(DECODING), cell_of(IDLE)), None)
    silent = EngineCard(ENGINE, (cell_of(DECODING),), NOW)
    sample = sample_of(NOW, [answered, silent])
    assert (sample.tokens_per_s, sample.busy_slots, sample.slots) == (41.3, 1, 2)


def test_a_sample_without_any_answer_is_unknown_and_not_zero() -> None:
    sample = sample_of(NOW, [EngineCard(ENGINE, (cell_of(DECODING),), NOW), EngineCard(ENGINE, (), None)])
    assert (sample.tokens_per_s, sample.busy_slots, sample.slots) == (None, None, None)


def test_nothing_needs_attention_when_all_is_well() -> None:
    starting = dataclasses.replace(ENGINE, state="starting")
    stopped = dataclasses.replace(ENGINE, state="stopped", wanted="stopped")
    assert attention_of((HOST,), (ENGINE, starting, stopped)) == ()


def test_failures_come_before_warnings_and_carry_the_last_error() -> None:
    unhealthy = dataclasses.replace(ENGINE, name="a", state="unhealthy")
    failed = dataclasses.replace(ENGINE, name="b", state="failed", last_error="no memory", restarts=1)
    found = attention_of((HOST,), (unhealthy, failed))
    assert [(item.severity, item.subject) for item in found] == [("failure", "Engine b"), ("warning", "Engine a")]
    assert found[0].message == "no memory"
    assert all(item.hint for item in found)


def test_a_lost_host_speaks_for_its_silent_engines() -> None:
    lost = dataclasses.replace(HOST, state="lost")
    found = attention_of((lost,), (dataclasses.replace(ENGINE, state="unhealthy"),))
    assert [item.subject for item in found] == ["Host atlas"]


def test_a_page_never_learns_where_an_engine_listens() -> None:
    snapshot = PoolSnapshot(1, NOW, (HOST,), (EngineCard(ENGINE, (cell_of(DECODING),), NOW),), (), ())
    text = json.dumps(to_wire(snapshot))
    assert "8081" not in text
    assert json.loads(text)["engines"][0]["cells_stale_since"] == NOW.timestamp()


def test_time_alone_does_not_make_a_snapshot_another_one() -> None:
    first = PoolSnapshot(1, NOW, (HOST,), (), (), ())
    later = dataclasses.replace(first, version=9, taken_at=datetime.now(UTC))
    assert later.same_content(first)
    assert not dataclasses.replace(later, hosts=()).same_content(first)


@pytest.mark.django_db(transaction=True)
async def test_a_pool_without_rows_is_an_empty_snapshot() -> None:
    snapshot, sample = await take_snapshot(None)
    assert (snapshot.version, snapshot.hosts, snapshot.engines, snapshot.sessions, snapshot.attention) == (
        1,
        (),
        (),
        (),
        (),
    )
    assert sample.slots is None


async def test_builds_and_downloads_are_there_while_they_wait_and_run(small_pool: SmallPool) -> None:
    job_id = await in_db(jobs.enqueue, small_pool.host.name, JobKind.DOWNLOAD, "hf:own/tiny:Q4_K_M")
    waiting, _ = await take_snapshot(None)
    assert [(work.subject, work.state, work.total) for work in waiting.work] == [("hf:own/tiny:Q4_K_M", "queued", 0)]
    await in_db(jobs.claim, job_id, small_pool.host.name)
    await in_db(jobs.progress, job_id, "downloading", 1, 4)
    running, _ = await take_snapshot(waiting)
    assert running.version > waiting.version
    assert to_wire(running)["work"][0] == {
        "id": job_id,
        "host": "atlas",
        "kind": "download",
        "subject": "hf:own/tiny:Q4_K_M",
        "state": "running",
        "stage": "downloading",
        "done": 1,
        "total": 4,
    }
    await in_db(jobs.cancel, job_id)
    assert (await take_snapshot(running))[0].work == ()


async def test_what_runs_comes_before_what_waits(small_pool: SmallPool) -> None:
    running = await in_db(jobs.enqueue, "atlas", JobKind.BUILD, "sm_60")
    await in_db(jobs.claim, running, "atlas")
    await in_db(jobs.enqueue, "atlas", JobKind.DOWNLOAD, "hf:own/tiny:Q4_K_M")
    snapshot, _ = await take_snapshot(None)
    assert [work.state for work in snapshot.work] == ["running", "queued"]


async def test_a_page_learns_duty_release_and_what_a_card_tells(small_pool: SmallPool) -> None:
    await in_db(Host.objects.update, duty=HostDuty.DRAINING, version="0.0.1+old", schema="another")
    processes = [{"pid": 7, "name": "", "memory_bytes": None}]
    card = {"clock_mhz": 1695, "power_w": 287.0, "power_limit_w": 350.0, "processes": processes}
    await in_db(Gpu.objects.update, **card)
    wire = to_wire((await take_snapshot(None))[0])
    (host,) = wire["hosts"]
    assert (host["duty"], host["version"], wire["release"]) == ("draining", "0.0.1+old", this_release().version)
    assert host["version_differs"] and host["schema_differs"]
    assert {name: host["gpus"][0][name] for name in card} == card
    assert host["gpus"][0]["temperature_c"] is None


async def test_sessions_come_with_their_pages(small_pool: SmallPool) -> None:
    chat = await in_db(ChatSession.objects.create, key_hash="a" * 64, model_name="tiny", scope="user:7")
    wire = to_wire((await take_snapshot(None))[0])
    assert wire["session_pages"] == [{"id": chat.pk, "key": "a" * 64}]


def test_of_others_conversations_one_sees_neither_title_nor_page() -> None:
    chats = tuple(
        ChatView(chat_id, f"title {chat_id}", "api", "tiny", "a", 1, 2, 3, "done", NOW, NOW) for chat_id in (1, 2)
    )
    pages = (SessionPage(1, "one", "user:1"), SessionPage(2, "two", "user:2"))
    snapshot = PoolSnapshot(1, NOW, (), (), chats, (), session_pages=pages)
    seen = snapshot.seen_by("user:2")
    assert [chat.title for chat in seen.sessions] == ["", "title 2"]
    assert seen.session_pages == pages[1:]
    assert snapshot.seen_by(None) == snapshot


async def test_the_version_grows_only_when_something_changed(small_pool: SmallPool, stand_in: EngineStandIn) -> None:
    first, _ = await take_snapshot(None)
    same, _ = await take_snapshot(first)
    await in_db(Engine.objects.filter(pk=small_pool.engine.pk).update, restarts=1)
    changed, _ = await take_snapshot(same)
    assert (first.version, same.version, changed.version) == (1, 1, 2)
    assert same.taken_at > first.taken_at


async def test_a_silent_engine_keeps_its_cells_and_tells_their_age(stand_in: EngineStandIn) -> None:
    stand_in.slots = [DECODING]
    before, _ = await take_snapshot(None)
    await stand_in.stop()
    silent, sample = await take_snapshot(before)
    still_silent, _ = await take_snapshot(silent)
    (card,) = silent.engines
    assert card.cells == before.engines[0].cells
    assert card.cells_stale_since is not None
    assert still_silent.engines[0].cells_stale_since == card.cells_stale_since
    assert sample.tokens_per_s is None


async def test_places_for_whole_rows_are_shown_once_they_hold_something(
    small_pool: SmallPool, stand_in: EngineStandIn
) -> None:
    slots = small_pool.engine.slots
    stand_in.slots = [dataclasses.replace(IDLE, id=number) for number in range(2 * slots)]
    stand_in.slots[-1] = dataclasses.replace(DECODING, id=2 * slots - 1)
    shown, sample = await take_snapshot(None)
    assert [cell.id for cell in shown.engines[0].cells] == [*range(slots), 2 * slots - 1]
    assert (sample.busy_slots, sample.slots) == (1, slots)


async def test_cells_of_an_earlier_process_are_not_shown_for_the_next_one(
    small_pool: SmallPool, stand_in: EngineStandIn
) -> None:
    before, _ = await take_snapshot(None)
    await stand_in.stop()
    await in_db(Engine.objects.filter(pk=small_pool.engine.pk).update, epoch=7)
    after, _ = await take_snapshot(before)
    assert after.engines[0].cells == ()
