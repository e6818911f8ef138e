"""`python -m tests.hosts.fake_engines COUNT`: a process that answers on COUNT ports as so many engines would, without models.

Prints its ports as one JSON list and serves until its standard input ends. /health and /slots speak the engine's own wire.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys

from aiohttp import web

from engines.config import SlotView

SLOT = SlotView(0, "decode", True, "r", 812, 812, 40, 0, 4096, 31.5)


async def health(_: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


async def slots(_: web.Request) -> web.Response:
    return web.json_response(
        [dataclasses.asdict(SLOT), dataclasses.asdict(dataclasses.replace(SLOT, id=1, state="idle"))]
    )


async def serve(count: int) -> None:
    app = web.Application()
    app.add_routes([web.get("/health", health), web.get("/slots", slots)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    for _ in range(count):
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=16).start()
    print(json.dumps([address[1] for address in runner.addresses]), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
