"""The dashboard's WebSocket: a snapshot on connect, then what changed, no faster than the page looks at it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from django.contrib.auth.models import AnonymousUser, User

from hydra_site.pool_watcher import watcher
from pools import services as pools
from pools.db import in_db
from sessions.models import ChatSession
from tests.panel.conftest import OpenPage
from tests.panel.engine_stand_in import EngineStandIn
from tests.panel.page import Page, SmallPool

POOL = "/ws/pool/"


async def next_snapshot(page: Page) -> dict[str, Any]:
    """Looks at frames until one brings a new snapshot."""
    while True:
        frame = await page.hear("pool")
        await page.say({"type": "seen"})
        if frame["snapshot"] is not None:
            return frame


async def test_it_turns_strangers_away_with_a_code_a_browser_can_read(open_page: OpenPage) -> None:
    page = await open_page(POOL, AnonymousUser())
    assert await page.closed_with() == 4401


async def test_a_page_gets_the_whole_pool_on_connect(
    open_page: OpenPage, small_pool: SmallPool, stand_in: EngineStandIn
) -> None:
    page = await open_page(POOL)
    frame = await page.hear("pool")
    snapshot = frame["snapshot"]
    assert [host["name"] for host in snapshot["hosts"]] == ["atlas"]
    assert snapshot["hosts"][0]["gpus"][0]["memory_used_bytes"] == 2 * 2**30
    assert snapshot["engines"][0]["engine"]["state"] == "ready"
    assert snapshot["engines"][0]["cells"][0]["state"] == "idle"
    assert frame["samples"][-1]["slots"] == 1


async def test_a_user_sees_own_titles_and_the_staff_all(open_page: OpenPage, small_pool: SmallPool) -> None:
    bob = await in_db(User.objects.create_user, "bob")
    for name, scope in (("a", f"user:{bob.pk}"), ("b", "user:0")):
        await in_db(ChatSession.objects.create, key_hash=name * 64, title=name, model_name="tiny", scope=scope)
    seen = {}
    for page in (await open_page(POOL), await open_page(POOL, bob)):
        snapshot = (await page.hear("pool"))["snapshot"]
        seen[page] = sorted(chat["title"] for chat in snapshot["sessions"]), len(snapshot["session_pages"])
    assert list(seen.values()) == [(["a", "b"], 2), (["", "a"], 1)]


async def test_an_empty_pool_is_a_snapshot_too(open_page: OpenPage) -> None:
    page = await open_page(POOL)
    frame = await page.hear("pool")
    assert (frame["snapshot"]["hosts"], frame["snapshot"]["engines"], frame["snapshot"]["sessions"]) == ([], [], [])


async def test_a_changed_row_reaches_the_page_as_a_newer_version(open_page: OpenPage, small_pool: SmallPool) -> None:
    page = await open_page(POOL)
    first = await next_snapshot(page)
    await in_db(pools.join_host, "boreas")
    second = await next_snapshot(page)
    assert second["version"] > first["version"]
    assert [host["name"] for host in second["snapshot"]["hosts"]] == ["atlas", "boreas"]


async def test_an_unchanged_pool_is_told_without_its_snapshot(open_page: OpenPage, small_pool: SmallPool) -> None:
    page = await open_page(POOL)
    first = await next_snapshot(page)
    second = await page.hear("pool")
    assert second["snapshot"] is None
    assert second["version"] == first["version"]
    assert second["taken_at"] > first["taken_at"]


async def test_a_page_that_does_not_look_gets_no_second_frame(open_page: OpenPage, small_pool: SmallPool) -> None:
    slow = await open_page(POOL)
    quick = await open_page(POOL)
    await slow.hear("pool")
    for _ in range(3):
        await quick.hear("pool")
        await quick.say({"type": "seen"})
    assert await slow.hears_nothing(within_s=0.05)


async def test_a_later_page_gets_the_samples_of_an_earlier_one(open_page: OpenPage, stand_in: EngineStandIn) -> None:
    first = await open_page(POOL)
    for _ in range(2):
        await first.hear("pool")
        await first.say({"type": "seen"})
    second = await open_page(POOL)
    frame = await second.hear("pool")
    assert len(frame["samples"]) >= 2
    assert [sample["slots"] for sample in frame["samples"]] == [1] * len(frame["samples"])


async def test_nobody_polls_once_the_last_page_has_left(open_page: OpenPage, small_pool: SmallPool) -> None:
    page = await open_page(POOL)
    await page.hear("pool")
    assert any(task.get_name() == "pool-watcher" for task in asyncio.all_tasks())
    await page.leave()
    assert not any(task.get_name().startswith("pool-") for task in asyncio.all_tasks())


async def test_events_of_a_burst_are_answered_by_few_refreshes(open_page: OpenPage, small_pool: SmallPool) -> None:
    page = await open_page(POOL)
    await next_snapshot(page)
    samples_before = len(watcher().history)

    def burst() -> None:
        for _ in range(40):
            pools.join_host("boreas")

    await in_db(burst)
    await next_snapshot(page)
    assert len(watcher().history) - samples_before < 20


@pytest.mark.parametrize("text", ["", "not json", "[]", '{"type": "other"}'])
async def test_whatever_a_page_says_counts_as_having_looked(
    open_page: OpenPage, small_pool: SmallPool, text: str
) -> None:
    page = await open_page(POOL)
    await page.hear("pool")
    await page.say(text)
    assert (await page.hear("pool"))["type"] == "pool"
