"""Two engines, a store and what else takes part in a handoff, each of which may be killed at any moment of one."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from celery import current_app
from django.db.models import Q
from django.db.models.functions import Now

from engines.client import close_client_session
from engines.models import Engine
from hydra_site.supervisor.home import Services
from pools.db import in_db
from sessions import handoffs
from sessions.models import ChatSession, Handoff
from sessions.turn import wait_for_writes
from tests.engine_process import free_port
from tests.engines.store.store_process import StoreProcess, store_on_tmpfs
from tests.paced_engine import PacedEngine
from tests.rows import add_engine, add_model, set_ready
from tests.sessions.site_process import ROOT, Site
from tests.sessions.stream_readers import Reader
from tests.synthetic_gguf import SyntheticModel

SECRET = "a secret of the tests, long enough"
PATIENCE_S = 120.0
# Whichever engine the router fills, one that moves finds a free slot at the other.
SLOTS = 24
# Seconds after the handoff was begun; the last is once it has come to its end.
MOMENTS, AFTERWARDS = (0.0, 0.01, 0.03, 0.08, 0.2, 0.5), math.inf
MOVER = "import sys, asyncio, django; django.setup(); from sessions import handoffs; asyncio.run(handoffs.run(int(sys.argv[1])))"


@dataclass
class KillPool:
    engines: dict[str, PacedEngine]
    store: StoreProcess
    site: Site
    folder: Path
    killed: list[int] = field(default_factory=list)
    head: subprocess.Popen[bytes] | None = None

    @contextmanager
    def slowed(self) -> Iterator[None]:
        """No answer of a moment ends meanwhile."""
        with ExitStack() as stack:
            for engine in self.engines.values():
                stack.enter_context(engine.slowed())
            yield

    def restart(self, name: str) -> None:
        engine = self.engines[name]
        engine.process.wait(10)
        self.killed.append(engine.process.pid)
        engine.__enter__()
        set_ready(Engine.objects.get(name=name), engine.config.port, engine.process.pid)

    async def decoding(self, name: str) -> set[str]:
        """The requests for which an engine makes tokens right now."""
        try:
            slots = await asyncio.to_thread(self.engines[name].get, "/slots")
        except OSError:
            return set()
        return {slot["request_id"] for slot in slots if slot["state"] == "decode" and slot["request_id"]}

    async def running_twice(self) -> set[str]:
        """The requests that two engines run. What moves from the first to the second between two looks is not: it has left."""
        first, second = self.engines
        before = await self.decoding(first)
        both = before & await self.decoding(second)
        return both & await self.decoding(first) if both else both


@asynccontextmanager
async def kill_pool(model: SyntheticModel, folder: Path, servers: Services) -> AsyncIterator[KillPool]:
    with ExitStack() as stack:
        store = stack.enter_context(store_on_tmpfs(folder))
        settings = {"slots": SLOTS, "context_tokens": 2048, "kv_block_tokens": 64, "store_port": store.config.port}
        engines = {}
        for name in ("cpu-0", "cpu-1"):
            engine = PacedEngine(folder, model.path, rpc_port=free_port(), rpc_secret=SECRET, **settings)
            engines[name] = stack.enter_context(engine)

        def write() -> None:
            variant = add_model(model.path, folder)
            for name, engine in engines.items():
                row = add_engine(variant, name=name, slots=SLOTS)
                values = {"context_tokens": 2048, "rpc_port": engine.config.rpc_port, "rpc_secret": SECRET}
                Engine.objects.filter(pk=row.pk).update(**values)
                set_ready(row, engine.config.port, engine.process.pid)

        await in_db(write)
        on_tmpfs = Path(store.config.directory).parent
        pool = KillPool(engines, store, await asyncio.to_thread(Site, folder, servers), on_tmpfs)
        try:
            yield pool
        finally:
            if pool.head is not None:
                pool.head.kill()
                pool.head.wait()
            await wait_for_writes(10)
            await close_client_session()


# --- moves ------------------------------------------------------------------------------------------


async def handoff_of(pool: KillPool, reader: Reader) -> tuple[int, str, str]:
    """A handoff of the reader's conversation, planned; with its source and its target."""
    assert reader.answer is not None
    return await planned(pool, Q(key_hash=f"{reader.number:064x}"), reader.answer.engine.name)


