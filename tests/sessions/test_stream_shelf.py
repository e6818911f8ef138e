"""What a Valkey that is frozen, emptied or late does to kept streams: never a line twice, never two owners."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, replace

import pytest
import redis.asyncio

from hydra_site.supervisor.home import Services
from pools.events import Outage
from sessions import stream_shelf
from sessions.stream_journal import StreamJournal
from sessions.stream_shelf import Ended, Shelved, StreamShelf

PATIENCE_S = 20.0
SCOPE = "shelves"


class Owner:
    """A replica that reads one stream, perhaps beside another's (`beside`)."""

    def __init__(self, name: str = "", beside: Owner | None = None) -> None:
        self.shelf = StreamShelf() if beside is None else beside.shelf
        self.shelf._outage = Outage("Valkey does not answer", pause_s=0.2)
        self.id = uuid.uuid4()
        self.journal = StreamJournal()
        self.lost, self.stopped = asyncio.Event(), asyncio.Event()
        self.about = Shelved(str(self.id), "a" * 64, name, "/v1/chat/completions", 1.0)
        self.age_s = 0.0
        self._said = 0

    def keep(self, number: int = 0) -> None:
        arrived_at = time.monotonic() - self.age_s
        self.shelf.keep(self.id, SCOPE, self.about, b"{}", self.journal, self._gave_up, arrived_at, number)

    def _gave_up(self, was_stopped: bool) -> None:
        (self.stopped if was_stopped else self.lost).set()

    def hear(self, count: int) -> None:
        """The engine says more."""
        for _ in range(count):
            name = b"mark" if self._said else b"begun"
            self.journal.shown(b"event: hydra.%s\ndata: [%d]\n\n" % (name, self._said))
            self._said += 1

    @property
    def key(self) -> str:
        return f"hydra-stream:{SCOPE}:{self.id}"


