"""A store's process, put together: its protocol, its pages for people, and what runs by itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from engines.browser_guard import foreign_page
from engines.rpc_serving import RpcServer, Terms
from engines.store.config import StoreConfig
from engines.store.disk import DiskCopy
from engines.store.home import Home, remove_abandoned
from engines.store.metrics import StoreCollector
from engines.store.operations import STORE_VERSION, StoreOperations
from engines.store.place_operations import PlaceOperations
from engines.store.slabs import TmpfsFull
from engines.store.store import Store
from engines.store.transfer import Transfer
from engines.store.write_behind import WriteBehind

log = logging.getLogger("hydra.store")

LIFE_SIGN_S = 30.0
SHOWN_MANIFESTS = 200
FLUSH_PATIENCE_S = 5.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class StoreServer:
    """From `start` to `close`. Used on asyncio's own event loop, which has sendfile."""

    def __init__(self, config: StoreConfig) -> None:
        """Raises StoreUnusable; takes the directory and reads what lies there."""
        self._config = config
        self._home = Home(config)
        remove_abandoned(config)
        self.store = Store(config, same_boot=self._home.same_boot)
        self._registry = CollectorRegistry()
        self._transfer = Transfer(self.store)
        StoreCollector(self.store, self._transfer, self._registry)
        terms = Terms(
            host=config.host,
            port=config.port,
            name=f"store {config.instance}",
            secret=config.secret,
            connections=config.connections,
            idle_s=config.idle_s,
            stall_s=config.stall_s,
        )
        services = StoreOperations(self.store, self._transfer).services()
        services |= PlaceOperations(self.store, self._transfer).services()
        self._rpc = RpcServer(terms, services, {}, self._registry)
        self._disk = self._disk_copy()
        self._http: web.AppRunner | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def _disk_copy(self) -> WriteBehind | None:
        config = self._config
        if not config.disk_directory:
            return None
        copy = WriteBehind(self.store, DiskCopy(Path(config.disk_directory), config.disk_manifests, config.disk_bytes))
        self.store.on_saved, self.store.on_deleted = copy.saved, copy.deleted
        return copy

    async def start(self) -> None:
        """Raises OSError when an address cannot be had."""
        await self._rpc.start()
        if self._config.http_port:
            self._http = web.AppRunner(self._app(), access_log=None)
            await self._http.setup()
            await web.TCPSite(self._http, self._config.http_host, self._config.http_port).start()
        self._tasks.append(asyncio.create_task(self._keep_house()))
        if self._disk is not None:
            self._tasks.append(asyncio.create_task(self._disk.run()))

    async def until_broken(self) -> None:
        """Returns when something that runs by itself has ended, which it never should; the log says why."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            log.error("the store cannot go on", exc_info=task.exception())

    async def close(self, *, clean: bool = True) -> None:
        """`clean` False leaves the memory for the next process, as a crash would."""
        for task in self._tasks:
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(result, Exception):
                log.error("a task of the store ended: %r", result)
        await self._rpc.close()
        if self._http is not None:
            await self._http.cleanup()
        if self._disk is not None:
            try:
                await asyncio.wait_for(self._disk.flush(), FLUSH_PATIENCE_S)
            except TimeoutError:
                log.warning("not everything that waited could be copied to disk in %g s", FLUSH_PATIENCE_S)
        self.store.close()
        self._home.close(clean=clean)

    def release(self) -> None:
        """Lets go of the directory without a start: the next one finds it as it is."""
        self.store.close()
        self._home.close(clean=False)

    async def _keep_house(self) -> None:
        shown = 0.0
        while True:
            await self._grow_ahead()
            await asyncio.sleep(self._config.sweep_s)
            self.store.sweep()
            now = asyncio.get_running_loop().time()
            if now - shown >= LIFE_SIGN_S:
                self._home.show_life()
                shown = now

    async def _grow_ahead(self) -> None:
        growth = self.store.growth()
        if growth is None:
            return
        making = asyncio.ensure_future(asyncio.to_thread(growth.make))
        try:
            await asyncio.wait({making})
        finally:
            # Also at a stop: no file may appear after the directory is gone.
            await asyncio.wait({making})
            error = making.exception()
            self.store.slabs.end_growth(None if error else making.result())
        if isinstance(error, TmpfsFull):
            self.store.note_full(error)
        elif error is not None:
            raise error

    # --- for people -----------------------------------------------------------------------------

    def _app(self) -> web.Application:
        app = web.Application(middlewares=[refuse_foreign_pages])
        app.router.add_get("/health", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/debug", self._debug)
        return app

    async def _health(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _version(self, _request: web.Request) -> web.Response:
        return web.json_response({"engine": "hydra-store", "version": STORE_VERSION, "instance": self._config.instance})

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _debug(self, _request: web.Request) -> web.Response:
        """Books and the manifests that were used last; no bytes."""
        latest = list(self.store.manifests)[-SHOWN_MANIFESTS:]
        manifests = [
            {
                "name": stored.name,
                "session": stored.session,
                "n_past": stored.manifest.n_past,
                "size": stored.manifest.total_size,
                "chunks": len(stored.objects),
                "pinned": stored.manifest.pinned,
                "modified": stored.modified,
            }
            for stored in reversed(latest)
        ]
        return web.json_response(
            {"status": asdict(self.store.status()), "counts": asdict(self.store.counts), "manifests": manifests}
        )


@web.middleware
async def refuse_foreign_pages(request: web.Request, handler: Handler) -> web.StreamResponse:
    reason = foreign_page(request.headers)
    if reason is not None:
        raise web.HTTPForbidden(text=f"Not for pages of other sites: {reason}.")
    return await handler(request)
