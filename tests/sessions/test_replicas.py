"""Two replicas of the site over one database and one pool of unlike engines: nothing is lost, and nothing stays leased."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from hydra_site.supervisor.home import Services
from pools.db import in_db
from sessions import leases
from sessions.models import SlotLease, Turn
from tests.sessions.routed_pool import SYSTEM, RoutedPool, routed_pool
from tests.sessions.site_process import Site
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db(transaction=True)
PATIENCE_S = 120.0
PASSES, WARM_PASSES = 8, 4
# Of 200 requests a pass. A site that kept what it says of each would take several times as much; an engine's allocator comes to
# its plateau in leaps, and one that kept the requests' states would take twenty times as much.
SITE_GROWTH_BYTES, ENGINE_GROWTH_BYTES = 1_000_000, 4_000_000


@dataclass
class Replicas:
    """Two sites over one pool."""

    sites: list[Site]
    pool: RoutedPool

    def memory_bytes(self) -> dict[str, int]:
        """What each process of ours takes, by name."""
        assert self.pool.store is not None
        pids = {f"site-{number}": site.process.pid for number, site in enumerate(self.sites)}
        pids |= {name: engine.process.pid for name, engine in self.pool.engines.items()}
        pids["store"] = self.pool.store.process.pid
        # Without what the store's slabs take on tmpfs, which has a bound of its own.
        told = {name: psutil.Process(pid).memory_info() for name, pid in pids.items()}
        return {name: info.rss - info.shared for name, info in told.items()}


@pytest.fixture
async def replicas(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path, servers: Services, transactional_db: None
) -> AsyncIterator[Replicas]:
    model = tiny_model("llama", layers=4)
    # What engines keep of prompts in host memory is full after the first crowd.
    context = routed_pool(model, tmp_path, 3, host_cache_bytes=8 << 20)
    pool = await asyncio.to_thread(context.__enter__)
    await in_db(pool.write_rows, model, tmp_path)
    running = []
    for number in range(2):
        home = tmp_path / f"site-{number}"
        home.mkdir()
        running.append(Site(home, servers))
        running[-1].start()
    for site in running:
        await asyncio.to_thread(site.wait_up)
    yield Replicas(running, pool)
    for site in running:
        if site.process.poll() is None:
            await asyncio.to_thread(site.stop)
    await asyncio.to_thread(context.__exit__, None, None, None)


class Crowd:
    """Clients that ask the replicas all kinds of things at once."""

    def __init__(self, sites: list[Site], http: aiohttp.ClientSession, seed: int) -> None:
        self._sites = sites
        self._http = http
        self._rng = random.Random(seed)

    async def ask(self, number: int, site: Site | None = None, tries_left: int = 8) -> str:
        """One request: "done", "left" by a client that went away, or what went wrong."""
        rng = random.Random(f"{number} {self._rng.random()}")
        site = site or self._sites[number % 2]
        kind = number % 4
        body: dict[str, Any] = {"max_tokens": rng.randrange(2, 24), "stream": kind != 1, "ignore_eos": True}
        words = " ".join(str(rng.randrange(1000)) for _ in range(rng.choice((3, 30, 120))))
        path = "/v1/completions" if kind == 2 else "/v1/chat/completions"
        if kind == 2:
            body["prompt"] = words
        else:
            messages = [{"role": "system", "content": SYSTEM}] if kind == 3 else []
            body["messages"] = [*messages, {"role": "user", "content": words}]
        # A few conversations are held over both replicas at once.
        headers = {"X-Session-Id": f"shared-{number % 5}"} if kind == 3 else {}
        leaves = number % 10 == 9
        url = f"http://127.0.0.1:{site.port}{path}"
        try:
            async with self._http.post(url, json=body, headers=headers) as answer:
                if answer.status == 429 and tries_left:
                    # Full lines say when to come back, and clients do.
                    await asyncio.sleep(int(answer.headers["Retry-After"]))
                    return await self.ask(number, site, tries_left - 1)
                if answer.status != 200:
                    return f"{answer.status} {await answer.text()}"
                if leaves:
                    return "left"
                text = await answer.text()
        except aiohttp.ClientError as error:
            return f"lost: {error!r}"
        ended = "[DONE]" in text if body["stream"] else bool(json.loads(text)["choices"][0]["finish_reason"])
        return "done" if ended and '"error"' not in text else f"unfinished: {text[-200:]}"


async def no_leases() -> None:
    async with asyncio.timeout(30):
        while await in_db(SlotLease.objects.count):  # noqa: ASYNC110 -- other processes tell nobody
            await asyncio.sleep(0.1)


async def crowd_of(replicas: Replicas, count: int, passes: int) -> list[dict[str, int]]:
    """`passes` times a crowd, then one replica dies; what the processes took after each pass."""
    sites, taken = replicas.sites, []
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
        for number in range(passes):
            crowd = Crowd(sites, http, number)
            outcomes = await asyncio.gather(*(crowd.ask(number) for number in range(count)))
            assert [outcome for outcome in outcomes if outcome not in ("done", "left")] == []
            assert outcomes.count("done") >= 0.9 * count - 1
            await no_leases()
            taken.append(replicas.memory_bytes())
            megabytes = {name: round(size / 1e6, 1) for name, size in taken[-1].items()}
            print(f"pass {number}: {count} requests, {outcomes.count('done')} done, 0 leases; memory MB {megabytes}")
        # One replica dies in the middle of its work; what it leased is given back without it.
        crowd = Crowd(sites, http, passes)
        both = [asyncio.create_task(crowd.ask(number)) for number in range(8)]
        await asyncio.sleep(0.2)
        sites[1].process.kill()
        await asyncio.gather(*both)
        others = await asyncio.gather(*(crowd.ask(number * 2, sites[0]) for number in range(4)))
        assert set(others) <= {"done"}
        await in_db(expire_leases)
        await in_db(leases.sweep)
        await no_leases()
    return taken


def expire_leases() -> None:
    """As if the dead replica's had run out; the living one's are given back by now."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("UPDATE hydra_sessions_slotlease SET expires_at = now() - interval '1 second'")


async def test_a_crowd_over_two_replicas_loses_nothing(replicas: Replicas) -> None:
    await crowd_of(replicas, 20, 1)
    turns = await in_db(lambda: list(Turn.objects.values_list("engine__name", flat=True)))
    assert len(set(turns)) >= 1


@pytest.mark.soak
async def test_a_crowd_of_two_hundred_over_two_replicas_loses_nothing_and_takes_no_more_memory(
    replicas: Replicas,
) -> None:
    taken = await crowd_of(replicas, 200, PASSES)
    # The first passes fill caches, which are bounded.
    for name, before in taken[WARM_PASSES - 1].items():
        most_bytes = SITE_GROWTH_BYTES if name.startswith("site") else ENGINE_GROWTH_BYTES
        assert taken[-1][name] - before <= most_bytes * (PASSES - WARM_PASSES), name
