"""Who a request of the API is from.

1. A presented key must be valid; then nothing else is asked, for a web page cannot know it. Where no key is needed, one that
   cannot be ours counts as none: OpenAI's clients insist on some key, and people give them "none" or "sk-local".
2. Without a key, a site that listens on loopback is open to programs of its own machine: peer and Host must be loopback,
   nothing may have been forwarded, and no page of another site may have sent it.
3. Else somebody who is logged in to the panel may use it from the panel's own pages.
"""

from __future__ import annotations

import time
from importlib import import_module

from django.conf import settings
from django.contrib.auth import get_user
from django.http import HttpRequest

from engines.browser_guard import foreign_page, host_name, is_loopback
from pools.db import REQUEST_PATIENCE_S, in_db_within
from sessions import api_keys
from sessions.api_keys import KeyView
from sessions.errors import AuthenticationRequired, ForeignOrigin, KeyInvalid
from sessions.identity import Owner

# How long a revoked key may still work.
KEY_CACHE_S = 5.0
MAX_CACHED_KEYS = 1024
MAX_KEY_CHARS = 512
_FORWARDING_HEADERS = ("Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Real-Ip")


class KeyRing:
    """Keys that were valid a moment ago, so that a busy client costs the database one question every few seconds."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[KeyView, float]] = {}

    async def check(self, key: str) -> KeyView:
        """The valid key of this text. Raises KeyInvalid."""
        now = time.monotonic()
        digest = api_keys.hash_key(key)
        known = self._known.get(digest)
        if known is not None and now - known[1] < KEY_CACHE_S and known[0].is_valid:
            return known[0]
        view = await in_db_within(REQUEST_PATIENCE_S, _find_and_touch, key)
        if view is None or not view.is_valid:
            self._known.pop(digest, None)
            raise KeyInvalid("The API key is not valid.")
        if len(self._known) >= MAX_CACHED_KEYS:
            self._known.clear()
        self._known[digest] = (view, now)
        return view


_ring = KeyRing()


async def authenticate(request: HttpRequest) -> Owner:
    """Who sent this request. Raises KeyInvalid, AuthenticationRequired (401) or ForeignOrigin (403)."""
    key = _presented_key(request)
    is_open = _is_open(request)
    if key is not None and (not is_open or key.startswith(api_keys.KEY_MARK)):
        return Owner(api_key_id=(await _ring.check(key)).id)
    foreign = foreign_page(request.headers)
    if is_open:
        if foreign is not None:
            raise ForeignOrigin(f"Requests from other web pages are refused ({foreign}).")
        return Owner()
    user_id = None if foreign else await _panel_user(request)
    if user_id is None:
        raise AuthenticationRequired("This needs an API key.")
    return Owner(user_id=user_id)


def _find_and_touch(key: str) -> KeyView | None:
    view = api_keys.find_key(key)
    if view is not None and view.is_valid:
        api_keys.touch_key(view.id)
    return view


def _presented_key(request: HttpRequest) -> str | None:
    """The key of the request, None without one. Raises KeyInvalid for an Authorization of another kind."""
    authorization = request.headers.get("Authorization", "").strip()
    if authorization:
        scheme, _, value = authorization.partition(" ")
        if scheme.lower() != "bearer":
            raise KeyInvalid("Authorization must be of the kind `Bearer KEY`.")
        key = value.strip()
    else:
        key = request.headers.get("x-api-key", "").strip()
    if len(key) > MAX_KEY_CHARS:
        raise KeyInvalid("The API key is not valid.")
    return key or None


def _is_open(request: HttpRequest) -> bool:
    """Whether the request came from this machine itself to a site that only this machine can reach."""
    if not is_loopback(settings.HYDRA_BIND) or not is_loopback(str(request.META.get("REMOTE_ADDR", ""))):
        return False
    if any(name in request.headers for name in _FORWARDING_HEADERS):
        return False
    # A page that had its own name resolve to 127.0.0.1 still sends that name.
    return is_loopback(host_name(request.headers.get("Host", "")))


async def _panel_user(request: HttpRequest) -> int | None:
    cookie = request.COOKIES.get(settings.SESSION_COOKIE_NAME)
    if not cookie:
        return None
    if not hasattr(request, "session"):
        request.session = import_module(settings.SESSION_ENGINE).SessionStore(cookie)
    user = await in_db_within(REQUEST_PATIENCE_S, get_user, request)
    return user.pk if user.is_authenticated else None
