"""kill -9 of whatever takes part in a handoff, at any of its moments, under streams of all kinds: a table of what came of it.

In every round one conversation moves undisturbed, so that a pool in which nothing can move fails; then another one moves and
somebody is killed over it. What was moved is counted, and all memory, tmpfs too, must be back as it was.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import aiohttp
import psutil
import pytest
from celery import current_app
from django.db.models import Q
from django.db.models.functions import Now

from engines.client import close_client_session
from engines.models import Engine
from engines.runtime.arena import FOLDER, PREFIX
from hydra_site.supervisor.home import Services
from pools.db import in_db
from sessions import handoffs
from sessions.handoffs import HandoffView
from sessions.models import ChatSession, Handoff, SlotLease, Turn
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
# Whichever engine the router fills, one that moves finds a free slot at the other.
SLOTS = 24
MOVED_TOKENS = 1400
MOST_GROWTH_BYTES = 96 << 20
MOVER = "import sys, asyncio, django; django.setup(); from sessions import handoffs; asyncio.run(handoffs.run(int(sys.argv[1])))"
# A store keeps what it was given of the conversations; they are the same ones before and after.
MOST_STORE_GROWTH_BYTES = 16 << 20
TABLE = FaultTable(
    "kill -9 under streams", "streams", "whole", "broken", "two owners", "moves", "moved", "leases left", "tmpfs left"
)
# Who is no part of the way, or whose work another one does: the move comes to its end all the same, unless the answer does first.
ENDED_FIRST = "The request ended before it could move."
MOVES_ALL_THE_SAME = frozenset({"mover", "head", "store"})
MOVED: Counter[str] = Counter()
# Seconds after the handoff was asked for.
MOMENTS = (0.0, 0.01, 0.03, 0.08, 0.2, 0.5)


@dataclass
class Pool:
    engines: dict[str, EngineProcess]
    store: StoreProcess
    site: Site
    folder: Path
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
        settings = {"slots": SLOTS, "context_tokens": 2048, "kv_block_tokens": 64, "store_port": store.config.port}
        engines = {}
        for name in ("cpu-0", "cpu-1"):
            engine = EngineProcess(tmp_path, model.path, rpc_port=free_port(), rpc_secret=SECRET, **settings)
            engines[name] = stack.enter_context(engine)

        def write() -> None:
            variant = add_model(model.path, tmp_path)
            for name, engine in engines.items():
                row = add_engine(variant, name=name, slots=SLOTS)
                values = {"context_tokens": 2048, "rpc_port": engine.config.rpc_port, "rpc_secret": SECRET}
                Engine.objects.filter(pk=row.pk).update(**values)
                set_ready(row, engine.config.port, engine.process.pid)

        await in_db(write)
        folder = Path(store.config.directory).parent
        yield Pool(engines, store, await asyncio.to_thread(Site, tmp_path, servers), folder)
        await wait_for_writes(10)
        await close_client_session()


async def handoff_of(pool: Pool, reader: Reader) -> tuple[int, str, str]:
    """A handoff of the reader's running conversation, planned; with its source and its target."""
    assert reader.answer is not None
    return await planned(pool, Q(key_hash=f"{reader.number:064x}"), reader.answer.engine.name)


async def planned(pool: Pool, whose: Q, source: str) -> tuple[int, str, str]:
    target = next(name for name in pool.engines if name != source)

    def plan() -> int:
        ids = dict(Engine.objects.values_list("name", "pk"))
        return handoffs.start(ChatSession.objects.get(whose).pk, ids[source], ids[target], send=False)

    async with asyncio.timeout(PATIENCE_S):
        while not await in_db(ChatSession.objects.filter(whose).exists):  # noqa: ASYNC110
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


def readers_of(count: int) -> list[Reader]:
    """The first two move, and go on long enough for it also where asking takes longer than answering."""
    return [Reader(number, MOVED_TOKENS if number < 2 else 0) for number in range(count)]


