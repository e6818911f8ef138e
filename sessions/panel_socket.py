"""What the WebSockets of the panel's pages have in common: only people who are logged in, and nothing left behind."""

from __future__ import annotations

from typing import Any

from channels.generic.websocket import AsyncWebsocketConsumer

CLOSE_NOT_LOGGED_IN = 4401
CLOSE_SILENT_PAGE = 4408


class PanelSocket(AsyncWebsocketConsumer):
    """A page's end of a WebSocket. Subclasses begin in `opened` and end in `ended`, which always runs."""

    # Pages must outlive the channel layer: the dashboard's watcher listens to it for all of them, tokens never pass through it.
    channel_layer_alias = "none"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Runs until the page leaves or the server stops; either way nothing of this page goes on."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.ended()

    async def connect(self) -> None:
        await self.accept()
        user = self.scope.get("user")
        if user is None or not user.is_authenticated:
            # Closed after accepting, because a browser sees the code only then.
            await self.close(CLOSE_NOT_LOGGED_IN)
            return
        await self.opened(int(user.pk))

    async def opened(self, user_id: int) -> None:
        """The page of this user is connected."""

    async def ended(self) -> None:
        """The page has gone, or never got in."""
