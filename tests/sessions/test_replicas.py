"""Two replicas of the site over one database and one pool of unlike engines: nothing is lost, and nothing stays leased."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import aiohttp
import psutil
import pytest
from jsonschema import Draft202012Validator

from engines import engine_rows
from engines.models import Engine
from hydra_site.supervisor.home import Services
from pools.db import in_db
from sessions import leases
from sessions.models import SlotLease, Turn
from tests.engine_process import EngineProcess
from tests.rows import add_engine, add_model, set_ready
from tests.sessions.routed_pool import SYSTEM, RoutedPool, routed_pool
from tests.sessions.site_process import Site
from tests.synthetic_encoders import write_bert
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db(transaction=True)
PATIENCE_S = 120.0
PASSES, WARM_PASSES = 8, 4
# So many answers of a replica, and one of the other, cannot be over when it is killed.
LONG_AT_DEATH = 3
# Of 200 requests a pass. A site that kept what it says of each would take several times as much; an engine's allocator comes to
# its plateau in leaps, and one that kept the requests' states would take twenty times as much.
SITE_GROWTH_BYTES, ENGINE_GROWTH_BYTES = 1_000_000, 4_000_000


@dataclass
class Replicas:
    """Two sites over one pool, and an engine beside it that embeds."""

    sites: list[Site]
    pool: RoutedPool
    embedder: EngineProcess

    def memory_bytes(self) -> dict[str, int]:
        """What each process of ours takes, by name."""
        assert self.pool.store is not None
        pids = {f"site-{number}": site.process.pid for number, site in enumerate(self.sites)}
        pids |= {name: engine.process.pid for name, engine in self.pool.engines.items()}
        pids |= {"store": self.pool.store.process.pid, "embedder": self.embedder.process.pid}
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
    embedder = await start_embedder(tmp_path)
    running = []
    for number in range(2):
        home = tmp_path / f"site-{number}"
        home.mkdir()
        running.append(Site(home, servers))
        running[-1].start()
    for site in running:
        await asyncio.to_thread(site.wait_up)
    yield Replicas(running, pool, embedder)
    for site in running:
        if site.process.poll() is None:
            await asyncio.to_thread(site.stop)
    await asyncio.to_thread(embedder.stop)
    await asyncio.to_thread(context.__exit__, None, None, None)


async def start_embedder(folder: Path) -> EngineProcess:
    """An engine of an embedding model, its row written."""
    path = write_bert(folder / "encoder.gguf").path

    def write() -> tuple[Engine, engine_rows.EngineTask | None]:
        engine = add_engine(add_model(path, folder, "encoder"), name="embedder")
        return engine, engine_rows.engine_task(engine.pk)

    engine, task = await in_db(write)
    assert task is not None
    wanted = {"context_tokens": task.config.context_tokens, "pooling": task.config.pooling}
    process = await asyncio.to_thread(EngineProcess(folder, path, **wanted).__enter__)
    await in_db(set_ready, engine, process.config.port, process.process.pid)
    return process


SCHEMA = {
    "type": "object",
    "properties": {"cold": {"type": "boolean"}, "size": {"enum": ["small", "large"]}},
    "required": ["cold", "size"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "stone", "schema": SCHEMA, "strict": True}}
CHAT = "/v1/chat/completions"
# Of streams that do not end as the others do.
STREAM_ENDS = {
    "/v1/responses": ("event: response.completed\n", "event: response.incomplete\n"),
    "/v1/messages": ("event: message_stop\n",),
}


@dataclass(frozen=True)
class Question:
    """One request, and what its answer must be."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream"))

    def is_answered_by(self, text: str) -> bool:
        """Whether an answer is whole, in the form that was asked for."""
        if self.streams:
            *_, last = text.strip().rsplit("\n\n", 1)
            broke = '"error":{' in text or "event: error" in text
            return not broke and any(mark in last for mark in STREAM_ENDS.get(self.path, ("[DONE]",)))
        answer = json.loads(text)
        if self.path == "/v1/embeddings":
            return [len(item["embedding"]) > 1 for item in answer["data"]] == [True] * len(self.body["input"])
        if self.path == "/v1/responses":
            return answer["status"] in ("completed", "incomplete")
        if self.path == "/v1/messages":
            return answer["stop_reason"] in ("end_turn", "max_tokens")
        choices = answer["choices"]
        if "response_format" in self.body:
            Draft202012Validator(SCHEMA).validate(json.loads(choices[0]["message"]["content"]))
        ends_well = all(choice["finish_reason"] in ("stop", "length") for choice in choices)
        return ends_well and len(choices) == self.body.get("n", 1)


