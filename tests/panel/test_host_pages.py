"""Draining a host from the dashboard: for the staff only, by POST, and said in place."""

from __future__ import annotations

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client

from pools.choices import HostDuty
from pools.models import Host
from sessions.choices import DrainState
from sessions.models import Drain
from tests.panel.page import SmallPool


@pytest.fixture
def browser(admin: User, client: Client) -> Client:
    client.force_login(admin)
    return client


def duty_of(pool: SmallPool) -> str:
    return Host.objects.get(pk=pool.host.pk).duty


def test_the_staff_drains_a_host_and_lets_it_serve_again(small_pool: SmallPool, browser: Client) -> None:
    path = f"/hosts/{small_pool.host.pk}/duty/"
    answer = browser.post(path, {"duty": "drain"}, follow=True)
    assert answer.redirect_chain == [("/", 302)]
    assert "atlas finishes what it has and takes nothing new." in answer.content.decode()
    assert duty_of(small_pool) == HostDuty.DRAINING
    for leaving in (HostDuty.DRAINING, HostDuty.RETIRING, HostDuty.RETIRED):
        Drain.objects.update(state=DrainState.DONE)  # which is over, in whatever way
        Host.objects.filter(pk=small_pool.host.pk).update(duty=leaving)
        again = browser.post(path, {"duty": "drain"}, follow=True).content.decode()
        assert 'data-level="warning"' in again
        assert (duty_of(small_pool), Drain.objects.count()) == (leaving, 1)
    Host.objects.filter(pk=small_pool.host.pk).update(duty=HostDuty.DRAINING)
    assert "atlas serves." in browser.post(path, {"duty": "serve"}, follow=True).content.decode()
    assert duty_of(small_pool) == HostDuty.ACTIVE


def test_nobody_else_does(small_pool: SmallPool, admin: User, client: Client) -> None:
    path = f"/hosts/{small_pool.host.pk}/duty/"
    assert client.post(path, {"duty": "drain"}).headers["Location"].startswith("/login/")
    client.force_login(User.objects.create_user("bob"))
    assert client.post(path, {"duty": "drain"}).status_code == 403
    assert 'id="host-duty"' not in client.get("/").content.decode()
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(admin)
    assert strict.post(path, {"duty": "drain"}).status_code == 403
    assert duty_of(small_pool) == HostDuty.ACTIVE


def test_what_makes_no_sense_is_refused(small_pool: SmallPool, browser: Client) -> None:
    path = f"/hosts/{small_pool.host.pk}/duty/"
    assert browser.get(path).status_code == 405
    assert browser.post(path, {"duty": "retired"}).status_code == 400
    assert browser.post("/hosts/0/duty/", {"duty": "drain"}).status_code == 404
    assert duty_of(small_pool) == HostDuty.ACTIVE


def test_the_form_carries_its_token_and_the_dashboard_its_place(small_pool: SmallPool, browser: Client) -> None:
    text = browser.get("/").content.decode()
    form = text[text.index('id="host-duty"') :]
    assert 'data-action="/hosts/0/duty/"' in form
    assert "csrfmiddlewaretoken" in form[: form.index("</template>")]


@pytest.mark.parametrize("right", ["view", "change"])
def test_who_may_only_look_commands_nothing_in_the_admin(small_pool: SmallPool, client: Client, right: str) -> None:
    looker = User.objects.create_user("carol", is_staff=True)
    looker.user_permissions.set(Permission.objects.filter(codename__in=["view_host", f"{right}_host"]))
    client.force_login(looker)
    Host.objects.update(duty=HostDuty.DRAINING)
    form = {"_selected_action": [small_pool.host.pk]}
    client.post("/admin/pools/host/", {"action": "activate", **form})
    assert duty_of(small_pool) == (HostDuty.ACTIVE if right == "change" else HostDuty.DRAINING)
    previewed = client.post("/admin/pools/host/", {"action": "drain", **form}).headers.get("Location", "")
    assert previewed.startswith("/drain/host/") is (right == "change")
