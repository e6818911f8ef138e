"""docs/many-hosts.md on Debian's own servers: its lines make a pool whose every connection is TLS and checked."""

from __future__ import annotations

import json
import re
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit, urlunsplit

import pytest

from tests.conftest import PulledModel
from tests.hosts import debian_servers, network
from tests.hosts.debian_servers import DebianServers
from tests.hosts.hydra_process import HydraProcess, ask_broker, refusal
from tests.hosts.many_hosts_page import ManyHostsPage
from tests.hosts.network import Network
from tests.hosts.pool import CHAT, Pool, make_engine, running_pool, served_files, tell
from tests.synthetic_gguf import SyntheticModel

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

PASSWORDS = {"…": "the-sites-own-password", "SITE-PASSWORD": "the-sites-own-password"}
# The page says 15 s; a machine that runs much else may need longer.
RESTORE_LIMIT_S = 60.0
TINY = {**CHAT, "model": "tiny"}
STATE = "SELECT state FROM pools_host WHERE name = 'second'"
DUTY = "SELECT duty FROM pools_host WHERE name = 'second'"
ENGINE = "SELECT state FROM engines_engine WHERE name = 'second-0'"


@dataclass(frozen=True)
class Debian:
    """The page, the servers that were made by it, and the pool on them."""

    page: ManyHostsPage
    servers: DebianServers
    pool: Pool


@pytest.fixture(scope="module")
def debian(tmp_path_factory: pytest.TempPathFactory, pulled_smollm2: PulledModel) -> Iterator[Debian]:
    if reason := network.missing() or debian_servers.missing():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("tls")
    with Network("hub", "site", "second") as (hub, site, second):
        addresses = {"10.0.0.0/24": "10.213.77.0/24", "10.0.0.1": hub.address, "10.0.0.2": site.address}
        page = ManyHostsPage({**addresses, **PASSWORDS, **DebianServers.places(folder)})
        exports = page.exports("The site")
        urls = exports.pop("DATABASE_URL"), exports.pop("BROKER_URL")
        assert "sslmode=verify-full" in urls[0] and urls[1].startswith("rediss://")
        with DebianServers(folder, page, *urls, hub.command()) as servers:
            print(servers.binaries.versions())
            environ = {"DATABASE_URL": urls[0], "BROKER_URL": urls[1], **exports}
            with running_pool((hub, site, second), servers, folder, pulled_smollm2, environ) as pool:
                yield Debian(page, servers, pool)


def test_neither_server_lets_anybody_in_without_tls_or_takes_another_ca(debian: Debian) -> None:
    database, broker = debian.servers.database_url, debian.servers.broker_url
    second = debian.pool.second
    assert refusal(second, database) == "" == refusal(second, broker)
    assert "no encryption" in refusal(second, _with(database, sslmode="disable"))
    assert "ConnectionError" in refusal(second, broker.replace("rediss://", "redis://").partition("?")[0])
    debian.servers.make_certificates(debian.pool.folder / "another")
    another = str(debian.pool.folder / "another" / "ca.pem")
    assert "certificate verify failed" in refusal(second, _with(database, sslrootcert=another))
    assert "certificate verify failed" in refusal(second, _with(broker, ssl_ca_certs=another)).lower()
    # A password is still asked for.
    assert "password authentication failed" in refusal(second, database.replace("the-sites-own-password", "no"))
    assert "AuthenticationError" in refusal(second, broker.replace("the-sites-own-password", "no"))


def test_the_panels_messages_pass_through_the_broker(debian: Debian) -> None:
    lines = (
        "import asyncio",
        "from channels.layers import get_channel_layer",
        "async def there_and_back():",
        "    layer = get_channel_layer()",
        "    await layer.send('page', {'type': 'told'})",
        "    print(type(layer).__name__, (await layer.receive('page'))['type'])",
        "    await layer.close_pools()",
        "asyncio.run(there_and_back())",
    )
    assert "RedisChannelLayer told" in debian.pool.site.manage("shell", "-c", "\n".join(lines))


