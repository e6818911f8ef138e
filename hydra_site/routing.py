"""WebSocket addresses of the panel."""

from __future__ import annotations

from django.urls import path

from hydra_site.consumers import PoolConsumer
from sessions.playground import PlaygroundConsumer

websocket_urlpatterns = [
    path("ws/pool/", PoolConsumer.as_asgi()),
    path("ws/playground/", PlaygroundConsumer.as_asgi()),
]
