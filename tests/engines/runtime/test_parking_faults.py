"""Prefixes on their way out of a store that hangs, dies or sends half: the request is computed or ended, nothing is left over."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from engines.errors import DeadlineExceeded
from engines.runtime.prefix import PrefixCache
from engines.runtime.prefix_search import Source
from tests.engines.runtime.parked import StoreHere, client_of, parking_engine, store_here, until
from tests.engines.runtime.test_core import finished, generation, prompt_of
from tests.engines.store.store_process import StoreProcess, store_on_tmpfs
from tests.fault_table import FaultTable
from tests.synthetic_gguf import SyntheticModel

TABLE = FaultTable(
    "resumes from a store under faults",
    "trials", "faults", "resumed", "re-prefilled", "wrong tokens", "lost requests",
)  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreProcess]:
    with store_on_tmpfs(tmp_path) as running:
        yield running


@pytest.fixture
async def here() -> AsyncIterator[StoreHere]:
    async with store_here() as running:
        yield running


@asynccontextmanager
async def hanging(store: StoreProcess) -> AsyncIterator[None]:
    """The store answers nothing meanwhile, and is there again afterwards."""
    os.kill(store.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(store.process.pid, signal.SIGCONT)


@asynccontextmanager
async def half_way(port: int, limit_bytes: int) -> AsyncIterator[int]:
    """A port behind which that one lies, whose connections break after so many bytes of answers."""
    tasks: set[asyncio.Task[None]] = set()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: float) -> None:
        while limit > 0 and (data := await reader.read(1 << 14)):
            writer.write(data)
            await writer.drain()
            limit -= len(data)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        back_reader, there = await asyncio.open_connection("127.0.0.1", port)
        ways = [
            asyncio.ensure_future(carry(reader, there, float("inf"))),
            asyncio.ensure_future(carry(back_reader, writer, limit_bytes)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for end in (there, writer):
                end.transport.abort()
                with suppress(OSError):
                    await end.wait_closed()
            tasks.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("leaves", [False, True])
async def test_who_leaves_or_is_late_does_not_wait_for_a_store_that_hangs(
    tiny_model: Callable[..., SyntheticModel], store: StoreProcess, leaves: bool
) -> None:
    model = tiny_model("llama", tie_free=True)
    async with parking_engine(model, store, slots=1) as engine:
        first = await engine.ask(prompt_of(model, 300))
        await engine.parking.park_slot(0)
        slot, work = engine.core.cache.slots[0], generation([*first.tokens, 5, 6], 20)
        await engine.parking.look_up([work], ())
        assert work.incoming is not None
        async with hanging(store):
            if not leaves:
                work.deadline_at = time.monotonic() + 1.0
            engine.core.submit(work)
            await until(lambda: slot.transfer == "restore")
            if leaves:
                engine.core.cancel(work)
                await until(lambda: engine.count("requests", outcome="cancelled") == 1)
            else:
                assert isinstance((await finished(work)).error, DeadlineExceeded)
            assert slot.transfer == "restore"
        await until(lambda: not slot.transfer)
        assert slot.awaited_cells == 0
        again = await engine.ask([*first.tokens, 5])
        assert again.tokens[-20:] == model.follow(5, 20)


@pytest.mark.parametrize("trials", [2, pytest.param(60, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])])
async def test_a_store_that_is_killed_while_a_prefix_comes_in_loses_no_request(
    tiny_model: Callable[..., SyntheticModel], store: StoreProcess, trials: int
) -> None:
    """At moments that lie ever later; what was published is there again after the restart."""
    model = tiny_model("qwen35moe")  # its answers depend on every token before
    prompt, more = prompt_of(model, 300), [5, 6]
    async with parking_engine(model, store) as engine:
        first = await engine.ask(prompt)
        stayed = await engine.ask([*first.tokens, *more])
    async with parking_engine(model, store) as engine:
        await engine.ask(prompt)
        await engine.parking.park_slot(0)
    for trial in range(trials):
        async with parking_engine(model, store) as engine:
            work = generation([*first.tokens, *more], 20)
            await engine.parking.look_up([work], ())
            assert work.incoming is not None
            engine.core.submit(work)
            await asyncio.sleep(0.03 * trial / trials)
            store.kill()
            last = await finished(work)
            resumed, right = work.cached_tokens == 319, work.tokens == stayed.tokens
            TABLE.add(
                "store killed while a prefix comes in",
                trials=1,
                faults=1,
                resumed=resumed,
                wrong_tokens=not right,
                lost_requests=last.error is not None,
                **{"re-prefilled": work.cached_tokens == 0},
            )
            assert (last.error, right) == (None, True)
            assert not any(slot.transfer for slot in engine.core.cache.slots)
        store.start()


@pytest.mark.parametrize("trials", [1, pytest.param(20, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])])
async def test_a_stop_while_a_prefix_comes_in_ends_the_request(
    tiny_model: Callable[..., SyntheticModel], here: StoreHere, trials: int
) -> None:
    model = tiny_model("llama", tie_free=True)
    async with parking_engine(model, here) as engine:
        first = await engine.ask(prompt_of(model, 300))
        await engine.parking.park_slot(0)
    for trial in range(trials):
        async with parking_engine(model, here) as engine:
            work = generation([*first.tokens, 5], 20)
            await engine.parking.look_up([work], ())
            engine.core.submit(work)
            await asyncio.sleep(0.01 * trial / trials)
            await engine.parking.stop()
            engine.core.stop()
            last = await finished(work)
            assert last.error is None or last.error.code == "engine_stopping"
            wrong = work.tokens[321:] != model.follow(5, 20)[: len(work.tokens) - 321]
            TABLE.add("engine stopped while a prefix comes in", trials=1, faults=1, wrong_tokens=wrong)
            assert not wrong


async def test_another_hosts_store_that_breaks_off_is_not_taken_for_our_own(
    tiny_model: Callable[..., SyntheticModel], here: StoreHere
) -> None:
    model = tiny_model("qwen35", tie_free=True)
    async with parking_engine(model, here) as engine:
        first = await engine.ask(prompt_of(model, 300))
        saved = await engine.parking.park_slot(0)
    async with (
        store_here(instance="two") as second,
        parking_engine(model, second) as engine,
        half_way(here.config.port, saved.total_bytes // 2) as port,
    ):
        stores = (("127.0.0.1", port), ("127.0.0.1", here.config.port))
        again = await engine.ask([*first.tokens, 5], stores=stores)
        assert (again.cached_tokens, again.tokens[-20:]) == (319, model.follow(5, 20))
        assert engine.count("store_failures", operation="pull", cause="pull_broken") == 1
        assert engine.count("store_lookups", outcome="away") == 0


async def test_a_system_prompt_stays_pinned_when_another_engine_saves_it(
    tiny_model: Callable[..., SyntheticModel], here: StoreHere
) -> None:
    model = tiny_model("llama", tie_free=True)
    system = prompt_of(model, 200)
    fields: dict[str, Any] = {"system_cut": 200}
    async with parking_engine(model, here) as engine:
        await engine.ask([*system, *prompt_of(model, 40, start=3)], **fields, session="a")
        await engine.parking.park_slot(0)
    async with parking_engine(model, here) as engine:
        await engine.ask([*system, *prompt_of(model, 40, start=4)], **fields, session="b")
        async with client_of(here) as client:

            async def pins() -> list[bool]:
                return [entry.pinned for entry in (await client.snapshots())[0] if entry.n_past == 200]

            for _ in range(1000):
                if await pins() == [True]:
                    break
                await asyncio.sleep(0.02)
    async with parking_engine(model, here) as engine, client_of(here) as client:
        await engine.ask([*system, *prompt_of(model, 40, start=5)], **fields, session="c", reuse_prefix=False)
        await engine.parking.park_session("c")
        assert [entry.pinned for entry in (await client.snapshots())[0] if entry.n_past == 200] == [True]


@pytest.mark.parametrize("by_session", [False, True])
async def test_what_moves_to_host_memory_while_it_is_to_be_parked_is_parked_from_there(
    tiny_model: Callable[..., SyntheticModel], here: StoreHere, by_session: bool
) -> None:
    model = tiny_model("llama", tie_free=True)
    async with parking_engine(model, here) as engine:
        await engine.ask(prompt_of(model, 200), session="s")
        slot, parking = engine.core.cache.slots[0], engine.parking

        def put_away(cache: PrefixCache) -> Generator[None, None, None]:
            yield from ()
            cache.moves.put_out(slot.sequence)
            assert cache.host.covering(slot.sequence) is not None
            cache.host.link(0, slot.sequence)
            slot.sequence.clear()

        async with parking._one_save:
            task = asyncio.ensure_future(parking.park_session("s") if by_session else parking.park_slot(0))
            await asyncio.sleep(0.1)
            await engine.core.perform(put_away)
        saved = await task
        assert (saved[0] if isinstance(saved, list) else saved).tokens == 219
        assert (len(engine.core.cache.host), len(slot.sequence)) == (0, 0)


async def test_a_slot_gives_back_what_was_put_away_once(tiny_model: Callable[..., SyntheticModel]) -> None:
    """And never what it held before something else came into it, also where that is thrown away again."""
    model = tiny_model("llama", tie_free=True)
    async with parking_engine_without_store(model) as engine:
        for n in (1, 2):
            await engine.ask(prompt_of(model, 200, start=n))
        cache = engine.core.cache
        await until(lambda: any(not len(slot.sequence) for slot in cache.slots[:2]))
        away = next(slot for slot in cache.slots[:2] if not len(slot.sequence))

        def brought_back(cache: PrefixCache) -> Generator[None, None, int]:
            yield from cache.bring_back(away)
            return len(away.sequence)

        def thrown_away(_cache: PrefixCache) -> Generator[None, None, None]:
            yield from ()
            away.sequence.clear()

        assert await engine.core.perform(brought_back) == 219
        await engine.core.perform(thrown_away)
        assert await engine.core.perform(brought_back) == 0


async def test_a_prefix_is_lent_to_nobody_before_all_of_it_is_proved(tiny_model: Callable[..., SyntheticModel]) -> None:
    model = tiny_model("llama", tie_free=True)
    async with parking_engine_without_store(model) as engine:
        work = await engine.ask(prompt_of(model, 200))

        def sources(cache: PrefixCache) -> Generator[None, None, list[Source]]:
            yield from ()
            slot = cache.slots[0]
            found = []
            for transfer in ("restore", "export", ""):
                slot.transfer = transfer
                found.append(cache.search.best_source(work.tokens))
            return found

        found = await engine.core.perform(sources)
        assert [source.length for source in found] == [0, 219, 219]


def parking_engine_without_store(model: SyntheticModel) -> Any:
    return parking_engine(model, None, put_away_idle=True, slots=2, by_itself=True)