async def planned(pool: KillPool, whose: Q, source: str) -> tuple[int, str, str]:
    target = next(name for name in pool.engines if name != source)

    def plan() -> int:
        ids = dict(Engine.objects.values_list("name", "pk"))
        return handoffs.start(ChatSession.objects.get(whose).pk, ids[source], ids[target], send=False)

    async with asyncio.timeout(PATIENCE_S):
        while not await in_db(ChatSession.objects.filter(whose).exists):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return await in_db(plan), source, target


# --- kills ------------------------------------------------------------------------------------------


async def killed(pool: KillPool, victim: str, moment_s: float, reader: Reader) -> str:
    """Move the reader's conversation and kill `victim` meanwhile. Returns the name of an engine that is down now."""
    move, source, target = await handoff_of(pool, reader)
    if victim in ("head", "mover"):
        await (killed_head if victim == "head" else killed_mover)(pool, move, moment_s)
        return ""
    down = {"source": source, "target": target}.get(victim, "")
    running = asyncio.create_task(handoffs.run(move))
    await (running if moment_s == AFTERWARDS else asyncio.sleep(moment_s))
    (pool.engines[down].process if down else pool.store.process).kill()
    await running
    return down


async def taken_up(move: int, by: subprocess.Popen[bytes]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (await in_db(handoffs.view, move)).state == "planned":
            # One that is quick has taken it up and ended since that look.
            assert by.poll() is None or (await in_db(handoffs.view, move)).state != "planned"
            await asyncio.sleep(0.005)


async def killed_mover(pool: KillPool, move: int, moment_s: float) -> None:
    """A process of its own moves it and dies over it; what it left is gone on with as the sweep does."""
    argv = [sys.executable, "-c", MOVER, str(move)]
    environ = {**pool.site.environ, "DJANGO_SETTINGS_MODULE": "hydra_site.settings"}
    mover = await asyncio.to_thread(subprocess.Popen, argv, cwd=ROOT, env=environ)
    await taken_up(move, mover)
    await asyncio.sleep(moment_s)
    mover.kill()
    mover.wait()
    await handoffs.run(move)


async def started_head(pool: KillPool, home: Path) -> subprocess.Popen[bytes]:
    """A worker of Celery that listens for moves, in the home of the pool's site."""
    (home / "run").mkdir(exist_ok=True)
    environ = {**pool.site.environ, "DJANGO_SETTINGS_MODULE": "hydra_site.settings", "HYDRA_HOST_NAME": "killed"}
    argv = [sys.executable, "-m", "celery", "-A", "hydra_site.celery", "worker", "-n", "slow@killed", "--pool=threads",
            "--concurrency=1", "-Q", "control,host.killed.slow", "--without-mingle", "--without-gossip"]  # fmt: skip
    log = home / "head.log"
    with log.open("wb") as stream:
        head = await asyncio.to_thread(subprocess.Popen, argv, cwd=ROOT, env=environ, stdout=stream, stderr=stream)
    pool.head = head
    async with asyncio.timeout(PATIENCE_S):
        while not (home / "run" / "head-slow.ready").exists():
            assert head.poll() is None, log.read_text()
            await asyncio.sleep(0.05)
    return head


async def killed_head(pool: KillPool, move: int, moment_s: float) -> None:
    """The worker takes the move's task and dies over it; what it left is swept by another one."""
    assert pool.head is not None

    def send() -> None:
        with current_app.connection_for_write(pool.site.environ["BROKER_URL"]) as broker:
            current_app.send_task("sessions.tasks.run_handoff", args=[move], queue="control", connection=broker)

    await asyncio.to_thread(send)
    await taken_up(move, pool.head)
    await asyncio.sleep(moment_s)
    pool.head.kill()
    pool.head.wait()
    await in_db(lambda: Handoff.objects.filter(pk=move).update(started_at=Now() - timedelta(minutes=5)))
    for stuck in await in_db(handoffs.stuck):
        await handoffs.run(stuck)
