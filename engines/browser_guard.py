"""Tells requests that a foreign web page made a browser send from those of programs and of our own pages.

An open loopback port is reachable by every page that a user's browser shows. Browsers always send Origin or
Sec-Fetch-Site with such requests and never let a page forge them; a page that rebinds its own DNS name to 127.0.0.1
still sends that name as Host. Programs send neither. Pure; used by the site and by the engine.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit


def host_name(host_header: str) -> str:
    """The name or address of a Host header, without port and brackets, in lower case; "" if it cannot be parsed."""
    try:
        return (urlsplit(f"//{host_header}").hostname or "").lower()
    except ValueError:
        return ""


def is_loopback(name: str) -> bool:
    """True for localhost, names below it, and the loopback addresses of both families."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def foreign_page(headers: Mapping[str, str]) -> str | None:
    """Why a request counts as sent by a foreign page, or None. `headers` are looked up by Host, Origin, Sec-Fetch-Site."""
    site = headers.get("Sec-Fetch-Site")
    if site not in (None, "", "none", "same-origin"):
        return f"Sec-Fetch-Site is {site}"
    origin = headers.get("Origin")
    if origin and _netloc(origin) != headers.get("Host", "").lower():
        return f"Origin is {origin[:200]}"
    return None


def _netloc(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None