@pytest.fixture
async def valkey(servers: Services, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[redis.asyncio.Redis]:
    monkeypatch.setattr(stream_shelf, "PATIENCE_S", PATIENCE_S)
    async with redis.asyncio.Redis.from_url(str(servers.broker_url)) as client:
        yield client


@pytest.fixture
async def owner() -> AsyncIterator[Callable[..., Owner]]:
    async with AsyncExitStack() as stack:

        def make(name: str = "", beside: Owner | None = None) -> Owner:
            made = Owner(name, beside)
            stack.push_async_callback(made.shelf.close)
            return made

        yield make


@contextmanager
def impatient() -> Iterator[None]:
    """Only where Valkey surely does not answer: a busy machine must not look like one that is frozen."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_shelf, "PATIENCE_S", 0.3)
        yield


@asynccontextmanager
async def frozen(valkey: redis.asyncio.Redis) -> AsyncIterator[None]:
    """What is sent meanwhile lies in the socket, and is done afterwards whether anybody waits or not."""
    pid = (await valkey.info("server"))["process_id"]
    os.kill(pid, signal.SIGSTOP)
    try:
        with impatient():
            yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def written(valkey: redis.asyncio.Redis, owner: Owner) -> bytes:
    """What is in the journal once it is as long as the owner's."""
    async with asyncio.timeout(PATIENCE_S):
        while len(await valkey.get(f"{owner.key}:journal") or b"") < len(owner.journal.lines):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return bytes(await valkey.get(f"{owner.key}:journal"))


async def connected(valkey: redis.asyncio.Redis, make: Callable[..., Owner]) -> Owner:
    """An owner whose replica has a connection, on which it sends at once; a new one would be answered first."""
    first = make()
    first.keep()
    first.hear(1)
    await written(valkey, first)
    return first


async def named(valkey: redis.asyncio.Redis, name: str) -> None:
    """Returns once a stream is found by this name."""
    while not await valkey.exists(f"hydra-stream-of:{SCOPE}:{name}"):  # noqa: ASYNC110 -- nothing tells of it
        await asyncio.sleep(0.01)


async def told_of_outage(owner: Owner) -> None:
    """A write of its was sent and not answered."""
    async with asyncio.timeout(PATIENCE_S):
        while not owner.shelf._outage.lasts:  # noqa: ASYNC110 -- nothing tells of it
            await asyncio.sleep(0.01)


async def test_a_frozen_valkey_writes_no_line_twice_and_gives_no_stream_to_two(
    valkey: redis.asyncio.Redis, owner: Callable[..., Owner]
) -> None:
    running, other = await connected(valkey, owner), owner()
    new = owner(beside=await connected(valkey, owner))
    async with frozen(valkey):
        running.hear(9)
        new.keep()
        new.hear(1)
        await asyncio.gather(told_of_outage(running), told_of_outage(new))
        running.hear(9)
    # The new one's request is there by now, though its owner was not told, and another replica takes it.
    taken = await other.shelf.take(SCOPE, str(new.id))
    assert taken is not None
    assert taken.number == 2
    other.id, other.about, other.journal = new.id, new.about, StreamJournal(b"[0]\n")
    other.keep(taken.number)
    other.journal.shown(b"event: hydra.mark\ndata: [1]\n\n")
    async with asyncio.timeout(PATIENCE_S):
        await new.lost.wait()
    assert await written(valkey, running) == running.journal.lines
    running.hear(9)
    assert await written(valkey, running) == running.journal.lines
    assert await written(valkey, other) == b"[0]\n[1]\n"
    assert not running.lost.is_set()
    assert not other.lost.is_set()


async def test_a_valkey_that_lost_everything_is_told_again_and_the_stream_goes_on(
    valkey: redis.asyncio.Redis, owner: Callable[..., Owner]
) -> None:
    running, other = owner("named"), owner()
    running.keep()
    for lost in ((running.key, f"{running.key}:journal"), (f"{running.key}:journal",), (running.key,)):
        running.hear(9)
        await written(valkey, running)
        await valkey.delete(*lost)
        running.hear(1)
        assert await written(valkey, running) == running.journal.lines
        assert not running.lost.is_set()
    await valkey.delete(running.key, f"hydra-stream-of:{SCOPE}:named")
    running.hear(1)
    await written(valkey, running)
    async with asyncio.timeout(PATIENCE_S):
        await named(valkey, "named")
    taken = await other.shelf.take(SCOPE, "named")
    assert taken is not None
    assert (taken.number, taken.about, taken.journal) == (2, running.about, running.journal.lines)
    running.hear(1)
    async with asyncio.timeout(PATIENCE_S):
        await running.lost.wait()


async def test_who_took_a_stream_keeps_it_although_its_former_owner_writes_first_after_a_loss(
    valkey: redis.asyncio.Redis, owner: Callable[..., Owner]
) -> None:
    former, other = owner(), owner()
    former.keep()
    former.hear(3)
    await written(valkey, former)
    taken = await other.shelf.take(SCOPE, str(former.id))
    assert taken is not None
    await valkey.delete(former.key, f"{former.key}:journal")
    former.hear(1)
    await written(valkey, former)
    other.id, other.about, other.journal = former.id, former.about, StreamJournal(taken.journal)
    other.keep(taken.number)
    other.journal.shown(b"event: hydra.mark\ndata: [77]\n\n")
    assert await written(valkey, other) == other.journal.lines
    former.hear(1)
    async with asyncio.timeout(PATIENCE_S):
        await former.lost.wait()
    assert await valkey.get(f"{former.key}:journal") == other.journal.lines


async def test_a_stopped_stream_is_nobodys_also_where_valkey_hears_of_it_late(
    valkey: redis.asyncio.Redis, owner: Callable[..., Owner]
) -> None:
    stopped, other = owner(beside=await connected(valkey, owner)), owner()
    async with frozen(valkey):
        stopped.keep()
        stopped.hear(1)
        await told_of_outage(stopped)
        await stopped.shelf.forget(SCOPE, stopped.id, was_taken=False)
    async with asyncio.timeout(PATIENCE_S):
        while stopped.id in stopped.shelf._kept:  # noqa: ASYNC110 -- nothing tells of it
            await asyncio.sleep(0.01)
    assert await other.shelf.take(SCOPE, str(stopped.id)) is None
    assert not stopped.lost.is_set()


CLOSED = b'event: hydra.mark\ndata: [[0,0,[],{"closed": true}]]\n\n'


async def told(event: asyncio.Event) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await event.wait()


@pytest.mark.parametrize("by_name", [True, False])
async def test_any_replica_stops_a_stream_and_who_reads_it_learns_that(
    valkey: redis.asyncio.Redis, owner: Callable[..., Owner], *, by_name: bool
) -> None:
    running, other = owner("stopped elsewhere"), owner()
    running.keep()
    running.hear(3)
    await written(valkey, running)
    name = "stopped elsewhere" if by_name else str(running.id)
    assert await other.shelf.stop("others", name) is None
    for _ in range(2):
        assert await other.shelf.stop(SCOPE, name) == Ended(running.about, "stopped")
    assert await other.shelf.take(SCOPE, name) is None
    running.hear(1)
    await told(running.stopped)
    assert not running.lost.is_set()
    assert not await valkey.exists(f"{running.key}:journal")


async def test_what_is_done_is_not_stopped_and_can_be_read_again(
    valkey: redis.asyncio.Redis, owner: Callable[..., Owner]
) -> None:
    done, other, next_turn = owner("done"), owner(), owner("done")
    done.keep()
    done.hear(3)
    done.journal.shown(CLOSED)
    await written(valkey, done)
    assert await other.shelf.stop(SCOPE, "done") == Ended(done.about, "done")
    next_turn.keep()
    next_turn.hear(1)
    await written(valkey, next_turn)
    taken = await other.shelf.take(SCOPE, str(done.id))
    assert taken is not None
    assert taken.journal == done.journal.lines


async def test_a_new_turn_at_another_replica_ends_the_conversations_former_stream(
    valkey: redis.asyncio.Redis, owner: Callable[..., Owner]
) -> None:
    former, stranger, new = owner("turns"), owner("other turns"), owner("turns")
    for one in (former, stranger, new):
        one.keep()
        one.hear(2)
        await written(valkey, one)
    for one in (former, stranger, new):
        one.hear(1)
    await told(former.stopped)
    for one in (stranger, new):
        assert await written(valkey, one) == one.journal.lines
        assert not one.stopped.is_set()


async def test_how_old_a_request_is_no_replicas_clock_tells(
    valkey: redis.asyncio.Redis, owner: Callable[..., Owner]
) -> None:
    """Its own says that it is of 1970."""
    running, other = owner(), owner()
    running.age_s = 5.0
    running.keep()
    running.hear(1)
    await written(valkey, running)
    taken = await other.shelf.take(SCOPE, str(running.id))
    assert taken is not None
    assert running.about.created_at == 1.0
    assert 4.99 < taken.age_s < 100_000


async def test_a_stream_is_not_taken_for_somebody_who_has_gone(
    valkey: redis.asyncio.Redis, owner: Callable[..., Owner], monkeypatch: pytest.MonkeyPatch
) -> None:
    running, asking = await connected(valkey, owner), await connected(valkey, owner)
    client = asking.shelf._valkey()
    clock, pid = client.time, (await valkey.info("server"))["process_id"]

    async def frozen_behind() -> tuple[int, int]:
        told: tuple[int, int] = await clock()
        os.kill(pid, signal.SIGSTOP)
        return told

    monkeypatch.setattr(client, "time", frozen_behind)
    try:
        with impatient():
            assert await asking.shelf.take(SCOPE, str(running.id)) is None
    finally:
        os.kill(pid, signal.SIGCONT)
    running.hear(3)
    assert await written(valkey, running) == running.journal.lines
    assert await valkey.hget(running.key, "number") == b"1"
    assert not running.lost.is_set()


async def test_after_a_loss_a_name_stays_with_the_last_stream_and_nothing_counts_twice(
    valkey: redis.asyncio.Redis, owner: Callable[..., Owner]
) -> None:
    first = owner("two turns")
    last = owner("two turns", beside=first)
    last.about = replace(last.about, created_at=2.0)
    for one in (first, last):
        one.keep()
        one.hear(3)
        await written(valkey, one)
    counted = first.shelf._bytes
    assert counted == sum(len(b"{}") + len(one.journal.lines) for one in (first, last))
    for one in (first, last):
        await valkey.delete(one.key, f"{one.key}:journal")
    await valkey.delete(f"hydra-stream-of:{SCOPE}:two turns")
    for one in (last, first):
        one.hear(1)
        await written(valkey, one)
    assert (await valkey.get(f"hydra-stream-of:{SCOPE}:two turns")).decode() == str(last.id)
    said = sum(len(one.journal.lines) for one in (first, last))
    async with asyncio.timeout(PATIENCE_S):
        while first.shelf._bytes < said + 4:  # noqa: ASYNC110 -- nothing tells of it
            await asyncio.sleep(0.01)
    assert first.shelf._bytes == said + 4


def test_what_a_newer_release_tells_beside_is_not_read() -> None:
    about = Shelved("1", "a" * 64, "name", "/v1/chat/completions", 1.0, ends_session=True)
    assert Shelved.of_json(json.dumps({**asdict(about), "colour": "red"})) == about
