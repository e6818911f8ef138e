"""Who may use the API."""

from __future__ import annotations

from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth import get_user_model
from django.test import AsyncRequestFactory, Client

from sessions import api_keys
from sessions.api.auth import authenticate
from sessions.errors import AuthenticationRequired, ForeignOrigin, KeyInvalid
from sessions.identity import Owner

pytestmark = pytest.mark.django_db(transaction=True)

FACTORY = AsyncRequestFactory()


def ask(peer: str = "127.0.0.1", host: str = "localhost:9000", cookies: str = "", **headers: str) -> Owner:
    """The owner of a request with these headers (`Sec_Fetch_Site` for Sec-Fetch-Site)."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = FACTORY.get("/v1/models", headers=named)
    # The factory has a Host, a peer and cookies of its own, and would put ours beside them.
    request.META.update(REMOTE_ADDR=peer, HTTP_HOST=host, HTTP_COOKIE=cookies)
    return async_to_sync(authenticate)(request)


def test_a_program_of_this_machine_needs_no_key() -> None:
    for host in ("localhost:9000", "127.0.0.1:9000", "[::1]:9000", "hydra.localhost"):
        assert ask(host=host) == Owner()
    assert ask(peer="::1") == Owner()


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:3000"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
)
def test_a_web_page_of_another_site_is_refused(headers: dict[str, str]) -> None:
    with pytest.raises(ForeignOrigin):
        ask(**headers)


def test_the_sites_own_pages_are_not_foreign() -> None:
    assert ask(Origin="http://localhost:9000", Sec_Fetch_Site="same-origin") == Owner()
    assert ask(Sec_Fetch_Site="none") == Owner()


@pytest.mark.parametrize(
    "request_of",
    [
        {"host": "evil.example:9000"},
        {"host": ""},
        {"peer": "192.0.2.7"},
        {"peer": ""},
        {"X_Forwarded_For": "127.0.0.1"},
        {"Forwarded": "for=127.0.0.1"},
    ],
)
def test_whoever_may_come_from_elsewhere_needs_a_key(request_of: dict[str, Any]) -> None:
    with pytest.raises(AuthenticationRequired):
        ask(**request_of)
    view, key = api_keys.create_key("remote")
    assert ask(**request_of, Authorization=f"Bearer {key}") == Owner(api_key_id=view.id)


def test_a_site_beyond_loopback_needs_a_key_from_everybody(settings: Any) -> None:
    settings.HYDRA_BIND = "0.0.0.0"
    with pytest.raises(AuthenticationRequired):
        ask()
    view, key = api_keys.create_key("mine")
    assert ask(x_api_key=key) == Owner(api_key_id=view.id)
    assert ask(Authorization=f"bearer  {key} ") == Owner(api_key_id=view.id)


@pytest.mark.parametrize("authorization", ["Bearer sk-hydra-wrong", "Basic YTpi", "Bearer " + "x" * 5000, "Token"])
def test_a_wrong_key_is_refused_even_where_none_is_needed(authorization: str) -> None:
    with pytest.raises(KeyInvalid):
        ask(Authorization=authorization)


def test_a_made_up_key_counts_as_none_where_none_is_needed_and_as_wrong_elsewhere(settings: Any) -> None:
    assert ask(Authorization="Bearer sk-local") == Owner()
    with pytest.raises(ForeignOrigin):
        ask(Authorization="Bearer sk-local", Origin="http://evil.example")
    settings.HYDRA_BIND = "0.0.0.0"
    with pytest.raises(KeyInvalid):
        ask(Authorization="Bearer sk-local")


def test_an_empty_key_is_no_key() -> None:
    assert ask(Authorization="Bearer ") == Owner()
    assert ask(Authorization="Bearer") == Owner()


def test_a_key_opens_the_api_to_web_pages_too() -> None:
    view, key = api_keys.create_key("page")
    assert ask(Origin="http://other.example", Authorization=f"Bearer {key}") == Owner(api_key_id=view.id)


def test_a_revoked_key_stops_working_once_it_is_not_remembered_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    view, key = api_keys.create_key("short")
    assert ask(Authorization=f"Bearer {key}") == Owner(api_key_id=view.id)
    api_keys.revoke_keys([view.id])
    monkeypatch.setattr("sessions.api.auth.KEY_CACHE_S", 0.0)
    with pytest.raises(KeyInvalid):
        ask(Authorization=f"Bearer {key}")


def test_the_use_of_a_key_is_noted() -> None:
    view, key = api_keys.create_key("noted")
    ask(Authorization=f"Bearer {key}")
    (noted,) = api_keys.keys_by_prefix(view.prefix)
    assert noted.last_used_at is not None


def test_a_panel_user_may_use_it_from_the_panels_own_pages(settings: Any) -> None:
    settings.HYDRA_BIND = "0.0.0.0"
    user = get_user_model().objects.create_user("ann", password="a password")
    browser = Client()
    browser.force_login(user)
    cookie = f"{settings.SESSION_COOKIE_NAME}={browser.cookies[settings.SESSION_COOKIE_NAME].value}"
    own = {"host": "hydra.example", "peer": "192.0.2.7", "cookies": cookie}
    assert ask(**own, Origin="http://hydra.example", Sec_Fetch_Site="same-origin") == Owner(user_id=user.pk)
    with pytest.raises(AuthenticationRequired):
        ask(**own, Origin="http://evil.example")
    with pytest.raises(AuthenticationRequired):
        ask(**{**own, "cookies": f"{settings.SESSION_COOKIE_NAME}=wrong"})
