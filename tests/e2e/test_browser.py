"""The panel in a real browser: log in, see the pool, chat, and see tokens arrive."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.stack import ADMIN_PASSWORD, Stack

CHROMIUM = Path("/usr/bin/chromium")
# As root Chromium has no sandbox; the rest keeps it from asking the network for things of its own.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WAIT_MS = 30_000


expect.set_options(timeout=WAIT_MS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        yield running
        running.close()


@pytest.fixture
def page(browser: Browser, stack: Stack) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(WAIT_MS)
    opened = context.new_page()
    problems: list[str] = []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("requestfailed", lambda request: problems.append(f"{request.failure}: {request.url}"))
    opened.on("request", lambda request: _note_foreign(request.url, stack, problems))
    opened.goto(stack.url + "/")
    expect(opened).to_have_url(stack.url + "/login/?next=/")
    opened.get_by_test_id("login-username").fill("admin")
    opened.get_by_test_id("login-password").fill(ADMIN_PASSWORD)
    opened.get_by_test_id("login-submit").click()
    # Whoever goes on before its answer has come is logged in nowhere.
    expect(opened).to_have_url(stack.url + "/")
    yield opened
    context.close()
    assert [problem for problem in problems if "net::ERR_ABORTED" not in problem] == []


def _note_foreign(url: str, stack: Stack, problems: list[str]) -> None:
    if not url.startswith((stack.url, "data:", "blob:")):
        problems.append(f"asked another host: {url}")


# A WebSocket that is open for its page only once release() is called.
HELD_SOCKET = """
let held = true, opened = null;
window.release = () => { held = false; opened?.(); };
window.WebSocket = class extends WebSocket {
  get readyState() { return held ? WebSocket.CONNECTING : super.readyState; }
  set onopen(then) { super.onopen = () => { held ? (opened = then) : then(); }; }
};
"""


# Looked at with every frame that the page draws: some words are there.
HAS_WORDS = """
() => document.querySelector('[data-testid="message-assistant"] [data-testid="message-text"]')?.innerText.length > 60
"""


def test_the_dashboard_shows_the_engine_live(page: Page) -> None:
    card = page.get_by_test_id("engine-card")
    expect(card).to_have_count(1)
    expect(card).to_contain_text("cpu-0")
    expect(card.get_by_test_id("engine-state")).to_have_text("ready")
    expect(card.get_by_test_id("slot-cell")).to_have_count(4)


def test_a_chat_arrives_token_by_token_and_shows_its_speed(page: Page, stack: Stack) -> None:
    engine = stack.process_of("engines.runtime")
    page.goto(stack.url + "/playground/")
    page.get_by_test_id("composer").fill("Tell me a long story about a river.")
    page.get_by_test_id("send").click()
    text = page.get_by_test_id("message-assistant").get_by_test_id("message-text")
    page.wait_for_function(HAS_WORDS)
    # Frozen it cannot end its answer before the click comes, however slow the page is.
    engine.suspend()
    try:
        early = text.inner_text()
        page.get_by_test_id("stop").click()
    finally:
        engine.resume()
    stats = page.get_by_test_id("message-assistant").get_by_test_id("message-stats")
    expect(stats).to_contain_text("tokens/s")
    final = text.inner_text()
    assert early
    assert final.startswith(early.rstrip())


def test_a_whole_answer_shows_tokens_per_second_first_token_time_and_its_engine(page: Page, stack: Stack) -> None:
    page.goto(stack.url + "/playground/")
    page.get_by_test_id("composer").fill("What is the capital of Japan?")
    page.keyboard.press("Enter")
    answer = page.get_by_test_id("message-assistant")
    expect(answer.get_by_test_id("message-stats")).to_contain_text("cpu-0")
    expect(answer.get_by_test_id("message-text")).not_to_be_empty()


def test_what_is_sent_before_the_page_is_connected_goes_out_as_soon_as_it_is(page: Page, stack: Stack) -> None:
    page.add_init_script(HELD_SOCKET)
    page.goto(stack.url + "/playground/")
    due, message = page.get_by_test_id("due"), page.get_by_test_id("composer")
    expect(due).to_be_hidden()
    page.get_by_role("button", name="Name a colour").click()
    expect(due).to_be_visible()
    message.fill("What is the capital of Japan?")
    expect(due).to_be_hidden()
    page.keyboard.press("Enter")
    expect(due).to_be_visible()
    expect(message).to_have_value("What is the capital of Japan?")
    page.evaluate("release()")
    stats = page.get_by_test_id("message-assistant").get_by_test_id("message-stats")
    expect(stats).to_contain_text("cpu-0")
    said = page.get_by_test_id("message-user").get_by_test_id("message-text")
    expect(said).to_have_text("What is the capital of Japan?")
    expect(due).to_be_hidden()


def test_the_footer_offers_the_source(page: Page, stack: Stack) -> None:
    link = page.get_by_role("contentinfo").get_by_role("link", name="Source")
    assert link.get_attribute("href") == "/source.tar.gz"
    answer = page.request.get(stack.url + "/source.tar.gz")
    assert answer.ok
    assert answer.body()[:2] == b"\x1f\x8b"


def test_the_admin_lists_every_kind_of_row(page: Page, stack: Stack) -> None:
    expect(page.get_by_test_id("engine-card")).to_have_count(1)
    for path in (
        "pools/host",
        "pools/gpu",
        "pools/model",
        "pools/variant",
        "engines/engine",
        "hydra_sessions/chatsession",
        "hydra_sessions/turn",
        "hydra_sessions/apikey",
    ):
        answer = page.request.get(f"{stack.url}/admin/{path}/")
        assert answer.ok, path
