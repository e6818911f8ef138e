"""The panel's pages: for users only, complete without any row, and made of nothing from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from django.contrib.auth.models import User
from django.template.loader import render_to_string
from django.test import Client

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "static" / "js").glob("*.js"))
STYLES = sorted((ROOT / "static" / "css").glob("*.css"))
TEMPLATES = sorted(path for path in (ROOT / "templates").rglob("*") if path.is_file())
PAGES = ["/", "/playground/"]


@pytest.fixture
def browser(admin: User, client: Client) -> Client:
    client.force_login(admin)
    return client


@pytest.mark.django_db
@pytest.mark.parametrize("path", PAGES)
def test_a_page_sends_strangers_to_the_login_and_remembers_where_they_went(client: Client, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 302
    assert answer.headers["Location"] == f"/login/?next={path}"


@pytest.mark.parametrize("path", PAGES)
def test_a_page_is_complete_without_any_row(browser: Client, path: str) -> None:
    answer = browser.get(path)
    text = answer.content.decode()
    assert answer.status_code == 200
    assert "Source (AGPL-3.0)" in text
    assert 'data-testid="ws-state"' in text
    assert 'name="viewport"' in text


def test_the_dashboard_teaches_how_to_get_a_model_and_how_to_call_it(browser: Client) -> None:
    text = browser.get("/", headers={"host": "127.0.0.1:9123"}).content.decode()
    assert "manage.py pull smollm2-135m" in text
    assert "curl http://127.0.0.1:9123/v1/chat/completions" in text


def test_plotly_is_loaded_by_the_dashboard_alone(browser: Client) -> None:
    assert "plotly" in browser.get("/").content.decode()
    assert "plotly" not in browser.get("/playground/").content.decode()


def test_logging_in_leads_to_where_one_wanted_to_go(admin: User, client: Client) -> None:
    login = client.get("/login/").content.decode()
    for name in ("login-username", "login-password", "login-submit"):
        assert f'data-testid="{name}"' in login
    entry = {"username": "admin", "password": "a password of the tests", "next": "/playground/"}
    answer = client.post("/login/", entry)
    assert answer.headers["Location"] == "/playground/"


def test_a_wrong_password_is_said_in_place(admin: User, client: Client) -> None:
    answer = client.post("/login/", {"username": "admin", "password": "wrong"})
    assert answer.status_code == 200
    assert 'role="alert"' in answer.content.decode()
    assert 'value="admin"' in answer.content.decode()


def test_a_link_cannot_log_anybody_out(browser: Client) -> None:
    assert browser.get("/logout/").status_code == 405
    assert browser.post("/logout/").headers["Location"] == "/login/"
    assert browser.get("/").status_code == 302


def test_only_staff_see_the_way_to_the_admin(client: Client, transactional_db: None) -> None:
    client.force_login(User.objects.create_user("bob"))
    assert "/admin/" not in re.sub(r"(?s)<main.*</main>", "", client.get("/").content.decode())


def test_an_unknown_address_gets_a_page_of_ours(browser: Client) -> None:
    answer = browser.get("/nowhere/", headers={"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
    assert answer.status_code == 404
    assert "There is no page at this address." in answer.content.decode()


@pytest.mark.parametrize("accept", ["*/*", "application/json", None])
def test_a_program_that_asks_for_an_unknown_address_gets_the_apis_error(client: Client, accept: str | None) -> None:
    answer = client.post("/infill", "{}", "application/json", headers={"Accept": accept} if accept else None)
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert (error["message"], error["code"]) == ("/infill is not served.", "path_unknown")
    assert "/openapi.json" in error["hint"]


@pytest.mark.parametrize("template", ["403.html", "404.html", "500.html"])
def test_an_error_page_needs_nothing_but_itself(template: str) -> None:
    """Django renders them without any context when things are broken."""
    assert template[:3] in render_to_string(template)


@pytest.mark.parametrize("path", [*SCRIPTS, *STYLES, *TEMPLATES], ids=lambda path: path.name)
def test_nothing_is_fetched_from_elsewhere(path: Path) -> None:
    text = path.read_text().replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"""(?:src|href|url|import|from|fetch)\W{1,3}(?:https?:)?//""", text)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_no_script_turns_text_into_markup(path: Path) -> None:
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", path.read_text()
    )


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_no_page_holds_a_script_of_its_own(path: Path) -> None:
    """So that a content security policy without 'unsafe-inline' stays possible."""
    text = path.read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)", text)
    assert not re.search(r"""\son\w+\s*=\s*["']""", text)


@pytest.mark.parametrize(
    "name",
    ["composer", "send", "stop", "message-stats", "engine-card", "slot-cell", "ws-state", "model-picker", "regenerate"],
)
def test_tests_find_the_parts_of_a_page_by_a_stable_name(name: str) -> None:
    assert any(f'"{name}"' in path.read_text() for path in [*SCRIPTS, *TEMPLATES])
