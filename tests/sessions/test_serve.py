"""The site as its own process: limits of the server, streams at its end, binds beyond loopback."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hydra_site.supervisor.home import Services
from sessions import api_keys
from sessions.models import Turn
from tests.engine_process import EngineProcess
from tests.rows import add_engine, add_model, set_ready
from tests.sessions.site_process import LIMIT_BYTES, PATIENCE_S, Site

pytestmark = pytest.mark.django_db(transaction=True)

LONG = {
    "messages": [{"role": "user", "content": "Tell a story."}],
    "stream": True,
    "ignore_eos": True,
    "max_tokens": 1500,
}


@pytest.fixture
def site(db: None, servers: Services, tmp_path: Path) -> Iterator[Site]:
    running = Site(tmp_path, servers)
    running.start()
    try:
        running.wait_up()
        yield running
        running.connection.close()
    finally:
        if running.process.poll() is None:
            running.process.kill()
        running.process.wait(PATIENCE_S)


def chunks(total_bytes: int) -> Iterator[bytes]:
    """A body of unknown length, which the client sends with `Transfer-Encoding: chunked`."""
    for _ in range(total_bytes // 10_000):
        yield b"x" * 10_000


def test_a_body_over_the_limit_is_read_to_its_end_and_answered_with_a_413(site: Site) -> None:
    answer = site.post(b"x" * (20 * LIMIT_BYTES))
    assert answer.status == 413
    assert json.loads(answer.read())["error"]["code"] == "body_too_large"
    # The connection is in order: the next request on it is understood.
    site.connection.request("GET", "/healthz")
    assert site.connection.getresponse().status == 200


def test_a_chunked_body_cannot_get_around_the_limit(site: Site) -> None:
    answer = site.post(chunks(20 * LIMIT_BYTES))
    assert answer.status == 413
    assert json.loads(answer.read())["error"]["type"] == "invalid_request_error"


def test_a_body_at_the_limit_is_read(site: Site) -> None:
    for body in (b"x" * LIMIT_BYTES, chunks(LIMIT_BYTES)):
        answer = site.post(body)
        assert (answer.status, json.loads(answer.read())["error"]["code"]) == (400, "invalid_request")
        site.connection.close()


@pytest.mark.parametrize("resumable", ["0", "1"])
def test_it_stops_in_the_middle_of_a_stream_and_frees_the_engine(
    site: Site, smollm2_engine: EngineProcess, tmp_path: Path, resumable: str
) -> None:
    variant = add_model(Path(smollm2_engine.config.model_path), tmp_path, "smollm2-135m")
    set_ready(add_engine(variant), smollm2_engine.config.port)
    answer = site.post(json.dumps(LONG), {"X-Hydra-Resumable": resumable})
    assert answer.status == 200
    assert b"data: " in answer.readline()
    assert site.stop() == 0, site.log.read_text()
    smollm2_engine.wait_idle()
    assert Turn.objects.get().state == "cancelled"


def test_a_client_that_vanishes_in_the_middle_of_a_stream_frees_the_engine(
    site: Site, smollm2_engine: EngineProcess, tmp_path: Path
) -> None:
    variant = add_model(Path(smollm2_engine.config.model_path), tmp_path, "smollm2-135m")
    set_ready(add_engine(variant), smollm2_engine.config.port)
    answer = site.post(json.dumps(LONG))
    answer.readline()
    answer.close()
    site.connection.close()
    smollm2_engine.wait_idle()
    deadline = time.monotonic() + PATIENCE_S
    while not Turn.objects.exclude(state="running").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert Turn.objects.get().state == "cancelled"


def test_beyond_loopback_it_refuses_to_start_without_a_key(db: None, servers: Services, tmp_path: Path) -> None:
    closed = Site(tmp_path, servers, HYDRA_BIND="0.0.0.0")
    closed.start()
    assert closed.process.wait(PATIENCE_S) == 1
    assert "needs an API key" in closed.log.read_text().splitlines()[-1]


def test_beyond_loopback_it_serves_whoever_has_a_key(db: None, servers: Services, tmp_path: Path) -> None:
    _, key = api_keys.create_key("remote")
    opened = Site(tmp_path, servers, HYDRA_BIND="0.0.0.0")
    opened.start()
    try:
        opened.wait_up()
        assert opened.post(b"{}").status == 401
        opened.connection.close()
        answer = opened.post(b"{}", {"Authorization": f"Bearer {key}"})
        assert answer.status == 400
        opened.connection.close()
    finally:
        opened.stop()


def test_a_port_in_use_ends_it_with_an_error(site: Site, servers: Services, tmp_path: Path) -> None:
    second = Site(tmp_path, servers, HYDRA_PORT=str(site.port))
    second.start()
    assert second.process.wait(PATIENCE_S) == 1
    site.post(b"{}").read()
