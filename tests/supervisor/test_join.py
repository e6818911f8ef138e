"""A home that joins a pool: what it asks of a site, what it refuses to ask, and what it keeps."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from hydra_site import addresses
from hydra_site.env import PROJECT_DIR
from hydra_site.supervisor.borrow import services
from hydra_site.supervisor.errors import HomeUnusable, JoinRefused
from hydra_site.supervisor.home import Home
from hydra_site.supervisor.join import Wish, check_home, join
from hydra_site.supervisor.joined import Joined, leave
from pools.release import this_release

ANSWER = {
    "host_name": "second",
    "version": "0.1.0+site",
    "database_url": "postgresql://role:secret@db.lan/hydra?sslmode=verify-full",
    "broker_url": "rediss://user:secret@db.lan:6379/0?ssl_cert_reqs=required",
    "database_ca": "A CERTIFICATE",
    "broker_ca": "",
}


class Site:
    """Answers as a site does, with what a test tells it to."""

    def __init__(self) -> None:
        self.status, self.answer = 200, ANSWER
        self.asked: list[dict[str, Any]] = []
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                site.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                body = json.dumps(site.answer).encode()
                self.send_response(site.status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()


@pytest.fixture
def site() -> Iterator[Site]:
    running = Site()
    yield running
    running.server.shutdown()
    running.server.server_close()
    running.thread.join(5)


def test_what_a_site_answers_is_kept_for_this_user_alone_and_found_by_every_command(site: Site, new_home: Home) -> None:
    new_home.create()
    joined = join(new_home, Wish(f"{site.url}/", "hydra-join-token", "second"))
    release = this_release()
    (asked,) = site.asked
    assert asked == {
        "token": "hydra-join-token",
        "host_name": "second",
        "address": "127.0.0.1",
        "version": release.version,
        "schema_digest": release.schema,
    }
    kept = new_home.root / "host"
    assert {path.name: path.stat().st_mode & 0o777 for path in kept.iterdir()} == {
        "joined.json": 0o600,
        "database-ca.pem": 0o600,
    }
    assert (kept / "database-ca.pem").read_text() == "A CERTIFICATE"
    assert joined == Joined.of(new_home) == check_home(new_home)
    assert "hydra-join-token" not in (kept / "joined.json").read_text()
    assert "secret" not in repr(joined)
    assert addresses.database_url(new_home) == f"{ANSWER['database_url']}&sslrootcert={kept}/database-ca.pem".replace(
        f"{kept}/", str(kept).replace("/", "%2F") + "%2F"
    )
    assert addresses.broker_url(new_home) == ANSWER["broker_url"]
    with services(new_home.root) as (database_url, broker_url):
        assert (database_url, broker_url) == (joined.database_url, joined.broker_url)
    leave(new_home)
    assert Joined.of(new_home) is None


def test_the_same_token_again_asks_nobody_and_another_one_joins_anew(site: Site, new_home: Home) -> None:
    new_home.create()
    first = join(new_home, Wish(site.url, "one", "second"))
    site.answer = {**ANSWER, "host_name": "third"}
    assert join(new_home, Wish(site.url, "one", "second")) == first
    assert len(site.asked) == 1
    assert join(new_home, Wish(site.url, "two", "third")).host_name == "third"


def test_a_refusal_has_the_sites_own_words(site: Site, new_home: Home) -> None:
    new_home.create()
    site.status = 401
    site.answer = {"error": {"message": "This token cannot be used.", "hint": "Make another."}}
    with pytest.raises(JoinRefused) as caught:
        join(new_home, Wish(site.url, "t", "second"))
    assert caught.value.line() == "This token cannot be used: Make another."
    for site.status, site.answer in ((502, []), (200, {"host_name": "second"}), (200, ["x"])):
        with pytest.raises(JoinRefused):
            join(new_home, Wish(site.url, "t", "second"))
    assert Joined.of(new_home) is None


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://203.0.113.9:9000", "public network"),
        ("http://8.8.8.8", "public network"),
        ("ftp://10.0.0.1", "no address of a site"),
        ("http://:9000", "no address of a site"),
        ("http://127.0.0.1:1", "does not answer"),
        ("http://no-such-name.invalid", "cannot be resolved"),
    ],
)
def test_a_site_that_cannot_be_asked_safely_or_at_all_is_refused_before_the_token_leaves(
    url: str, words: str, new_home: Home
) -> None:
    new_home.create()
    with pytest.raises(JoinRefused, match=words) as caught:
        join(new_home, Wish(url, "hydra-join-secret", "second"))
    assert "hydra-join-secret" not in caught.value.line()


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "db.lan"])
def test_an_address_that_leads_nowhere_is_refused(site: Site, new_home: Home, address: str) -> None:
    new_home.create()
    with pytest.raises(JoinRefused, match="--address"):
        join(new_home, Wish(site.url, "t", "second", address))
    assert site.asked == []


def test_a_home_with_a_pool_of_its_own_does_not_join_and_a_joined_one_has_no_pool(site: Site, new_home: Home) -> None:
    new_home.create()
    with pytest.raises(HomeUnusable, match="has joined no pool"):
        check_home(new_home)
    new_home.postgres_dir.mkdir()
    (new_home.postgres_dir / "PG_VERSION").write_text("18\n")
    with pytest.raises(HomeUnusable, match="a pool of its own"):
        join(new_home, Wish(site.url, "t", "second"))
    (new_home.postgres_dir / "PG_VERSION").unlink()
    join(new_home, Wish(site.url, "t", "second"))
    done = subprocess.run(
        [sys.executable, "manage.py", "up"],
        cwd=PROJECT_DIR,
        env={"PATH": "/usr/bin:/bin", "HYDRA_HOME": str(new_home.root)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "belongs to a host of the pool" in done.stderr
    assert "manage.py head" in done.stderr
    (new_home.root / "host" / "joined.json").write_text("{")
    with pytest.raises(HomeUnusable, match="damaged"):
        Joined.of(new_home)
