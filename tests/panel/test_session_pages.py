"""The sessions pages: for users only, each their own, and with what can be done to a conversation."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth.models import User
from django.db import connections
from django.test import AsyncClient
from django.utils import timezone

from engines.client import close_client_session
from engines.models import Engine, Store
from pools.db import in_db
from sessions import services
from sessions.choices import ChatSource
from sessions.identity import Identity
from sessions.models import ChatSession, Snapshot
from sessions.services import TurnEnd, TurnStart
from tests.panel.drain_pool import TITLES, drain_pool
from tests.panel.page import SmallPool

pytestmark = pytest.mark.django_db(transaction=True)
EXPLANATION = {
    "why": "it costs least",
    "chosen": {"engine": "cpu-0"},
    "candidates": [
        {"engine": "cpu-0", "mode": "solo", "cost_s": 0.5, "cached_tokens": 7, "terms": {"prefill_s": 0.2, "decode_s": 0.3}}
    ],
    "refusals": [{"engine": "cpu-9", "mode": "solo", "reason": "it is not ready", "detail": "failed"}],
}  # fmt: skip


def a_session(user_id: int, engine_id: int, title: str) -> str:
    identity = Identity.for_user(user_id, title)
    start = TurnStart(
        uuid.uuid4(), identity, ChatSource.PLAYGROUND, title, "tiny", engine_id, explanation=EXPLANATION,
        predicted_first_token_s=0.25,
    )  # fmt: skip
    turn = services.begin_turn(start)
    services.end_turn(turn, TurnEnd("done", engine_id, 1.0, prompt_tokens=9, first_token_s=0.3))
    return identity.key_hash


@pytest.fixture
async def browser(transactional_db: None) -> AsyncIterator[AsyncClient]:
    """Pages are answered on a thread of Django's, whose connection nobody else would close."""
    yield AsyncClient()
    await sync_to_async(connections.close_all)()
    await close_client_session()


async def test_people_see_their_own_sessions_and_staff_sees_all(
    admin: User, small_pool: SmallPool, browser: AsyncClient
) -> None:
    bob = await in_db(User.objects.create_user, "bob", password="a password of the tests")
    his = await in_db(a_session, bob.pk, small_pool.engine.pk, "About rivers")
    hers = await in_db(a_session, admin.pk, small_pool.engine.pk, "About stones")
    client = browser
    assert (await client.get("/sessions/")).headers["Location"] == "/login/?next=/sessions/"
    await client.aforce_login(bob)
    listed = (await client.get("/sessions/")).content.decode()
    assert his in listed
    assert hers not in listed
    assert (await client.get(f"/sessions/{hers}/")).status_code == 404
    assert (await client.post(f"/sessions/{hers}/delete/")).status_code == 404
    shown = (await client.get(f"/sessions/{his}/")).content.decode()
    for text in (
        "About rivers",
        "it costs least",
        "prefill 0.200",
        "decode 0.300",
        "it is not ready (failed)",
        "0.250",
    ):
        assert text in shown
    assert (await client.post(f"/sessions/{his}/nonsense/")).status_code == 404
    deleted = await client.post(f"/sessions/{his}/delete/")
    assert deleted.headers["Location"] == "/sessions/"
    assert (await client.get(f"/sessions/{his}/")).status_code == 404
    await client.aforce_login(admin)
    assert hers in (await client.get("/sessions/")).content.decode()


def saved_in_two_stores(key: str, host_id: int) -> None:
    from pools.models import Host

    chat = ChatSession.objects.get(key_hash=key)
    for state, tokens, host in (("ready", 1800, host_id), ("unhealthy", 900, Host.objects.create(name="boreas").pk)):
        store = Store.objects.create(host_id=host, state=state, address="127.0.0.1", port=31002, secret="secret")
        Snapshot.objects.create(
            chat=chat, store=store, name="kv/a", tokens=tokens, size_bytes=3 << 29, last_seen_at=timezone.now(),
            saved_at=timezone.now() - timedelta(hours=2),
        )  # fmt: skip


async def test_a_page_says_where_the_state_is_and_how_it_came_there(
    admin: User, small_pool: SmallPool, browser: AsyncClient
) -> None:
    key = await in_db(a_session, admin.pk, small_pool.engine.pk, "About stones")
    await browser.aforce_login(admin)
    nothing = (await browser.get(f"/sessions/{key}/")).content.decode()
    assert "Nothing of it is held or saved any more" in nothing
    assert "tiny-atlas made it 9 tokens long, all computed" in nothing
    await in_db(saved_in_two_stores, key, small_pool.host.pk)
    text = (await browser.get(f"/sessions/{key}/")).content.decode()
    for told in (
        "the next turn reads it back",
        "1,800 tokens went to the store of atlas",
        "1.5 GiB",
        "does not answer",
    ):
        assert told in text
    assert text.index("store of atlas") < text.index("store of boreas")


async def test_an_empty_page_teaches(admin: User, browser: AsyncClient) -> None:
    client = browser
    await client.aforce_login(admin)
    text = (await client.get("/sessions/")).content.decode()
    assert "No session yet" in text
    assert "X-Session-Id: my-first" in text
    assert 'name="viewport"' in text


async def test_a_request_that_failed_has_no_figures_that_nobody_counted(
    admin: User, small_pool: SmallPool, browser: AsyncClient
) -> None:
    def failed() -> str:
        identity = Identity.for_user(admin.pk, "Too long")
        turn = services.begin_turn(
            TurnStart(uuid.uuid4(), identity, ChatSource.PLAYGROUND, "Too long", "tiny", small_pool.engine.pk)
        )
        services.end_turn(turn, TurnEnd("failed", small_pool.engine.pk, 1.0, error_code="context_length_exceeded"))
        return identity.key_hash

    key = await in_db(failed)
    await browser.aforce_login(admin)
    text = (await browser.get(f"/sessions/{key}/")).content.decode()
    assert "context_length_exceeded" in text and "No tokens were counted." in text
    assert "Prompt 0 tokens" not in text and "First token expected" not in text


async def test_a_conversation_is_offered_only_where_it_is_not_and_a_move_to_its_own_engine_says_so(
    background: None, admin: User, browser: AsyncClient
) -> None:
    async with drain_pool() as pool:
        chat = await in_db(ChatSession.objects.get, title=TITLES[0])
        await browser.aforce_login(admin)
        path = f"/sessions/{chat.key_hash}/"
        text = (await browser.get(path)).content.decode()
        assert "<option>tiny-boreas-a</option><option>tiny-boreas-b</option>" in text
        assert "not saved" in text
        moved = await browser.post(f"{path}migrate/", {"engine": pool.engine.name}, follow=True)
        assert "It is at tiny-atlas already, and its next turn goes on there." in moved.content.decode()
        await in_db(Engine.objects.exclude(pk=pool.engine.pk).update, takes_new=False)
        assert 'title="No other engine serves its model">Move' in (await browser.get(path)).content.decode()
        await close_client_session()
