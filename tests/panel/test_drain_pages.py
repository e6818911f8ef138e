"""Draining from the panel and the admin: what would move where, then the moves, for the staff who may change such rows."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import pytest
from django.contrib.auth.models import Permission, User
from django.db.models.functions import Now
from django.test import Client

from engines.client import close_client_session
from engines.models import Engine
from pools.db import in_db
from sessions import drains
from sessions.drains import Moved
from sessions.models import Drain
from tests.panel.drain_pool import drain_pool
from tests.panel.page import SmallPool

pytestmark = pytest.mark.django_db(transaction=True)
KEY = "a" * 64
ME = uuid4()


@pytest.fixture
def browser(admin: User, client: Client) -> Client:
    client.force_login(admin)
    return client


@pytest.fixture
async def pool(background: None) -> AsyncIterator[SmallPool]:
    async with drain_pool() as pool:
        yield pool
        await close_client_session()


async def page(browser: Client, path: str, **form: Any) -> str:
    def ask() -> str:
        answer = browser.post(path, form, follow=True) if form else browser.get(path, follow=True)
        assert answer.status_code == 200
        return str(answer.content.decode())

    return await in_db(ask)


async def test_a_preview_names_each_conversation_its_target_bytes_and_pause(pool: SmallPool, browser: Client) -> None:
    text = await page(browser, f"/drain/engine/{pool.engine.pk}/")
    assert text.count('data-testid="drain-line"') == 4
    assert "Why does the build fail?" in text
    assert "answers now" in text
    assert text.count("tiny-boreas-") == 3
    shown = text.replace("\xa0", " ")
    assert '<td data-label="Size" class="number">242.2 MB</td>' in shown, "of the one that answers"
    assert '<td data-label="Pause">8.4 ms</td>' in shown
    assert text.count("none: idle") == 2
    assert "stays: what runs on the other engines leaves no room for it" in text
    assert (await in_db(Engine.objects.get, pk=pool.engine.pk)).takes_new, "a look changes nothing"


async def test_an_answer_of_several_choices_needs_as_many_slots_at_its_target(
    background: None, browser: Client
) -> None:
    async with drain_pool(choices=5) as pool:
        text = await page(browser, f"/drain/engine/{pool.engine.pk}/")
        await close_client_session()
    assert "answers now, 5 choices" in text
    assert '<td data-label="Tokens" class="number">62,000</td>' in text, "five times 12,400"
    assert "stays: it writes more choices at once than any other engine has slots" in text


async def test_a_model_that_nobody_else_serves_is_named_before_it_is_drained(pool: SmallPool, browser: Client) -> None:
    path = f"/drain/engine/{pool.engine.pk}/"
    assert "drain-unserved" not in await page(browser, path)
    await in_db(Engine.objects.exclude(pk=pool.engine.pk).update, takes_new=False)
    text = await page(browser, path)
    assert "No other engine serves tiny." in text and "answered with 503" in text
    await in_db(Engine.objects.update, takes_new=False)
    assert "drain-unserved" not in await page(browser, path), "it serves nothing already"


@pytest.mark.parametrize("kind", ["engine", "card", "host"])
async def test_to_go_closes_it_and_shows_how_far_it_is(pool: SmallPool, browser: Client, kind: str) -> None:
    subject_id = {"engine": pool.engine.pk, "card": pool.gpu.pk, "host": pool.host.pk}[kind]
    path = f"/drain/{kind}/{subject_id}/"
    text = await page(browser, path, csrf="")
    assert 'data-state="running"' in text
    assert "Nothing has moved yet" in text
    assert not (await in_db(Engine.objects.get, pk=pool.engine.pk)).takes_new
    drain = await in_db(Drain.objects.get)
    assert (drain.kind, drain.stops, drain.begun_by_id is not None) == (kind, False, True)
    told = [
        Moved(KEY, "The boat", "tiny-atlas", "tiny-boreas-a", 900, "moved", "live", 4_000_000, 1_000_000, 12.3, 0.4),
        Moved("b" * 64, "", "tiny-atlas", "", 5, "stays", "idle", reason="it is too long"),
    ]
    assert await in_db(drains.claim, drain.pk, ME)
    assert await in_db(drains.beat, drain.pk, ME, told)
    assert "The boat" in await page(browser, path), "a second look shows the one that goes on"
    part = await page(browser, f"/drains/{drain.pk}/?part")
    assert "<html" not in part
    assert "3.8 MB" in part.replace("\xa0", " ")
    assert "12 ms" in part
    assert await in_db(drains.finish, drain.pk, ME, told)
    assert 'data-state="partial"' in await page(browser, f"/drains/{drain.pk}/")
    assert "takes nothing new already" in await page(browser, path)
    assert "takes requests again" in await page(browser, f"{path}serve/", csrf="")
    assert (await in_db(Engine.objects.get, pk=pool.engine.pk)).takes_new


def test_what_is_empty_says_so(small_pool: SmallPool, browser: Client) -> None:
    Engine.objects.update(state="stopped", http_port=None)
    assert "No engine runs here" in browser.get(f"/drain/card/{small_pool.gpu.pk}/").content.decode()
    again = browser.post(f"/drain/card/{small_pool.gpu.pk}/", follow=True).content.decode()
    assert "No engine runs on atlas/cpu0." in again
    assert browser.get("/drain/card/0/").status_code == 404
    assert browser.get("/drain/planet/1/").status_code == 404
    assert browser.get("/drains/0/").status_code == 404


def test_a_part_of_what_is_drained_says_what_to_do_and_what_is_gone_says_so(
    small_pool: SmallPool, browser: Client
) -> None:
    Engine.objects.update(http_port=1)
    drain_id = drains.begin(drains.named("host", "atlas"), stops=False, send=False)
    answer = browser.post(f"/drain/engine/{small_pool.engine.pk}/serve/", follow=True).content.decode()
    assert "The whole host atlas is being drained: have that serve again." in answer
    path = "/admin/engines/engine/"
    form = {"action": "activate", "_selected_action": [small_pool.engine.pk]}
    assert "The whole host atlas" in browser.post(path, form, follow=True).content.decode()
    assert not Engine.objects.get().takes_new
    engine = drains.begin(drains.named("engine", "tiny-atlas"), stops=False, send=False)
    Engine.objects.all().delete()
    drains.keep_closed()
    text = browser.get(f"/drains/{engine}/").content.decode()
    assert "ended: it is not in the pool any more" in text
    assert "drain-serve" not in text
    assert "drain-serve" in browser.get(f"/drains/{drain_id}/").content.decode()


def test_nobody_but_the_staff(small_pool: SmallPool, admin: User, client: Client) -> None:
    path = f"/drain/engine/{small_pool.engine.pk}/"
    assert client.post(path).headers["Location"].startswith("/login/")
    client.force_login(User.objects.create_user("bob"))
    for url in (path, "/drains/1/"):
        assert client.get(url).status_code == 403
    assert client.post(path).status_code == 403
    assert client.post(f"{path}serve/").status_code == 403
    assert 'id="drain-link"' not in client.get("/").content.decode()
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(admin)
    assert strict.post(path).status_code == 403
    assert Engine.objects.get().takes_new


def test_who_may_change_such_rows_and_nobody_else_of_the_staff(small_pool: SmallPool, client: Client) -> None:
    rights = {"engine": "change_engine", "card": "change_gpu", "host": "change_host"}
    paths = {kind: f"/drain/{kind}/{getattr(small_pool, 'gpu' if kind == 'card' else kind).pk}/" for kind in rights}
    shown = {"engine": 'data-kinds="engine ', "card": ' card"', "host": 'id="host-duty"'}
    carol = User.objects.create_user("carol", is_staff=True)
    client.force_login(carol)
    for allowed, right in rights.items():
        carol.user_permissions.set(Permission.objects.filter(codename=right))
        begun = Drain.objects.create(kind=allowed, subject_id=1, subject="it", state="done", ended_at=Now())
        for kind, path in paths.items():
            expected = 200 if kind == allowed else 403
            assert client.get(path).status_code == expected, (right, kind)
            assert client.post(f"{path}serve/").status_code == (302 if kind == allowed else 403), (right, kind)
            Drain.objects.update(kind=kind)
            assert client.get(f"/drains/{begun.pk}/").status_code == expected
            if kind != allowed:
                assert client.post(path).status_code == 403
        dashboard = client.get("/").content.decode()
        assert [kind for kind, words in shown.items() if words in dashboard] == [allowed]
        assert client.post(f"/hosts/{small_pool.host.pk}/duty/", {"duty": "serve"}).status_code == (
            302 if allowed == "host" else 403
        )
    carol.user_permissions.set(Permission.objects.filter(codename="view_drain"))
    looked = client.get(f"/drains/{begun.pk}/")
    assert (looked.status_code, "drain-serve" in looked.content.decode()) == (200, False)
    assert [client.get(path).status_code for path in paths.values()] == [403] * 3
    assert client.get("/drain/planet/1/").status_code == 404
    carol.is_staff = False
    carol.save()
    assert client.get(f"/drains/{begun.pk}/").status_code == 403
    assert (Engine.objects.get().takes_new, Drain.objects.count()) == (True, 3)


@pytest.mark.parametrize(
    ("place", "kind", "row"),
    [("engines/engine", "engine", "engine"), ("pools/gpu", "card", "gpu"), ("pools/host", "host", "host")],
)
def test_the_admin_previews_one_and_drains_several(
    small_pool: SmallPool, browser: Client, place: str, kind: str, row: str
) -> None:
    Engine.objects.update(http_port=1)
    chosen = getattr(small_pool, row).pk
    answer = browser.post(f"/admin/{place}/", {"action": "drain", "_selected_action": [chosen]})
    assert answer.headers["Location"] == f"/drain/{kind}/{chosen}/"
    drains.begin(drains.subject_of(kind, chosen), stops=True, send=False)
    assert not Engine.objects.get().takes_new
    listed = browser.get("/admin/hydra_sessions/drain/").content.decode()
    assert "0 of 0" in listed
    told = [Moved(KEY, "", "tiny-atlas", "x", 1, outcome) for outcome in ("moved", "stays", "moved")]
    drain = Drain.objects.get()
    assert drains.claim(drain.pk, ME)
    assert drains.beat(drain.pk, ME, told)
    assert "2 of 3" in browser.get("/admin/hydra_sessions/drain/").content.decode()
    text = browser.post(f"/admin/{place}/", {"action": "activate", "_selected_action": [chosen]}, follow=True)
    assert "takes requests again" in text.content.decode()
    assert Engine.objects.get().takes_new
