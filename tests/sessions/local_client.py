"""Django's client as a program of the machine itself."""

from __future__ import annotations

from typing import Any

from django.test import AsyncClient


class LocalClient(AsyncClient):
    """Sends the Host that a program of this machine would: the one of Django's client is a name that nobody has."""

    def _base_scope(self, **request: Any) -> dict[str, Any]:
        scope = super()._base_scope(**request)
        headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
        return {**scope, "headers": [(b"host", b"localhost"), *headers]}
