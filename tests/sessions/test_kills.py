"""kill -9 of whatever takes part in a handoff, at any of its moments, under streams of all kinds: a table of what came of it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import aiohttp
import psutil
import pytest
from celery import current_app
from django.db.models.functions import Now

from engines.client import close_client_session
from engines.models import Engine
from engines.runtime.arena import FOLDER, PREFIX
from hydra_site.supervisor.home import Services
from pools.db import in_db
from sessions import handoffs
from sessions.models import ChatSession, Handoff, SlotLease
from sessions.turn import wait_for_writes
from tests.engine_process import EngineProcess, free_port
from tests.engines.store.store_process import StoreProcess, store_on_tmpfs
from tests.fault_table import FaultTable
from tests.rows import add_engine, add_model, set_ready
from tests.sessions.site_process import ROOT, Site
from tests.sessions.stream_readers import Reader, call_of, said_in
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db(transaction=True)
SECRET = "a secret of the tests, long enough"
PATIENCE_S, BASELINE_S = 120.0, 30.0
MOST_GROWTH_BYTES = 96 << 20
MOVER = "import sys, asyncio, django; django.setup(); from sessions import handoffs; asyncio.run(handoffs.run(int(sys.argv[1])))"
TABLE = FaultTable("kill -9 under streams", "streams", "whole", "broken", "two owners", "moved", "leases left")
# Seconds after the handoff was asked for.
MOMENTS = (0.0, 0.01, 0.03, 0.08, 0.2, 0.5)


@dataclass
class Pool:
    engines: dict[str, EngineProcess]
    store: StoreProcess
    site: Site
    killed: list[int] = field(default_factory=list)
    head: subprocess.Popen[bytes] | None = None

    def restart(self, name: str) -> None:
        engine = self.engines[name]
        engine.process.wait(10)
        self.killed.append(engine.process.pid)
        engine.__enter__()
        set_ready(Engine.objects.get(name=name), engine.config.port, engine.process.pid)

    async def running(self) -> Counter[str]:
        """How many engines decode each request right now."""
        found: Counter[str] = Counter()
        for engine in self.engines.values():
            try:
                slots = await asyncio.to_thread(engine.get, "/slots")
            except OSError:
                continue
            found.update(slot["request_id"] for slot in slots if slot["state"] == "decode" and slot["request_id"])
        return found


@pytest.fixture
async def pool(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path, servers: Services, transactional_db: None
) -> AsyncIterator[Pool]:
    model = tiny_model("llama", tie_free=True, layers=6)
    with ExitStack() as stack:
        store = stack.enter_context(store_on_tmpfs(tmp_path))
        settings = {"slots": 12, "context_tokens": 2048, "kv_block_tokens": 64, "store_port": store.config.port}
        engines = {}
        for name in ("cpu-0", "cpu-1"):
            engine = EngineProcess(tmp_path, model.path, rpc_port=free_port(), rpc_secret=SECRET, **settings)
            engines[name] = stack.enter_context(engine)

        def write() -> None:
            variant = add_model(model.path, tmp_path)
            for name, engine in engines.items():
                row = add_engine(variant, name=name, slots=12)
                values = {"context_tokens": 2048, "rpc_port": engine.config.rpc_port, "rpc_secret": SECRET}
                Engine.objects.filter(pk=row.pk).update(**values)
                set_ready(row, engine.config.port, engine.process.pid)

        await in_db(write)
        yield Pool(engines, store, await asyncio.to_thread(Site, tmp_path, servers))
        await wait_for_writes(10)
        await close_client_session()


async def handoff_of(pool: Pool, reader: Reader) -> tuple[int, str, str]:
    """A handoff of the reader's running conversation, planned; with its source and its target."""
    assert reader.answer is not None
    source = reader.answer.engine.name
    target = next(name for name in pool.engines if name != source)

    def plan() -> int:
        chat = ChatSession.objects.get(key_hash=f"{reader.number:064x}")
        ids = dict(Engine.objects.values_list("name", "pk"))
        return handoffs.start(chat.pk, ids[source], ids[target], send=False)

    async with asyncio.timeout(PATIENCE_S):
        while not await in_db(ChatSession.objects.filter(key_hash=f"{reader.number:064x}").exists):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return await in_db(plan), source, target