async def round_of(pool: Pool, victim: str, moment_s: float, count: int) -> None:
    before = await asyncio.to_thread(on_tmpfs, pool)
    readers = readers_of(count)
    twice: set[str] = set()

    async def watch() -> None:
        while True:
            twice.update(request for request, engines in (await pool.running()).items() if engines > 1)
            await asyncio.sleep(0.05)

    watching = asyncio.create_task(watch())
    async with asyncio.timeout(PATIENCE_S):
        streams = [asyncio.create_task(reader.run()) for reader in readers]
        await asyncio.gather(*(reader.begun.wait() for reader in readers[:3]))
        undisturbed = await handoffs.run((await handoff_of(pool, readers[1]))[0])
        down = await killed(pool, victim, moment_s, readers[0])
        await asyncio.gather(*streams)
    watching.cancel()
    if down:
        await in_db(pool.restart, down)
    if victim == "store":
        await asyncio.to_thread(pool.store.restart)
    alone = await asyncio.gather(*(reader.run() for reader in readers_of(count)))
    broken = [reader.number for reader, other in zip(readers, alone, strict=True) if reader.said != other.said]
    whole = count - len(broken)
    (last,) = await in_db(lambda: handoffs.views(Q(), 1))
    moved = int(last.state == "committed")
    MOVED[victim] += moved
    left, abandoned = await leases_left(), await tmpfs_left(pool, before)
    TABLE.add(
        victim,
        streams=count,
        whole=whole,
        broken=len(broken),
        two_owners=len(twice),
        moves=2,
        moved=moved + (undisturbed.state == "committed"),
        leases_left=left,
        tmpfs_left=len(abandoned),
    )
    assert (broken, twice, left) == ([], set(), 0), [readers[number].said[-2:] for number in broken]
    assert undisturbed.state == "committed", undisturbed.reason
    assert moved or victim not in MOVES_ALL_THE_SAME or last.reason.endswith(ENDED_FIRST), last.reason
    assert not abandoned
    for engine in pool.engines.values():
        await asyncio.to_thread(engine.wait_idle)


async def leases_left() -> int:
    until = time.monotonic() + BASELINE_S
    while (left := await in_db(SlotLease.objects.count)) and time.monotonic() < until:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    return left


def arenas(pids: Iterable[int]) -> list[Path]:
    return [path for pid in pids for path in FOLDER.glob(f"{PREFIX}{pid}-*")]


def on_tmpfs(pool: Pool) -> int:
    """Bytes that the store has taken there."""
    found = 0
    for path in pool.folder.rglob("*"):
        with suppress(FileNotFoundError):
            found += path.lstat().st_blocks * 512
    return found


async def tmpfs_left(pool: Pool, before: int) -> list[str]:
    """What is on tmpfs and should not be, once it had time to go: arenas of engines that were killed, a second one of an engine
    that runs, and what the store has more than the conversations explain."""

    def look() -> list[str]:
        live = [arenas([engine.process.pid]) for engine in pool.engines.values()]
        found = [str(path) for path in arenas(pool.killed)]
        found += [str(path) for one in live for path in one[1:]]
        growth = on_tmpfs(pool) - before
        return found + ([f"store: {growth} bytes"] if growth > MOST_STORE_GROWTH_BYTES else [])

    until = time.monotonic() + BASELINE_S
    while (left := await asyncio.to_thread(look)) and time.monotonic() < until:  # noqa: ASYNC110 -- nothing tells of it
        await asyncio.sleep(0.1)
    return left


def memory(pool: Pool) -> list[int]:
    """Bytes that each engine has, its share of tmpfs included, and the store."""
    processes = [*(engine.process for engine in pool.engines.values()), pool.store.process]
    return [psutil.Process(process.pid).memory_info().rss for process in processes]


async def memory_back(pool: Pool, before: list[int]) -> bool:
    until = time.monotonic() + BASELINE_S
    while not (back := max(await asyncio.to_thread(memory, pool)) - max(before) < MOST_GROWTH_BYTES):
        if time.monotonic() > until:
            break
        await asyncio.sleep(0.1)
    return back


async def test_a_source_that_is_killed_while_its_conversation_moves(pool: Pool) -> None:
    await round_of(pool, "source", 0.02, 3)


