"""`python -m hydra_site.serve`: Daphne with our limits, on HYDRA_BIND and HYDRA_PORT.

A request body over HYDRA_MAX_BODY_BYTES is read to its end but not kept, and answered with a JSON 413, so that the client
sees the answer and not a broken connection. SIGTERM ends the process within seconds, whatever streams are open.
"""

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Callable
from io import BytesIO
from typing import Any

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "hydra_site.settings")

# Daphne first: it chooses Twisted's reactor.
import daphne.server
from daphne.endpoints import build_endpoint_description_strings
from daphne.http_protocol import HTTPFactory, WebRequest
from twisted.internet import defer, reactor

MAX_DRAINED_BYTES = 1 << 30
STOP_CANCEL_S = 1.5
GOING_AWAY = 1001
STOP_DEADLINE_S = 4.5
POOL_TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)


class BoundedRequest(WebRequest):
    """A request that keeps no body beyond the limit."""

    limit_bytes = 0
    refusal: Callable[[str], bytes]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Nobody reads Twisted's own form values, and parsing them would copy the body.
        self._parsePOSTFormSubmission = False
        self._received_bytes = 0
        self._is_too_large = False

    def gotLength(self, length: int | None) -> None:
        """All headers are here; `length` is None for a chunked body."""
        self._is_too_large = length is not None and length > self.limit_bytes
        super().gotLength(0 if self._is_too_large else length)

    def handleContentChunk(self, data: bytes) -> None:
        """A part of the body: kept while it fits, else only counted."""
        self._received_bytes += len(data)
        if self._received_bytes > self.limit_bytes and not self._is_too_large:
            self._is_too_large = True
            self.content.close()
            self.content = BytesIO()
        if not self._is_too_large:
            super().handleContentChunk(data)
        elif self._received_bytes > MAX_DRAINED_BYTES:
            # Patience ends somewhere: whoever sends this much does not read answers.
            self.channel.forceAbortClient()

    def process(self) -> Any:
        if not self._is_too_large:
            return super().process()
        refusal = type(self).refusal(self.path.decode("latin-1"))
        headers = [(b"Content-Type", b"application/json"), (b"Content-Length", str(len(refusal)).encode())]
        self.handle_reply({"type": "http.response.start", "status": 413, "headers": headers})
        self.handle_reply({"type": "http.response.body", "body": refusal})
        return None


class BoundedHTTPFactory(HTTPFactory):
    """Makes connections whose requests are bounded."""

    def buildProtocol(self, addr: Any) -> Any:
        protocol = super().buildProtocol(addr)
        protocol.requestFactory = BoundedRequest
        return protocol


# Daphne's server makes its factory by this name and offers no other way to give it one.
daphne.server.HTTPFactory = BoundedHTTPFactory


class SiteServer(daphne.server.Server):
    """Daphne that tells when it cannot listen, and stops in bounded time."""

    could_listen = True

    def listen_error(self, failure: Any) -> None:
        self.could_listen = False
        super().listen_error(failure)

    def kill_all_applications(self) -> Any:
        """End what runs, give its last writes a moment, and never wait longer than STOP_CANCEL_S for either."""
        # Whatever hangs after this (a thread in a query, a client that reads nothing) must not keep the process.
        watchdog = threading.Timer(STOP_DEADLINE_S, os._exit, args=(0,))
        watchdog.daemon = True
        watchdog.start()
        return defer.Deferred.fromFuture(asyncio.ensure_future(self._end_applications()))

    async def _end_applications(self) -> None:
        from engines.client import close_client_session
        from sessions.relayed_request import dispatcher, lease_desk
        from sessions.stream_desk import stream_desk
        from sessions.turn import wait_for_writes

        running = {
            protocol: details["application_instance"]
            for protocol, details in self.connections.items()
            if "application_instance" in details and not details["application_instance"].done()
        }
        for protocol in running:
            # Cancelling would end only the outer task of a request; a disconnect ends its view, and the view its engine's work.
            is_http = isinstance(protocol, WebRequest)
            gone = {"type": "http.disconnect"} if is_http else {"type": "websocket.disconnect", "code": GOING_AWAY}
            protocol.application_queue.put_nowait(gone)
        if running:
            _, still_running = await asyncio.wait(running.values(), timeout=STOP_CANCEL_S)
            for application in still_running:
                application.cancel()
        await stream_desk().close()
        await wait_for_writes(STOP_CANCEL_S)
        await lease_desk().close(STOP_CANCEL_S)
        await dispatcher().watch.close()
        await close_client_session()


def use_connection_pool() -> None:
    """Keep database connections open between requests. Only here: other processes make few and short ones."""
    from django.conf import settings

    from pools.db import DATABASE_THREADS

    database = settings.DATABASES["default"]
    if database["ENGINE"] == "django.db.backends.postgresql":
        database["OPTIONS"]["pool"] = {"min_size": 1, "max_size": DATABASE_THREADS, "timeout": POOL_TIMEOUT_S}


def refuse_without_keys() -> None:
    """Exit with one line when the site would listen beyond loopback and nobody could be told apart from anybody."""
    from django.conf import settings
    from django.db import connections

    from engines.browser_guard import is_loopback
    from sessions.api_keys import count_valid_keys

    if is_loopback(settings.HYDRA_BIND):
        return
    if not count_valid_keys():
        sys.exit(
            f"HYDRA_BIND={settings.HYDRA_BIND} needs an API key: make one with `manage.py apikey create NAME`, "
            "or listen on 127.0.0.1"
        )
    connections.close_all()


def main() -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code."""
    import django
    from django.conf import settings

    use_connection_pool()
    django.setup()
    refuse_without_keys()

    from hydra_site.asgi import application
    from sessions.api.answers import body_too_large
    from sessions.lease_line import LeaseLine
    from sessions.pool_watch import PoolWatch

    LeaseLine.kept = PoolWatch.kept = True
    BoundedRequest.limit_bytes = settings.HYDRA_MAX_BODY_BYTES
    BoundedRequest.refusal = body_too_large
    server = SiteServer(
        application,
        endpoints=build_endpoint_description_strings(host=settings.HYDRA_BIND, port=settings.HYDRA_PORT),
        http_timeout=None,
        request_buffer_size=1 << 20,
        websocket_max_message_size=2 << 20,
        websocket_max_frame_size=2 << 20,
        server_name="",
        verbosity=1,
    )
    logger.info("serving on %s port %d", settings.HYDRA_BIND, settings.HYDRA_PORT)
    server.run()
    return 0 if server.could_listen else 1


if __name__ == "__main__":
    assert reactor is not None
    raise SystemExit(main())
