"""Conversations parked, brought back, moved and deleted in the admin, over real engines that know of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.contrib.admin.models import LogEntry
from django.contrib.auth import get_user_model
from django.db import connections
from django.urls import reverse

from pools.db import in_db
from sessions.models import ChatSession
from sessions.turn import wait_for_writes
from tests.sessions.local_client import LocalClient
from tests.sessions.routed_pool import PATIENCE_S, Conversation, RoutedPool, routed_pools
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db(transaction=True)
LIST = reverse("admin:hydra_sessions_chatsession_changelist")
BUSY = "A request of the session is running."


@pytest.fixture
async def pool(tiny_model: Callable[..., SyntheticModel], tmp_path: Path, settings: Any) -> AsyncIterator[RoutedPool]:
    settings.ALLOWED_HOSTS = ["localhost"]
    async with routed_pools(tmp_path) as start:
        yield await start(tiny_model("llama", layers=12), 2, context_tokens=8192)
        await sync_to_async(connections.close_all)()


class Desk:
    """A person at the admin's list of sessions."""

    def __init__(self) -> None:
        self._browser = LocalClient()

    async def enter(self) -> None:
        await self._browser.aforce_login(await in_db(get_user_model().objects.create_superuser, "admin"))

    async def act(self, action: str, *chats: ChatSession, **fields: str) -> str:
        """The page that comes of an action on these rows, as text."""
        chosen = {"action": action, "_selected_action": [chat.pk for chat in chats], **fields}
        return await self._page(LIST, chosen)

    async def delete_one(self, chat: ChatSession) -> str:
        return await self._page(reverse("admin:hydra_sessions_chatsession_delete", args=[chat.pk]), {"post": "yes"})

    async def _page(self, path: str, fields: dict[str, Any]) -> str:
        answer = await self._browser.post(path, fields, follow=True)
        assert answer.status_code == 200
        return str(answer.content.decode())


async def held(pool: RoutedPool, session: str) -> set[str]:
    """The names of the engines that hold something of it."""
    rates = {name: await asyncio.to_thread(engine.get, "/rates") for name, engine in pool.engines.items()}
    return {name for name, told in rates.items() if session in told["sessions"]}


async def rows() -> dict[str, ChatSession]:
    return {chat.key_hash: chat for chat in await in_db(list, ChatSession.objects.all())}


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await asyncio.to_thread(true):  # noqa: ASYNC110 -- another process tells nobody
            await asyncio.sleep(0.02)


async def test_sessions_are_parked_moved_and_deleted_unless_a_request_of_theirs_runs(pool: RoutedPool) -> None:
    desk = Desk()
    await desk.enter()
    await parked_moved_and_brought_back(pool, desk)
    await busy_ones_stay(pool, desk)
    (chat,) = (await rows()).values()
    page = ""
    async with asyncio.timeout(PATIENCE_S):
        while "was deleted successfully" not in page:  # its engine may not have seen yet that nobody listens
            page = await desk.delete_one(chat)
    assert await held(pool, chat.key_hash) == set()
    assert await rows() == {}


async def parked_moved_and_brought_back(pool: RoutedPool, desk: Desk) -> None:
    talk = Conversation(LocalClient(), {"X-Session-Id": "stone"})
    headers, usage = await talk.say("Tell me of a stone.")
    session, home = headers["X-Hydra-Session"], headers["X-Hydra-Engine"]
    await wait_for_writes(PATIENCE_S)
    chat = (await rows())[session]
    assert "1 parked" in await desk.act("park", chat)
    assert await held(pool, session) == set()
    elsewhere = next(name for name in pool.engines if name != home)
    assert f"1 moved to {elsewhere}" in await desk.act("move", chat, engine=elsewhere)
    assert "No engine &#x27;nowhere&#x27; serves" in await desk.act("move", chat, engine="nowhere")
    assert "1 will go on where it costs least" in await desk.act("resume", chat)
    assert (await rows())[session].wanted_engine_id is None
    await desk.act("move", chat, engine=elsewhere)
    headers, again = await talk.say("And more.")
    assert headers["X-Hydra-Engine"] == elsewhere
    assert again["prompt_tokens_details"]["cached_tokens"] >= 0.9 * usage["prompt_tokens"]
    await wait_for_writes(PATIENCE_S)


async def busy_ones_stay(pool: RoutedPool, desk: Desk) -> None:
    """All are chosen; engines and rows keep the one that talks, and the page says why."""
    talk = Conversation(LocalClient(), {"X-Session-Id": "busy"})
    headers, _ = await talk.say("Tell me of a river.")
    session, home = headers["X-Hydra-Session"], headers["X-Hydra-Engine"]
    await wait_for_writes(PATIENCE_S)
    chats = await rows()
    others = [chat for name, chat in chats.items() if name != session]
    async with asyncio.timeout(PATIENCE_S):
        page = ""
        while f"{len(others)} parked" not in page:  # a state of one may be on its way to the store
            page = await desk.act("park", *others)
    with pool.slowed():
        answer = asyncio.create_task(talk.say("Tell me all of it.", max_tokens=6000))
        await until(lambda: pool.engines[home].get("/rates")["decoding"])
        one = await desk.delete_one(chats[session])
        assert "Are you sure" in await desk.act("delete_selected", *chats.values())
        assert set(await rows()) == set(chats), "it only asks yet"
        many = await desk.act("delete_selected", *chats.values(), post="yes")
        assert not answer.done()
        assert await held(pool, session) == {home}
        answer.cancel()
    for page in (one, many):
        assert BUSY in page
    assert "was deleted successfully" not in one
    assert f"{len(chats) - 1} deleted" in many
    assert set(await rows()) == {session}
    assert [await held(pool, gone) for gone in chats if gone != session] == [set()] * (len(chats) - 1)
    # Only what is gone is written down as deleted.
    assert await in_db(LogEntry.objects.count) == len(chats) - 1
    await wait_for_writes(PATIENCE_S)
