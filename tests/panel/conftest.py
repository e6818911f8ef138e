"""Fixtures of the panel's tests. Django is imported inside them: pytest reads this file before it is set up."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from typing import TYPE_CHECKING, Any

import pytest

from tests.panel.engine_stand_in import EngineStandIn

if TYPE_CHECKING:
    from django.contrib.auth.models import AnonymousUser, User

    from tests.panel.page import Page, SmallPool

OpenPage = Callable[..., Coroutine[Any, Any, "Page"]]


@pytest.fixture
def admin(transactional_db: None) -> User:
    from django.contrib.auth.models import User

    return User.objects.create_superuser("admin", password="a password of the tests")


@pytest.fixture
def small_pool(transactional_db: None) -> SmallPool:
    from tests.panel.page import write_small_pool

    return write_small_pool()


@pytest.fixture
async def stand_in(
    small_pool: SmallPool, background: None, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[EngineStandIn]:
    """The small pool's engine, answering; a page waits for that, however busy the machine is."""
    from engines.models import Engine
    from hydra_site import pool_snapshot
    from pools.db import in_db

    monkeypatch.setattr(pool_snapshot, "SLOT_POLL_TIMEOUT_S", 20.0)
    engine = EngineStandIn()
    await engine.start()
    await in_db(Engine.objects.filter(pk=small_pool.engine.pk).update, http_port=engine.port)
    yield engine
    await engine.stop()


@pytest.fixture
async def open_page(admin: User, background: None) -> AsyncIterator[OpenPage]:
    """Opens a WebSocket as a logged-in page (or as `user`); all are closed at the end."""
    from tests.panel.page import Page

    pages: list[Page] = []

    async def opened(path: str, user: User | AnonymousUser = admin) -> Page:
        page = Page(path, user)
        pages.append(page)
        await page.open()
        return page

    yield opened
    for page in pages:
        await page.leave()