async def killed(pool: Pool, victim: str, moment_s: float, reader: Reader) -> str:
    """Move the reader's conversation and kill `victim` meanwhile. Returns the name of an engine that is down now."""
    move, source, target = await handoff_of(pool, reader)
    down = {"source": source, "target": target}.get(victim, "")
    if victim == "head":
        await killed_head(pool, move, moment_s)
        return ""
    if victim == "mover":
        argv = [sys.executable, "-c", MOVER, str(move)]
        environ = {**pool.site.environ, "DJANGO_SETTINGS_MODULE": "hydra_site.settings"}
        mover = await asyncio.to_thread(subprocess.Popen, argv, cwd=ROOT, env=environ)
        while (await in_db(handoffs.view, move)).state == "planned" and mover.poll() is None:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await asyncio.sleep(moment_s)
        mover.kill()
        mover.wait()
        await handoffs.run(move)  # as the sweep does
        return ""
    running = asyncio.create_task(handoffs.run(move))
    await asyncio.sleep(moment_s)
    (pool.engines[down].process if down else pool.store.process).kill()
    await running
    return down


async def started_head(pool: Pool, home: Path) -> subprocess.Popen[bytes]:
    """A worker of Celery that listens for moves, in the home of the pool's site."""
    (home / "run").mkdir(exist_ok=True)
    environ = {**pool.site.environ, "DJANGO_SETTINGS_MODULE": "hydra_site.settings", "HYDRA_HOST_NAME": "killed"}
    argv = [sys.executable, "-m", "celery", "-A", "hydra_site.celery", "worker", "-n", "slow@killed", "--pool=threads",
            "--concurrency=1", "-Q", "control,host.killed.slow", "--without-mingle", "--without-gossip"]  # fmt: skip
    log = home / "head.log"
    with log.open("wb") as stream:
        head = await asyncio.to_thread(subprocess.Popen, argv, cwd=ROOT, env=environ, stdout=stream, stderr=stream)
    async with asyncio.timeout(PATIENCE_S):
        while not (home / "run" / "head-slow.ready").exists():
            assert head.poll() is None, log.read_text()
            await asyncio.sleep(0.05)
    return head


async def killed_head(pool: Pool, move: int, moment_s: float) -> None:
    """The worker takes the move's task and dies over it; what it left is swept by another one."""
    assert pool.head is not None

    def send() -> None:
        with current_app.connection_for_write(pool.site.environ["BROKER_URL"]) as broker:
            current_app.send_task("sessions.tasks.run_handoff", args=[move], queue="control", connection=broker)

    await asyncio.to_thread(send)
    while (await in_db(handoffs.view, move)).state == "planned":
        assert pool.head.poll() is None
        await asyncio.sleep(0.005)
    await asyncio.sleep(moment_s)
    pool.head.kill()
    pool.head.wait()
    await in_db(lambda: Handoff.objects.filter(pk=move).update(started_at=Now() - timedelta(minutes=5)))
    for stuck in await in_db(handoffs.stuck):
        await handoffs.run(stuck)


async def round_of(pool: Pool, victim: str, moment_s: float, count: int) -> None:
    readers = [Reader(number) for number in range(count)]
    twice: set[str] = set()

    async def watch() -> None:
        while True:
            twice.update(request for request, engines in (await pool.running()).items() if engines > 1)
            await asyncio.sleep(0.05)

    watching = asyncio.create_task(watch())
    async with asyncio.timeout(PATIENCE_S):
        streams = [asyncio.create_task(reader.run()) for reader in readers]
        await asyncio.gather(*(reader.begun.wait() for reader in readers[:3]))
        down = await killed(pool, victim, moment_s, readers[0])
        await asyncio.gather(*streams)
    watching.cancel()
    if down:
        await in_db(pool.restart, down)
    if victim == "store":
        await asyncio.to_thread(pool.store.restart)
    alone = await asyncio.gather(*(Reader(number).run() for number in range(count)))
    broken = [reader.number for reader, other in zip(readers, alone, strict=True) if reader.said != other.said]
    whole = count - len(broken)
    moved = await in_db(lambda: handoffs.views(handoffs.Q(), 1)[0].state == "committed")
    left = await leases_left()
    TABLE.add(
        victim,
        streams=count,
        whole=whole,
        broken=len(broken),
        two_owners=len(twice),
        moved=int(moved),
        leases_left=left,
    )
    assert (broken, twice, left) == ([], set(), 0), [readers[number].said[-2:] for number in broken]
    for engine in pool.engines.values():
        await asyncio.to_thread(engine.wait_idle)


