"""A drain in a real browser, from its preview to its end: the page follows it without being asked again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import pytest
from django.contrib.auth.models import User
from playwright.async_api import Page, async_playwright, expect

from engines.models import Engine
from hydra_site.supervisor.home import Services
from pools.db import in_db
from sessions import drains
from sessions.drains import Moved
from sessions.models import Drain
from tests.e2e.test_browser import CHROMIUM, FLAGS, WAIT_MS
from tests.panel.drain_pool import drain_pool
from tests.panel.page import SmallPool
from tests.sessions.site_process import Site

pytestmark = pytest.mark.django_db(transaction=True)
ME = uuid4()
TOLD = [
    Moved("1".rjust(64, "0"), "The greenhouse", "tiny-atlas", "tiny-boreas-a", 900, "moving", "idle"),
    Moved("2".rjust(64, "0"), "The build", "tiny-atlas", "tiny-boreas-a", 12_400, "moved", "live", 4_000_000, 0, 12.3),
    Moved("3".rjust(64, "0"), "", "tiny-atlas", "", 31_000, "stays", "idle", reason="it is too long"),
]


@pytest.fixture
async def pool(transactional_db: None) -> AsyncIterator[SmallPool]:
    async with drain_pool() as pool:
        yield pool


@pytest.fixture
async def site(pool: SmallPool, admin: User, servers: Services, tmp_path: Path) -> AsyncIterator[str]:
    running = Site(tmp_path, servers)
    running.start()
    running.wait_up()
    yield f"http://127.0.0.1:{running.port}"
    assert running.stop() == 0


@pytest.fixture
async def page(site: str) -> AsyncIterator[Page]:
    """Of somebody who is about to log in."""
    async with async_playwright() as playwright:
        chromium = await playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        context = await chromium.new_context(base_url=site)
        context.set_default_timeout(WAIT_MS)
        opened = await context.new_page()
        # Time goes on as ever, and faster where nothing is to be seen but waiting (see `soon`).
        await opened.clock.install()
        faults: list[str] = []
        opened.on("pageerror", lambda error: faults.append(str(error)))
        yield opened
        await chromium.close()
    assert faults == []


async def soon(page: Page) -> None:
    """Its next look is now, if it waits for that by now; else when it is due."""
    await page.clock.fast_forward(1000)


async def test_a_drain_is_previewed_begun_followed_and_over(pool: SmallPool, page: Page) -> None:
    expect.set_options(timeout=WAIT_MS)
    path = f"/drain/engine/{pool.engine.pk}/"
    await page.goto(f"/login/?next={path}")
    await page.get_by_test_id("login-username").fill("admin")
    await page.get_by_test_id("login-password").fill("a password of the tests")
    await page.get_by_test_id("login-submit").click()
    line, state = page.get_by_test_id("drain-line"), page.get_by_test_id("drain-state")
    await expect(line).to_have_count(4)
    await page.get_by_test_id("drain-go").click()
    await expect(state).to_have_attribute("data-state", "running")
    await expect(page.get_by_test_id("drain-empty")).to_contain_text("Nothing has moved yet")
    # Nobody moves it but this test; the page is to show each step without being loaded anew.
    await page.evaluate("window.isTheSame = true")
    drain = await in_db(Drain.objects.get)
    assert await in_db(drains.claim, drain.pk, ME)
    assert await in_db(drains.beat, drain.pk, ME, TOLD[:1])
    await soon(page)
    await expect(line).to_have_count(1)
    await expect(line).to_contain_text("The greenhouse")
    await page.route("**/?part", lambda route: route.abort())
    await soon(page)
    await expect(page.locator("#drain")).to_have_class("drain-parts stale")
    assert await in_db(drains.beat, drain.pk, ME, TOLD)
    await page.unroute("**/?part")
    await soon(page)
    await expect(line).to_have_count(3)
    await expect(page.locator("#drain")).to_have_class("drain-parts")
    assert await page.evaluate("window.isTheSame")
    assert await in_db(drains.finish, drain.pk, ME, TOLD[1:])
    await soon(page)
    await expect(state).to_have_attribute("data-state", "partial")
    await expect(page.get_by_test_id("drain-serve")).to_have_text("Let tiny-atlas serve again")
    assert await page.evaluate("window.isTheSame") is None
    await page.get_by_test_id("drain-serve").click()
    await expect(page.get_by_text("tiny-atlas takes requests again.")).to_be_visible()
    assert (await in_db(Engine.objects.get, pk=pool.engine.pk)).takes_new
