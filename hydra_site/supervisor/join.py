"""Joining a pool: one HTTP exchange with its site, and what came of it written into this HYDRA_HOME."""

import hashlib
import http.client
import ipaddress
import json
import socket
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from engines.browser_guard import is_loopback
from hydra_site.supervisor.errors import HomeUnusable, JoinRefused
from hydra_site.supervisor.home import Home
from hydra_site.supervisor.joined import Joined
from pools.release import this_release

JOIN_PATH = "/v1/hosts/join"
JOIN_TIMEOUT_S = 60.0
MAX_ANSWER_BYTES = 1 << 20
# Loopback, private and link-local networks, and what VPNs hand out; `is_private` also counts addresses of nobody.
_PRIVATE = [
    ipaddress.ip_network(network)
    for network in (
        "127.0.0.0/8",
        "10.0.0.0/8",
        "172.16.0.0/12",
        "192.168.0.0/16",
        "100.64.0.0/10",
        "169.254.0.0/16",
        "::1/128",
        "fc00::/7",
        "fe80::/10",
    )
]
_ANSWERED = ("host_name", "version", "database_url", "broker_url", "database_ca", "broker_ca")


@dataclass(frozen=True)
class Wish:
    """What `manage.py head --join` was asked for. `address` "" is found by looking which one leads to the site."""

    site_url: str
    token: str
    host_name: str
    address: str = ""


def join(home: Home, wish: Wish) -> Joined:
    """This home as a host of the pool at `wish.site_url`; the same token again finds what the first time made.

    Raises JoinRefused with the site's own words, HomeUnusable for a home that holds a pool of its own.
    """
    site_url = _checked_site(wish.site_url)
    digest = hashlib.sha256(wish.token.encode()).hexdigest()
    known = Joined.of(home)
    if known is not None and (known.token_digest, known.site_url) == (digest, site_url):
        return known
    if known is None and home.postgres_dir.exists() and any(home.postgres_dir.iterdir()):
        raise HomeUnusable(
            f"HYDRA_HOME {home.root} holds a pool of its own", hint="choose an empty directory with HYDRA_HOME"
        )
    address = _checked_address(wish.address or _address_towards(site_url), site_url)
    release = this_release()
    answer = _ask(
        site_url + JOIN_PATH,
        {
            "token": wish.token,
            "host_name": wish.host_name,
            "address": address,
            "version": release.version,
            "schema_digest": release.schema,
        },
    )
    joined = Joined(
        site_url=site_url,
        host_name=answer["host_name"],
        address=address,
        database_url=answer["database_url"],
        broker_url=answer["broker_url"],
        token_digest=digest,
        site_version=answer["version"],
    ).with_certificates(home, answer["database_ca"], answer["broker_ca"])
    joined.write(home)
    return joined


def _checked_site(url: str) -> str:
    """The URL without a path. Token and passwords go over it, so plain HTTP is for private networks only."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable or not parts.hostname:
        raise JoinRefused(
            f"{url} is no address of a site", hint="give one such as https://hydra.example or http://10.0.0.1:9000"
        )
    if parts.scheme == "http" and not _is_private(parts.hostname):
        raise JoinRefused(
            f"{parts.hostname} is on a public network, and the token would travel there in the clear",
            hint="put the site behind HTTPS, or join over a private network or a VPN",
        )
    return f"{parts.scheme}://{parts.netloc}"


def _is_private(name: str) -> bool:
    """Whether every address of this name is a private one."""
    if is_loopback(name):
        return True
    try:
        found = {str(info[4][0]).partition("%")[0] for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        raise JoinRefused(f"the name {name} cannot be resolved: {error.strerror or error}") from error
    addresses = [ipaddress.ip_address(address) for address in found]
    return all(
        any(address in network for network in _PRIVATE if network.version == address.version) for address in addresses
    )


def _address_towards(site_url: str) -> str:
    """This machine's address on the way to the site."""
    parts = urlsplit(site_url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        with socket.create_connection((parts.hostname or "", port), timeout=5) as connection:
            return str(connection.getsockname()[0]).partition("%")[0]
    except OSError as error:
        raise JoinRefused(f"{site_url} does not answer: {error.strerror or error}", hint=_REACH_HINT) from error


def _checked_address(address: str, site_url: str) -> str:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        raise JoinRefused(f"--address {address} is no IP address") from None
    if parsed.is_unspecified or (parsed.is_loopback and not is_loopback(urlsplit(site_url).hostname or "")):
        raise JoinRefused(f"--address {address} leads nowhere from other machines", hint="give one that they reach")
    return str(parsed)


_REACH_HINT = "check the address, and that the site listens beyond loopback (HYDRA_BIND)"


def _ask(url: str, body: dict[str, str]) -> dict[str, str]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    # Nothing between this machine and the site has any business with the token.
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=ssl.create_default_context())
    )
    try:
        with opener.open(request, timeout=JOIN_TIMEOUT_S) as response:
            answer: Any = json.loads(response.read(MAX_ANSWER_BYTES))
    except urllib.error.HTTPError as error:
        with error:
            raise _refusal(error.code, error.read(MAX_ANSWER_BYTES)) from error
    except (OSError, http.client.HTTPException) as error:
        raise JoinRefused(f"{url} does not answer: {error}", hint=_REACH_HINT) from error
    except ValueError as error:
        raise JoinRefused(f"{url} answered something else than a site of Hydra") from error
    if not isinstance(answer, dict) or not all(isinstance(answer.get(key), str) for key in _ANSWERED):
        raise JoinRefused(f"{url} answered something else than a site of Hydra")
    return answer


def _refusal(status: int, text: bytes) -> JoinRefused:
    try:
        told = json.loads(text)["error"]
        return JoinRefused(str(told["message"]).rstrip("."), hint=str(told.get("hint") or ""))
    except (ValueError, KeyError, TypeError):
        return JoinRefused(f"the site answered {status} and no reason", hint="is it a site of Hydra of this release?")


def check_home(home: Home) -> Joined:
    """What this home has joined. Raises HomeUnusable when nothing."""
    joined = Joined.of(home)
    if joined is None:
        raise HomeUnusable(
            f"HYDRA_HOME {home.root} has joined no pool",
            hint="join one with `manage.py head --join URL --token TOKEN`",
        )
    return joined