def test_a_host_joins_serves_and_goes_on_after_the_broker_forgot_it(
    debian: Debian, tiny_model: Callable[..., SyntheticModel]
) -> None:
    pool, model = debian.pool, tiny_model("llama")
    token = pool.site.manage(*debian.page.command("A host joins", "jointoken")).strip().splitlines()[-1]
    arguments = debian.page.command("A host joins", "head")
    arguments[arguments.index("--token") + 1] = token
    head = pool.head_by([*arguments, "--name", "second"], "second", "second")
    try:
        print(f"joined and served after {head.start():.1f} s")
        pool.until(STATE, "up")
        it_got_the_public_part_of_the_ca(debian, head)
        with served_files(pool.hub, model.path.parent):
            pool.pull(model.path, "tiny", "second")
        make_engine(pool, "second-0", "tiny")
        pool.until(ENGINE, "ready")
        status, answer = pool.ask("/v1/chat/completions", TINY)
        assert (status, answer["model"]) == (200, "tiny"), answer
        every_connection_is_tls(debian)
        the_broker_forgets_the_host_and_gets_it_back(debian)
        tell(pool, "RETIRING")
        print(f"left after {pool.until(DUTY, 'retired'):.1f} s")
        assert broker_users(debian) == {"default", "site"}
    except AssertionError as error:
        raise AssertionError(f"{error}{head.logs()}{pool.site.logs()}") from error
    finally:
        head.close()


def it_got_the_public_part_of_the_ca(debian: Debian, head: HydraProcess) -> None:
    folder, ca = head.home / "host", debian.pool.folder / "hydra" / "ca.pem"
    joined = json.loads((folder / "joined.json").read_text())
    for key, name, kept in (
        ("database_url", "sslrootcert", "database-ca.pem"),
        ("broker_url", "ssl_ca_certs", "broker-ca.pem"),
    ):
        (path,) = parse_qs(urlsplit(joined[key]).query)[name]
        assert Path(path) == folder / kept
        assert Path(path).read_text() == ca.read_text()
        assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
        # What it was given lets it in from its own machine, and only over TLS.
        assert refusal(debian.pool.second, joined[key]) == ""
    assert "no encryption" in refusal(debian.pool.second, _with(joined["database_url"], sslmode="disable"))


def every_connection_is_tls(debian: Debian) -> None:
    rows = debian.servers.ask_as_superuser(
        "SELECT a.usename, s.ssl, s.version FROM pg_stat_activity a JOIN pg_stat_ssl s USING (pid)"
        " WHERE a.client_addr IS NOT NULL"
    )
    print(f"{len(rows)} connections: {sorted({tuple(row) for row in rows})}")
    assert {"hydra", "host"} == {"host" if user.startswith("hydra_host_second") else user for user, _, _ in rows}
    assert {(ssl, version) for _, ssl, version in rows} == {("t", "TLSv1.3")}
    # The broker has no other port (page: `port 0`); these are who has come in through that one.
    users = set(re.findall(r" user=(\S+)", told_by_broker(debian, "CLIENT", "LIST")))
    print(f"users of the broker: {sorted(users)}")
    assert users == {"site", "hydra-host-second"}


def the_broker_forgets_the_host_and_gets_it_back(debian: Debian) -> None:
    pool = debian.pool
    debian.servers.restart_broker()
    began = time.monotonic()
    # Requests do not pass through it.
    assert pool.ask("/v1/chat/completions", TINY)[0] == 200
    while broker_users(debian) != {"default", "site", "hydra-host-second"}:
        assert time.monotonic() - began < RESTORE_LIMIT_S, broker_users(debian)
        time.sleep(0.5)
    print(f"its user is back {time.monotonic() - began:.1f} s after the broker")
    tell(pool, "DRAINING")
    print(f"drained {pool.until(ENGINE, 'stopped'):.1f} s later")
    tell(pool, "ACTIVE")
    print(f"serves again after {pool.until(ENGINE, 'ready'):.1f} s")
    assert pool.ask("/v1/chat/completions", TINY)[0] == 200


def broker_users(debian: Debian) -> set[str]:
    return set(told_by_broker(debian, "ACL", "USERS"))


def told_by_broker(debian: Debian, *command: str) -> Any:
    """Its answer to the site. Raises AssertionError when it refuses."""
    answer, error = ask_broker(debian.pool.hub, debian.servers.broker_url, *command)
    assert not error, error
    return answer


def _with(url: str, **fields: str) -> str:
    """The URL with these fields of its query."""
    parts = urlsplit(url)
    query = {name: values[0] for name, values in parse_qs(parts.query).items()}
    return urlunsplit(parts._replace(query=urlencode({**query, **fields})))
