"""kill -9 of whatever takes part in a handoff, at any of its moments, under streams of all kinds: a table of what came of it.

In every round one conversation moves undisturbed, so that a pool in which nothing can move fails; then another one moves and
somebody is killed over it. What was moved is counted, and all memory, tmpfs too, must be back as it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from django.db.models import Q

from hydra_site.supervisor.home import Services
from pools.db import in_db
from sessions import handoffs
from tests.sessions.kill_leftovers import (
    MOST_GROWTH_BYTES,
    TABLE,
    leases_left,
    memory,
    memory_grown,
    on_tmpfs,
    tmpfs_left,
)
from tests.sessions.kill_pool import (
    AFTERWARDS,
    MOMENTS,
    PATIENCE_S,
    KillPool,
    handoff_of,
    kill_pool,
    killed,
    started_head,
)
from tests.sessions.stream_readers import Reader
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db(transaction=True)
# Of the two that move: long enough that moves find them at work. One that has ended moves all the same.
MOVED_TOKENS = 700
# Whoever is no part of the way, or whose work another one does: the move comes to its end all the same.
MOVES_ALL_THE_SAME = frozenset({"mover", "head", "store"})


@pytest.fixture
async def pool(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path, servers: Services, transactional_db: None
) -> AsyncIterator[KillPool]:
    async with kill_pool(tiny_model("llama", tie_free=True, layers=6), tmp_path, servers) as pool:
        yield pool


def readers_of(count: int, moved_tokens: int) -> list[Reader]:
    """The first two move."""
    return [Reader(number, moved_tokens if number < 2 else 0) for number in range(count)]


async def round_of(pool: KillPool, victim: str, moment_s: float, count: int, moved_tokens: int = MOVED_TOKENS) -> None:
    before = await asyncio.to_thread(on_tmpfs, pool)
    readers = readers_of(count, moved_tokens)
    twice: set[str] = set()

    async def watch() -> None:
        while True:
            twice.update(await pool.running_twice())
            await asyncio.sleep(0.05)

    watching = asyncio.create_task(watch())
    async with asyncio.timeout(PATIENCE_S):
        with pool.slowed():
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
    async with asyncio.timeout(PATIENCE_S):
        alone = await asyncio.gather(*(reader.run() for reader in readers_of(count, moved_tokens)))
    broken = [reader.number for reader, other in zip(readers, alone, strict=True) if reader.said != other.said]
    (last,) = await in_db(lambda: handoffs.views(Q(), 1))
    has_moved = last.state == "committed"
    left, abandoned = await leases_left(), await tmpfs_left(pool, before)
    TABLE.add(
        victim,
        streams=count,
        whole=count - len(broken),
        broken=len(broken),
        two_owners=len(twice),
        moves=2,
        moved=has_moved + (undisturbed.state == "committed"),
        live=sum(move.kind == "live" for move in (undisturbed, last)),
        leases_left=left,
        tmpfs_left=len(abandoned),
    )
    assert (broken, twice, left) == ([], set(), 0), [readers[number].said[-2:] for number in broken]
    assert undisturbed.state == "committed", undisturbed.reason
    assert has_moved or (victim not in MOVES_ALL_THE_SAME and moment_s != AFTERWARDS), last.reason
    assert not abandoned
    for engine in pool.engines.values():
        await asyncio.to_thread(engine.wait_idle)


async def test_a_source_that_is_killed_while_its_conversation_moves(pool: KillPool) -> None:
    await round_of(pool, "source", 0.02, 3, moved_tokens=500)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("victim", "moment_s"),
    [
        *((victim, moment) for victim in ("source", "target", "mover", "head", "store") for moment in MOMENTS),
        ("source", AFTERWARDS),
        ("target", AFTERWARDS),
    ],
)
async def test_whoever_is_killed_at_any_moment_of_a_move_nobody_loses_a_word(
    pool: KillPool, victim: str, moment_s: float, tmp_path: Path
) -> None:
    await asyncio.gather(*(reader.run() for reader in readers_of(20, MOVED_TOKENS)))
    before = await asyncio.to_thread(memory, pool)
    if victim == "head":
        await started_head(pool, tmp_path)
    await round_of(pool, victim, moment_s, 20)
    grown = await memory_grown(pool, before)
    assert grown <= MOST_GROWTH_BYTES, (grown, before, memory(pool))
