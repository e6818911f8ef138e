"""Whether other machines can reach this site's servers. Free of Django: the settings ask it."""

import ipaddress
from urllib.parse import urlsplit

from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict

from engines.browser_guard import is_loopback


def why_not_joinable(database_url: str | None, broker_url: str | None) -> str:
    """Why no other machine can join this site's pool, in one sentence; "" when one can.

    The arguments are DATABASE_URL and BROKER_URL; without them the site runs servers of its own.
    """
    for name, url, served in (("DATABASE_URL", database_url, "PostgreSQL"), ("BROKER_URL", broker_url, "Valkey")):
        if url is None:
            return f"This site runs its own {served}, which never leaves loopback ({name} is not set)."
        for host in _hosts(name, url):
            if _is_here(host):
                return f"{name} names {host or 'no host'}, which other machines cannot reach."
    return ""


def _hosts(name: str, url: str) -> list[str]:
    if name == "BROKER_URL":
        return [urlsplit(url).hostname or ""]
    try:
        return str(conninfo_to_dict(url).get("host") or "").split(",")
    except ProgrammingError:
        return [""]


def _is_here(host: str) -> bool:
    if not host or host.startswith(("/", "@")) or is_loopback(host):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False
