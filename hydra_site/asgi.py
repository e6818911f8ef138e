"""The site as one ASGI application: pages, the API, and the panel's WebSockets.

The API and the health checks do not pass through the middleware of pages: sessions, messages and CSRF tokens mean nothing to
them, and each step of that chain costs a change of thread.
"""

import os
from collections.abc import Awaitable, Callable
from typing import Any

from channels.auth import AuthMiddlewareStack
from channels.routing import ProtocolTypeRouter, URLRouter
from channels.security.websocket import AllowedHostsOriginValidator, WebsocketDenier
from django.core.asgi import get_asgi_application
from django.core.handlers.asgi import ASGIHandler
from django.core.handlers.exception import convert_exception_to_response

from engines.browser_guard import foreign_page

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "hydra_site.settings")
pages = get_asgi_application()

# Imported after Django is set up: consumers reach models.
from hydra_site.routing import websocket_urlpatterns  # noqa: E402
from sessions.api.urls import root_urlpatterns  # noqa: E402

API_ROOT = "/v1/"
API_PATHS = frozenset({"/v1", "/health", "/healthz", "/readyz", *(f"/{path.pattern}" for path in root_urlpatterns)})


class ApiHandler(ASGIHandler):
    """Django's handler with an empty chain of middleware. The API's views answer their own errors."""

    def load_middleware(self, is_async: bool = False) -> None:
        self._view_middleware = []
        self._template_response_middleware = []
        self._exception_middleware = []
        self._middleware_chain = convert_exception_to_response(self._get_response_async)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Without the thread of its own that Django makes for every request: the API's views use `in_db`, which has its own.
        await self.handle(scope, receive, send)


class OwnPagesOnly:
    """Lets only this site's own pages open a WebSocket: browsers send cookies along for pages of other ports too."""

    def __init__(self, application: Application) -> None:
        self.application = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1").title(): value.decode("latin-1") for name, value in scope["headers"]}
        # The handshake's Sec-Fetch-Site is told by some browsers only; its Origin by all.
        application = self.application if foreign_page(headers) is None else WebsocketDenier()
        await application(scope, receive, send)


class ByPath:
    """Sends requests of the API to one application and all others to another."""

    def __init__(self, api: Application, pages: Application) -> None:
        self.api = api
        self.pages = pages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        is_api = path.startswith(API_ROOT) or path in API_PATHS
        await (self.api if is_api else self.pages)(scope, receive, send)


application = ProtocolTypeRouter(
    {
        "http": ByPath(ApiHandler(), pages),
        "websocket": AllowedHostsOriginValidator(OwnPagesOnly(AuthMiddlewareStack(URLRouter(websocket_urlpatterns)))),
    }
)