async def leases_left() -> int:
    until = time.monotonic() + BASELINE_S
    while (left := await in_db(SlotLease.objects.count)) and time.monotonic() < until:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    return left


def usage(pool: Pool) -> list[int]:
    """Bytes that each engine has, its share of tmpfs included; of those that were killed nothing is left there."""
    abandoned = [path for pid in pool.killed for path in FOLDER.glob(f"{PREFIX}{pid}-*")]
    assert not abandoned
    processes = [psutil.Process(engine.process.pid) for engine in pool.engines.values()]
    return [process.memory_info().rss for process in processes]


async def test_a_source_that_is_killed_while_its_conversation_moves(pool: Pool) -> None:
    await round_of(pool, "source", 0.02, 3)


@pytest.mark.soak
@pytest.mark.parametrize("moment_s", MOMENTS)
@pytest.mark.parametrize("victim", ["source", "target", "mover", "head", "store"])
async def test_whoever_is_killed_at_any_moment_of_a_move_nobody_loses_a_word(
    pool: Pool, victim: str, moment_s: float, tmp_path: Path
) -> None:
    await asyncio.gather(*(Reader(number).run() for number in range(20)))
    before = await asyncio.to_thread(usage, pool)
    if victim == "head":
        pool.head = await started_head(pool, tmp_path)
    try:
        await round_of(pool, victim, moment_s, 20)
    finally:
        if pool.head is not None:
            pool.head.kill()
            pool.head.wait()
    after = await asyncio.to_thread(usage, pool)
    assert max(after) - max(before) < MOST_GROWTH_BYTES


async def kept(http: aiohttp.ClientSession, site: Site, number: int, had: dict[str, list[bytes]]) -> None:
    """A client that asks for a stream that can be resumed, and loses its site."""
    call = call_of(number)
    headers = {"X-Hydra-Resumable": "1", "X-Conversation-Id": f"kill-{number}"}
    url = f"http://127.0.0.1:{site.port}{call.dialect.path}"
    try:
        async with http.post(url, data=call.raw, headers=headers) as answer:
            events = had.setdefault(answer.headers["X-Request-Id"], [])
            had[f"number {number}"] = events
            pending = b""
            async for data in answer.content.iter_any():
                *whole, pending = (pending + data).split(b"\n\n")
                events += [one + b"\n\n" for one in whole if one and one[:1] != b":"]
    except aiohttp.ClientError:
        """Killed."""


@pytest.mark.soak
async def test_a_replica_that_is_killed_has_its_streams_read_on_at_another(
    pool: Pool, servers: Services, tmp_path: Path
) -> None:
    sites = []
    for number in range(2):
        (tmp_path / f"site-{number}").mkdir()
        sites.append(await asyncio.to_thread(Site, tmp_path / f"site-{number}", servers))
        sites[-1].start()
    try:
        for site in sites:
            await asyncio.to_thread(site.wait_up)
        await replica_round(pool, sites, 20)
    finally:
        for site in sites:
            if site.process.poll() is None:
                await asyncio.to_thread(site.stop)


async def replica_round(pool: Pool, sites: list[Site], count: int) -> None:
    had: dict[str, list[bytes]] = {}
    numbers: dict[int, list[bytes]] = {}
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
        clients = [asyncio.create_task(kept(http, sites[0], number, had)) for number in range(count)]
        async with asyncio.timeout(PATIENCE_S):
            while len(had) < 2 * count or min(map(len, had.values())) < 10:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        sites[0].process.kill()
        await asyncio.gather(*clients)
        for number in range(count):
            events = had[f"number {number}"]
            url = f"http://127.0.0.1:{sites[1].port}/v1/stream/kill-{number}?from={len(events)}"
            async with http.get(url) as answer:
                assert answer.status == 200, await answer.text()
                rest = await answer.read()
            numbers[number] = [*events, rest]
    alone = await asyncio.gather(*(Reader(number).run() for number in range(count)))
    whole = sum(said_in(numbers[reader.number]) == reader.said for reader in alone)
    left = await leases_left()
    TABLE.add("site replica", streams=count, whole=whole, broken=count - whole, leases_left=left)
    assert (whole, left) == (count, 0)