def question(number: int, rng: random.Random) -> Question:
    """All that a site serves in turn, at both replicas; in one piece or as a stream."""
    kind, streams = number // 2 % 10, bool(number // 20 % 2)
    words = " ".join(str(rng.randrange(1000)) for _ in range(rng.choice((3, 30, 120))))
    most = rng.randrange(2, 24)
    user = {"role": "user", "content": words}
    body: dict[str, Any] = {"model": "tiny", "stream": streams}
    chat = {**body, "max_tokens": most, "ignore_eos": True, "messages": [user]}
    if kind == 0:
        return Question("/v1/completions", {**chat, "prompt": words, "stream": not streams}, {})
    if kind == 1:
        return Question("/v1/responses", {**body, "input": words, "max_output_tokens": most}, {})
    if kind == 2:
        return Question("/v1/messages", {**body, "messages": [user], "max_tokens": most}, {})
    if kind == 3:
        return Question("/v1/embeddings", {"model": "encoder", "input": [words[:99], "stone"]}, {})
    if kind == 4:
        form = {"model": "tiny", "messages": [user], "max_tokens": 200, "response_format": FORM}
        return Question(CHAT, form, {})
    if kind == 5:
        return Question(CHAT, {**chat, "n": 2, "temperature": 1.0}, {})
    if kind < 8:
        return Question(CHAT, {**chat, "stream": kind == 6}, {})
    # A few conversations are held over both replicas at once.
    messages = [{"role": "system", "content": SYSTEM}, user]
    return Question(CHAT, {**chat, "messages": messages, "stream": True}, {"X-Session-Id": f"shared-{number % 5}"})


def leaves(number: int) -> bool:
    """Whether the client of this number goes away when its answer begins."""
    return number % 11 == 9


def wanted(number: int) -> str:
    return "left" if leaves(number) else "done"


class Crowd:
    """Clients that ask the replicas all kinds of things at once."""

    def __init__(self, sites: list[Site], http: aiohttp.ClientSession, seed: int) -> None:
        self._sites = sites
        self._http = http
        self._rng = random.Random(seed)

    async def ask(self, number: int, site: Site | None = None) -> str:
        """One request: "done", "left" by a client that went away, "lost" with its replica, or what else went wrong."""
        asked = question(number, random.Random(f"{number} {self._rng.random()}"))
        site = site or self._sites[number % 2]
        for _ in range(9):
            try:
                outcome = await self._once(asked, site, leaves(number))
            except aiohttp.ClientError as error:
                return f"lost: {error!r}"
            if not isinstance(outcome, int):
                return outcome
            # Full lines say when to come back, and clients do.
            await asyncio.sleep(outcome)
        return "429 again and again"

    async def ask_long(self, number: int, site: Site) -> str:
        """One answer that is not over before the engines go on at their own speed."""
        user = {"role": "user", "content": f"Tell all of story {number}."}
        body = {"model": "tiny", "stream": True, "max_tokens": 1500, "ignore_eos": True, "messages": [user]}
        try:
            return str(await self._once(Question(CHAT, body, {}), site, goes_away=False))
        except aiohttp.ClientError as error:
            return f"lost: {error!r}"

    async def _once(self, asked: Question, site: Site, goes_away: bool) -> str | int:
        """What became of it, or the seconds after which to ask again."""
        url = f"http://127.0.0.1:{site.port}{asked.path}"
        async with self._http.post(url, json=asked.body, headers=asked.headers) as answer:
            if answer.status == 429:
                return int(answer.headers["Retry-After"])
            if answer.status != 200:
                return f"{asked.path} {answer.status} {await answer.text()}"
            if goes_away:
                return "left"
            text = await answer.text()
        return "done" if asked.is_answered_by(text) else f"{asked.path} unfinished: {text[-300:]}"


def leased_by(site: Site) -> int:
    return SlotLease.objects.filter(owner__contains=f":{site.process.pid}:").count()


async def no_leases_of(*sites: Site) -> None:
    """Returns once they gave back by themselves all that they had leased."""
    async with asyncio.timeout(30):
        for site in sites:
            while await in_db(leased_by, site):  # noqa: ASYNC110 -- other processes tell nobody
                await asyncio.sleep(0.1)


