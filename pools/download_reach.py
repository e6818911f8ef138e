"""Which addresses a download by URL may come from. A URL is typed by staff, but the host that fetches it sits inside a network:
what only that host can reach (its own services, a cloud's metadata with its credentials) is not for whoever may type URLs.
"""

from __future__ import annotations

import http.client
import ipaddress
import os
import urllib.request
from typing import Any

from pools.errors import DownloadRefused

SETTING = "HYDRA_DOWNLOAD_FROM"
# The internet only; that and private networks; every address.
PUBLIC, LAN, ANY = REACHES = ("public", "lan", "any")
# Where clouds tell a machine its credentials, outside of the link-local range.
_METADATA = frozenset(map(ipaddress.ip_address, ("fd00:ec2::254", "100.100.100.200")))


def is_allowed(address: str, reach: str) -> bool:
    """Whether a file may come from this IP address; `reach` is one of REACHES, anything else counts as the narrowest."""
    if reach == ANY:
        return True
    found = ipaddress.ip_address(address.partition("%")[0])
    # The same machine, whichever way its address is written.
    found = getattr(found, "ipv4_mapped", None) or found
    if found.is_loopback or found.is_link_local or found.is_multicast or found.is_unspecified or found in _METADATA:
        return False
    return reach == LAN or found.is_global


class _Checks(http.client.HTTPConnection):
    """Looks at whom it has reached before it says a word: a name may lead elsewhere at every look."""

    def connect(self) -> None:
        super().connect()
        address = str(self.sock.getpeername()[0])
        if not is_allowed(address, os.environ.get(SETTING, "").strip() or LAN):
            self.close()
            raise DownloadRefused(f"{self.host} is at {address}, from where no file is fetched")


class _ChecksHttps(_Checks, http.client.HTTPSConnection):
    pass


class CheckedHttp(urllib.request.HTTPHandler):
    """A proxy that the environment names is trusted, and decides itself."""

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return super().http_open(req) if req.has_proxy() else self._checked(req)

    def _checked(self, req: Any) -> http.client.HTTPResponse:
        answer: http.client.HTTPResponse = self.do_open(_Checks, req)
        return answer


class CheckedHttps(urllib.request.HTTPSHandler):
    """The same over TLS."""

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return super().https_open(req) if req.has_proxy() or getattr(req, "_tunnel_host", None) else self._checked(req)

    def _checked(self, req: Any) -> http.client.HTTPResponse:
        answer: http.client.HTTPResponse = self.do_open(_ChecksHttps, req)
        return answer
