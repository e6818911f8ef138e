"""kill -9 of one site replica under streams, also while one of their conversations moves: another replica is read on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import pytest
from django.db.models import Q

from hydra_site.supervisor.home import Services
from pools.db import in_db
from sessions import handoffs
from sessions.follow import FOLLOWED
from sessions.handoffs import HandoffView
from sessions.models import Turn
from tests.sessions.kill_leftovers import TABLE, leases_left, on_tmpfs, tmpfs_left
from tests.sessions.kill_pool import AFTERWARDS, MOMENTS, PATIENCE_S, KillPool, kill_pool, planned
from tests.sessions.site_process import Site
from tests.sessions.stream_readers import Reader, call_of, said_in
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
async def pool(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path, servers: Services, transactional_db: None
) -> AsyncIterator[KillPool]:
    async with kill_pool(tiny_model("llama", tie_free=True, layers=6), tmp_path, servers) as pool:
        yield pool


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
@pytest.mark.parametrize("moment_s", [None, *MOMENTS, AFTERWARDS])
async def test_a_replica_that_is_killed_has_its_streams_read_on_at_another(
    pool: KillPool, servers: Services, tmp_path: Path, moment_s: float | None
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


async def replica_round(pool: KillPool, sites: list[Site], count: int, moment_s: float | None) -> None:
    before = await asyncio.to_thread(on_tmpfs, pool)
    had: dict[str, list[bytes]] = {}
    numbers: dict[int, list[bytes]] = {}
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
        with pool.slowed():
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
        live=sum(move.kind == "live" for move in moves),
        leases_left=left,
        tmpfs_left=len(abandoned),
    )
    assert (whole, left, abandoned) == (count, 0, [])
    assert moved or moment_s != AFTERWARDS, [move.reason for move in moves]


async def moved_meanwhile(
    pool: KillPool, had: dict[str, list[bytes]], moment_s: float | None
) -> list[asyncio.Task[HandoffView]]:
    """The move of one of the streams, `moment_s` after it began; none for None."""
    if moment_s is None:
        return []

    def last() -> tuple[int, str]:
        """Of a turn that runs, where one still does."""
        turns = Turn.objects.select_related("engine").filter(request_id__in=requests)
        turn = turns.filter(state="running").first() or turns.latest("pk")
        assert turn.engine is not None
        return turn.chat_id, turn.engine.name

    # Of the others nobody would follow the stream.
    stay = [had[f"number {number}"] for number in range(len(had) // 2) if call_of(number).dialect.path not in FOLLOWED]
    followed = {name: events for name, events in had.items() if not any(events is one for one in stay)}
    requests = [name for name in followed if not name.startswith("number ")]
    async with asyncio.timeout(PATIENCE_S):
        while not await in_db(Turn.objects.filter(request_id__in=requests).exists):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    chat_id, source = await in_db(last)
    move, _, _ = await planned(pool, Q(pk=chat_id), source)
    moving = asyncio.create_task(handoffs.run(move))
    await (asyncio.wait((moving,)) if moment_s == AFTERWARDS else asyncio.sleep(moment_s))
    return [moving]
