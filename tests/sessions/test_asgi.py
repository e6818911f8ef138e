"""The panel's WebSockets open only for the panel's own pages."""

from __future__ import annotations

import pytest
from channels.testing import WebsocketCommunicator
from django.conf import settings

from hydra_site.asgi import OwnPagesOnly, application


async def accepting(scope: object, receive: object, send: object) -> None:
    await send({"type": "websocket.accept"})  # type: ignore[operator]


def handshake(app: object, **headers: str) -> WebsocketCommunicator:
    pairs = [(name.replace("_", "-").lower().encode(), value.encode()) for name, value in headers.items()]
    return WebsocketCommunicator(app, "/ws/pool/", headers=pairs)


async def test_an_own_page_gets_through() -> None:
    opened, _ = await handshake(
        OwnPagesOnly(accepting), Host="localhost:9000", Origin="http://localhost:9000"
    ).connect()
    assert opened


@pytest.mark.parametrize("origin", ["http://evil.example", "http://localhost:3000", "null", "http://["])
async def test_a_page_of_another_site_or_port_does_not(origin: str) -> None:
    opened, _ = await handshake(OwnPagesOnly(accepting), Host="localhost:9000", Origin=origin).connect()
    assert not opened


async def test_the_whole_application_refuses_a_foreign_page_before_it_asks_who_that_is() -> None:
    assert "localhost" in settings.ALLOWED_HOSTS
    opened, _ = await handshake(application, Host="localhost:9000", Origin="http://localhost:3000").connect()
    assert not opened