async def crowd_of(replicas: Replicas, count: int, passes: int) -> list[dict[str, int]]:
    """`passes` times a crowd, then one replica dies in another; what the processes took after each pass."""
    sites, taken = replicas.sites, []
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
        for number in range(passes):
            crowd = Crowd(sites, http, number)
            outcomes = await asyncio.gather(*(crowd.ask(number) for number in range(count)))
            assert [one for one in enumerate(outcomes) if one[1] != wanted(one[0])] == []
            await no_leases_of(*sites)
            assert await in_db(SlotLease.objects.count) == 0
            taken.append(replicas.memory_bytes())
            megabytes = {name: round(size / 1e6, 1) for name, size in taken[-1].items()}
            print(f"pass {number}: {count} requests, {outcomes.count('done')} done, 0 leases; memory MB {megabytes}")
        await a_replica_dies(replicas, Crowd(sites, http, passes), count)
    return taken


async def a_replica_dies(replicas: Replicas, crowd: Crowd, count: int) -> None:
    """In the middle of a crowd: the other loses nothing of its own, and serves what was lost with the dead one."""
    living, dying = replicas.sites
    with replicas.pool.slowed():
        askers = (living, *[dying] * LONG_AT_DEATH)
        long = [asyncio.create_task(crowd.ask_long(number, site)) for number, site in enumerate(askers)]
        async with asyncio.timeout(PATIENCE_S):
            while [await in_db(leased_by, site) for site in (living, dying)] != [1, LONG_AT_DEATH]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            tasks = [asyncio.create_task(crowd.ask(number)) for number in range(count)]
            # It has answered a quarter of its own.
            while sum(task.done() for task in tasks[1::2]) < count / 8:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert not any(task.done() for task in long)
        dying.process.kill()
        at_death = [sum(not task.done() for task in tasks[first::2]) for first in range(2)]
    outcomes = await asyncio.gather(*tasks)
    ends = await asyncio.gather(*long)
    assert (ends[0], {end[:5] for end in ends[1:]}) == ("done", {"lost:"})
    assert [one for one in list(enumerate(outcomes))[::2] if one[1] != wanted(one[0])] == []
    # Clients of the dead one were answered before or see their connections break; nobody is told anything wrong.
    lost = [number for number in range(1, count, 2) if outcomes[number].startswith("lost: ")]
    others = [one for one in list(enumerate(outcomes))[1::2] if one[0] not in lost and one[1] != wanted(one[0])]
    assert others == []
    # What the living one leased it gave back itself; the dead one's stay until they run out.
    await no_leases_of(living)
    held = await in_db(leased_by, dying)
    assert await in_db(SlotLease.objects.count) == held > 0
    again = await asyncio.gather(*(crowd.ask(number, living) for number in lost))
    assert again == [wanted(number) for number in lost]
    await no_leases_of(living)
    await in_db(run_out, dying)
    await in_db(leases.sweep)
    assert await in_db(SlotLease.objects.count) == 0
    print(
        f"one of two killed with {at_death[1]} requests under way, {at_death[0]} at the other: {len(lost)} lost and"
        f" asked again, {len(outcomes) - len(lost)} ended well; {held} leases of the dead one"
    )


def run_out(site: Site) -> None:
    """As if minutes had passed in which nobody prolonged what a dead replica had leased."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE hydra_sessions_slotlease SET expires_at = now() - interval '2 minutes' WHERE owner LIKE %s",
            [f"%:{site.process.pid}:%"],
        )


async def engines_that_answered() -> set[str]:
    """Of the requests to the pool's model; written behind the answers."""
    told = Turn.objects.filter(model_name="tiny", state="done").values_list("engine__name", flat=True)
    return set(cast(list[str], await in_db(list, told)))


async def test_a_crowd_over_two_replicas_loses_nothing(replicas: Replicas) -> None:
    await crowd_of(replicas, 40, 1)
    # More than one engine has places for.
    assert len(await engines_that_answered()) > 1


@pytest.mark.soak
@pytest.mark.timeout(1200)
async def test_a_crowd_of_two_hundred_over_two_replicas_loses_nothing_and_takes_no_more_memory(
    replicas: Replicas,
) -> None:
    taken = await crowd_of(replicas, 200, PASSES)
    assert await engines_that_answered() == set(replicas.pool.engines)
    # The first passes fill caches, which are bounded.
    for name, before in taken[WARM_PASSES - 1].items():
        most_bytes = SITE_GROWTH_BYTES if name.startswith("site") else ENGINE_GROWTH_BYTES
        assert taken[-1][name] - before <= most_bytes * (PASSES - WARM_PASSES), name