@pytest.mark.soak
@pytest.mark.parametrize("moment_s", MOMENTS)
@pytest.mark.parametrize("victim", ["source", "target", "mover", "head", "store"])
async def test_whoever_is_killed_at_any_moment_of_a_move_nobody_loses_a_word(
    pool: Pool, victim: str, moment_s: float, tmp_path: Path
) -> None:
    await asyncio.gather(*(Reader(number).run() for number in range(20)))
    before = await asyncio.to_thread(memory, pool)
    if victim == "head":
        pool.head = await started_head(pool, tmp_path)
    try:
        await round_of(pool, victim, moment_s, 20)
    finally:
        if pool.head is not None:
            pool.head.kill()
            pool.head.wait()
    assert await memory_back(pool, before)
    if moment_s == MOMENTS[-1]:
        assert MOVED[victim], "at some of its moments the move had come to its end, or came to it"


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
@pytest.mark.parametrize("moment_s", [None, *MOMENTS])
async def test_a_replica_that_is_killed_has_its_streams_read_on_at_another(
    pool: Pool, servers: Services, tmp_path: Path, moment_s: float | None
) -> None:
    """Also while one of its conversations moves, so long after that began."""
    sites = []
    for number in range(2):
        (tmp_path / f"site-{number}").mkdir()
        sites.append(await asyncio.to_thread(Site, tmp_path / f"site-{number}", servers))
        sites[-1].start()
    try:
        for site in sites:
            await asyncio.to_thread(site.wait_up)
        await replica_round(pool, sites, 20, moment_s)
    finally:
        for site in sites:
            if site.process.poll() is None:
                await asyncio.to_thread(site.stop)


async def replica_round(pool: Pool, sites: list[Site], count: int, moment_s: float | None) -> None:
    before = await asyncio.to_thread(on_tmpfs, pool)
    had: dict[str, list[bytes]] = {}
    numbers: dict[int, list[bytes]] = {}
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
        clients = [asyncio.create_task(kept(http, sites[0], number, had)) for number in range(count)]
        async with asyncio.timeout(PATIENCE_S):
            while len(had) < 2 * count or min(map(len, had.values())) < 10:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        moving = await moved_meanwhile(pool, had, moment_s)
        sites[0].process.kill()
        await asyncio.gather(*clients)
        moves = [await one for one in moving]
        for number in range(count):
            events = had[f"number {number}"]
            url = f"http://127.0.0.1:{sites[1].port}/v1/stream/kill-{number}?from={len(events)}"
            async with http.get(url) as answer:
                assert answer.status == 200, await answer.text()
                rest = await answer.read()
            numbers[number] = [*events, rest]
    alone = await asyncio.gather(*(Reader(number).run() for number in range(count)))
    whole = sum(said_in(numbers[reader.number]) == reader.said for reader in alone)
    left, abandoned = await leases_left(), await tmpfs_left(pool, before)
    moved = sum(move.state == "committed" for move in moves)
    TABLE.add(
        "site replica" if moment_s is None else "site replica, moving",
        streams=count,
        whole=whole,
        broken=count - whole,
        moves=len(moves),
        moved=moved,
        leases_left=left,
        tmpfs_left=len(abandoned),
    )
    assert (whole, left, abandoned) == (count, 0, [])
    MOVED["site replica"] += moved
    if moment_s == MOMENTS[-1]:
        assert MOVED["site replica"]


async def moved_meanwhile(
    pool: Pool, had: dict[str, list[bytes]], moment_s: float | None
) -> list[asyncio.Task[HandoffView]]:
    """The move of one of the streams, `moment_s` after it began; none for None."""
    if moment_s is None:
        return []

    def running() -> tuple[int, str]:
        turn = Turn.objects.select_related("engine").filter(state="running", request_id__in=requests).first()
        assert turn is not None
        return turn.chat_id, turn.engine.name

    requests = [name for name in had if not name.startswith("number ")]
    async with asyncio.timeout(PATIENCE_S):
        while not await in_db(Turn.objects.filter(state="running", request_id__in=requests).exists):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    chat_id, source = await in_db(running)
    move, _, _ = await planned(pool, Q(pk=chat_id), source)
    moving = asyncio.create_task(handoffs.run(move))
    await asyncio.sleep(moment_s)
    return [moving]
