"""Conversations that go to the host's store and come back: the same answers as if they had never left."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engines.errors import SessionNotHeld, StoreAway
from engines.runtime.origin import Origin
from engines.runtime.state_desk import RestoreTerms
from tests.engines.runtime.parked import StoreHere, client_of, info_of, parking_engine, store_here, until
from tests.engines.runtime.test_core import finished, generation, prompt_of
from tests.engines.runtime.test_state_desk import chunks
from tests.engines.store.store_process import StoreProcess, store_on_tmpfs
from tests.synthetic_gguf import SyntheticModel

ARCHITECTURES = ("llama", "gemma3", "qwen35", "qwen35moe")


@pytest.fixture
async def store() -> AsyncIterator[StoreHere]:
    async with store_here() as running:
        yield running


@pytest.fixture
def mortal_store(tmp_path: Path) -> Iterator[StoreProcess]:
    with store_on_tmpfs(tmp_path) as running:
        yield running


@pytest.mark.parametrize("architecture", ARCHITECTURES)
async def test_a_parked_conversation_goes_on_elsewhere_as_if_it_had_stayed(
    tiny_model: Callable[..., SyntheticModel], mortal_store: StoreProcess, architecture: str
) -> None:
    store = mortal_store
    model = tiny_model(architecture)  # its answers depend on every token before
    prompt, more = prompt_of(model, 300), [5, 6, 7, 8, 9]
    async with parking_engine(model, store) as engine:
        first = await engine.ask(prompt, 40)
        stayed = await engine.ask([*first.tokens, *more], 40)
        assert stayed.cached_tokens == 339
    async with parking_engine(model, store) as engine:
        await engine.ask(prompt, 40)
        saved = await engine.parking.park_slot(0)
        assert saved.tokens == 339
        assert len(engine.core.cache.slots[0].sequence) == 0
    async with parking_engine(model, store) as engine:
        resumed = await engine.ask([*first.tokens, *more], 40)
        assert resumed.cached_tokens == 339
        assert resumed.tokens == stayed.tokens
        assert engine.count("resumed", place="host") == 1
    store.restart()
    async with parking_engine(model, store) as engine:
        resumed = await engine.ask([*first.tokens, *more], 40)
        assert (resumed.cached_tokens, resumed.tokens) == (339, stayed.tokens)


async def test_a_save_writes_what_is_new_and_an_unchanged_one_nothing(
    tiny_model: Callable[..., SyntheticModel], store: StoreHere
) -> None:
    model = tiny_model("qwen3", tie_free=True)
    async with parking_engine(model, store, slots=1) as engine:
        work = await engine.ask(prompt_of(model, 300), 20, session="s")
        first = await engine.parking.park_slot(0)
        assert first.written_bytes == first.total_bytes > 0
        used = (await info_of(store)).status
        await engine.ask(prompt_of(model, 300), 20, session="s", reuse_prefix=False)
        again = await engine.parking.park_slot(0)
        assert (again.name, again.written_bytes) == (first.name, 0)
        assert (await info_of(store)).status == used
        longer = await engine.ask([*work.tokens, *prompt_of(model, 200, start=9)], 20)
        assert longer.cached_tokens == 319
        grown = await engine.parking.park_slot(0)
        # Five whole blocks were there; the tail grew into new ones, and the description is new.
        assert 0 < grown.written_bytes < grown.total_bytes * 0.55


@pytest.mark.parametrize("architecture", ["llama", "qwen35"])
async def test_another_tenant_gets_nothing(
    tiny_model: Callable[..., SyntheticModel], store: StoreHere, architecture: str
) -> None:
    model = tiny_model(architecture, tie_free=True)
    prompt = prompt_of(model, 300)
    async with parking_engine(model, store) as engine:
        first = await engine.ask(prompt, tenant="aa")
        assert (await engine.ask([*first.tokens, 5], tenant="bb")).cached_tokens == 0
        assert (await engine.ask([*first.tokens, 5])).cached_tokens == 0
        assert (await engine.ask([*first.tokens, 5], tenant="aa")).cached_tokens == 319
        last = await engine.ask([*first.tokens, 5], tenant="aa")
        for slot in range(4):
            if len(engine.core.cache.slots[slot].sequence):
                await engine.parking.park_slot(slot)
    async with parking_engine(model, store) as engine:
        assert (await engine.ask([*last.tokens, 6], tenant="cc")).cached_tokens == 0
        again = await engine.ask([*last.tokens, 6], tenant="aa")
        assert (again.cached_tokens, again.tokens[-20:]) == (340, model.follow(6, 20))


@pytest.mark.parametrize("architecture", ["llama", "qwen35"])
async def test_eight_sessions_share_one_system_prompt_across_two_engines(
    tiny_model: Callable[..., SyntheticModel], store: StoreHere, architecture: str
) -> None:
    model = tiny_model(architecture, tie_free=True)
    system, cut = prompt_of(model, 200), 200

    def prompt(session: int) -> list[int]:
        return [*system, *prompt_of(model, 40 + session, start=session + 2)]

    cuts = [cut] if architecture == "qwen35" else []
    async with parking_engine(model, store, by_itself=True) as engine:
        await engine.ask(prompt(0), cuts=cuts, system_cut=cut, session="s0")
        await until(lambda: engine.count("park_saves", reason="turn") > 0)
    before = (await info_of(store)).status
    async with parking_engine(model, store, by_itself=True) as engine:
        await engine.parking.ready()
        works = await asyncio.gather(
            *(engine.ask(prompt(n), cuts=cuts, system_cut=cut, session=f"s{n}") for n in range(1, 9))
        )
        assert [work.cached_tokens for work in works] == [cut] * 8
        assert all(work.tokens[-20:] == model.follow(10, 20) for work in works)
        await until(lambda: engine.count("park_saves", reason="turn") >= 4)
    async with client_of(store) as client:
        snapshots, _ = await client.snapshots()
    assert [entry.pinned for entry in snapshots if entry.n_past == cut] == [True]
    after = (await info_of(store)).status
    # The system prompt's bytes are there once: of each further session only its own.
    assert after["logical_bytes"] - before["logical_bytes"] > 1.5 * (after["stored_bytes"] - before["stored_bytes"])


async def test_what_the_store_gave_up_or_damaged_is_computed_again(
    tiny_model: Callable[..., SyntheticModel], store: StoreHere
) -> None:
    model = tiny_model("qwen35", tie_free=True)
    async with parking_engine(model, store, checkpoints=0) as engine:
        first = await engine.ask(prompt_of(model, 300))
        saved = await engine.parking.park_slot(0)
        work = generation([*first.tokens, 5, 6], 20)
        await engine.parking.look_up([work], ())
        assert work.incoming is not None
        async with client_of(store) as client:
            manifest = await client.get_manifest(saved.name.text)
            assert manifest is not None
            await client.delete(saved.name.text)
        engine.core.submit(work)
        await finished(work)
        assert (work.cached_tokens, work.tokens[-20:]) == (0, model.follow(6, 20))
        assert engine.count("store_failures", operation="restore", cause="rpc_not_found") == 1
        await engine.parking.park_slot(next(s.index for s in engine.core.cache.slots if len(s.sequence)))
        async with client_of(store) as client:
            block = next(chunk for chunk in manifest.chunks if chunk.kind == "block")
            async with client.held(hashes=[block.hash]) as held:
                place = held.places[0]
                client.slabs.range(place.path, place.offset, place.size)[100] ^= 1
        again = await engine.ask([*work.tokens, 7])
        assert (again.cached_tokens, again.tokens[-20:]) == (0, model.follow(7, 20))
        assert engine.count("store_failures", operation="restore", cause="state_invalid") == 1


async def test_a_store_that_dies_costs_a_prefill_and_is_found_again(
    tiny_model: Callable[..., SyntheticModel], mortal_store: StoreProcess
) -> None:
    store = mortal_store
    model = tiny_model("qwen35moe", tie_free=True)
    async with parking_engine(model, store) as engine:
        first = await engine.ask(prompt_of(model, 300))
        os.kill(store.process.pid, signal.SIGSTOP)  # what it was sent until it dies is never answered
        parking = asyncio.ensure_future(engine.parking.park_slot(0))
        await asyncio.sleep(0.002)
        store.kill()
        with pytest.raises(StoreAway):
            await parking
        assert len(engine.core.cache.slots[0].sequence) == 319
        work = await engine.ask([*first.tokens, 5])
        assert (work.cached_tokens, work.tokens[-20:]) == (319, model.follow(5, 20))
        store.start()
        await until(lambda: engine.parking._link.may_ask)
        saved = await engine.parking.park_slot(0)
        assert saved.tokens == 340
        look = generation([*work.tokens, 6], 20)
        await engine.parking.look_up([look], ())
        store.kill()
        engine.core.submit(look)
        await finished(look)
        assert (look.cached_tokens, look.tokens[-20:]) == (0, model.follow(6, 20))
        assert engine.count("store_lookups", outcome="hit") == 1
        # While it is away nobody waits for it.
        assert (await engine.ask(prompt_of(model, 200, start=3))).cached_tokens == 0
        assert engine.count("store_lookups", outcome="away") >= 1


async def test_an_idle_conversation_is_parked_out_of_its_slot_and_out_of_host_memory(
    tiny_model: Callable[..., SyntheticModel], store: StoreHere
) -> None:
    model = tiny_model("llama", tie_free=True)
    settings = {"put_away_idle": True, "park_idle_s": 1.5, "slots": 3}
    async with parking_engine(model, store, by_itself=True, **settings) as engine:
        await engine.parking.ready()
        works = [await engine.ask(prompt_of(model, 200, start=n), session=f"s{n}") for n in range(1, 4)]
        cache = engine.core.cache
        await until(lambda: engine.count("parked", reason="idle") == 3)
        assert (len(cache.host), [len(slot.sequence) for slot in cache.slots]) == (0, [0, 0, 0])
        for work in works:
            again = await engine.ask([*work.tokens, 5], session=work.session)
            assert (again.cached_tokens, again.tokens[-20:]) == (219, model.follow(5, 20))


async def test_a_slot_that_was_put_away_still_has_its_state(
    tiny_model: Callable[..., SyntheticModel], store: StoreHere
) -> None:
    model = tiny_model("llama", tie_free=True)
    async with parking_engine(model, store, put_away_idle=True) as engine:
        works = [await engine.ask(prompt_of(model, 200, start=n), session=f"s{n}") for n in range(1, 4)]
        cache = engine.core.cache
        await until(lambda: len(cache.host) == 2)
        away = next(slot.index for slot in cache.slots[:3] if not len(slot.sequence))
        assert (await engine.desk.meta(away)).n_past == 219
        async with await engine.desk.export(away) as state:
            assert state.manifest.tokens == tuple(works[away].tokens[:219])
        saved = [snapshot for n in range(1, 4) for snapshot in await engine.parking.park_session(f"s{n}")]
        assert [snapshot.tokens for snapshot in saved] == [219, 219, 219]
        with pytest.raises(SessionNotHeld):
            await engine.parking.park_session("s1")


async def test_a_stopping_engine_saves_what_it_holds(
    tiny_model: Callable[..., SyntheticModel], store: StoreHere
) -> None:
    model = tiny_model("qwen35", tie_free=True)
    async with parking_engine(model, store) as engine:
        first = await engine.ask(prompt_of(model, 300), cuts=[250])
        await engine.parking.stop()
    async with parking_engine(model, store) as engine:
        other = await engine.ask([*first.tokens[:250], *prompt_of(model, 80, start=7)])
        assert (other.cached_tokens, other.tokens[-20:]) == (250, model.follow(10, 20))
        again = await engine.ask([*first.tokens, 5])
        assert (again.cached_tokens, again.tokens[-20:]) == (319, model.follow(5, 20))


async def test_a_prefix_comes_from_another_hosts_store(
    tiny_model: Callable[..., SyntheticModel], store: StoreHere
) -> None:
    model = tiny_model("qwen35", tie_free=True)
    async with parking_engine(model, store) as engine:
        first = await engine.ask(prompt_of(model, 300))
        await engine.parking.park_slot(0)
    async with store_here(instance="two") as second, parking_engine(model, second) as engine:
        stores = (("127.0.0.1", 1), ("127.0.0.1", store.config.port))
        again = await engine.ask([*first.tokens, 5], stores=stores)
        assert (again.cached_tokens, again.tokens[-20:]) == (319, model.follow(5, 20))
        assert engine.count("resumed", place="elsewhere") == 1
        assert engine.count("store_failures", operation="pull", cause="engine_unreachable") == 1


async def test_a_sessions_next_turn_takes_a_part_of_a_block(
    tiny_model: Callable[..., SyntheticModel], store: StoreHere
) -> None:
    model = tiny_model("llama")
    prompt = prompt_of(model, 350)
    turn = [*prompt[:317], *prompt_of(model, 60, start=5)]  # parts inside the fifth block
    async with parking_engine(model, store) as engine:
        await engine.ask(prompt, 60, session="s")
        stayed = await engine.ask(turn, 30, session="s")
        assert stayed.cached_tokens == 317
    async with parking_engine(model, store) as engine:
        await engine.ask(prompt, 60, session="s")
        await engine.parking.park_slot(0)
    async with parking_engine(model, store) as engine:
        resumed = await engine.ask(turn, 30, session="s")
        assert (resumed.cached_tokens, resumed.tokens) == (317, stayed.tokens)
    async with parking_engine(model, store) as engine:
        assert (await engine.ask(turn, 30, session="t")).cached_tokens == 256
        assert (await engine.ask(turn, 30, session="s", tenant="ab")).cached_tokens == 0


async def test_a_draft_head_goes_on_behind_a_resume(
    tiny_model: Callable[..., SyntheticModel], store: StoreHere
) -> None:
    """On random weights, where drafts hang on all that came before: the same ones are made and accepted."""
    model = tiny_model("qwen35", nextn=True)
    settings: dict[str, Any] = {"speculation": "mtp", "draft_tokens": 3, "slots": 2}
    async with parking_engine(model, store, **settings) as engine:
        first = await engine.ask(prompt_of(model, 200), 40, draft_min=3, session="s")
        stayed = await engine.ask([*first.tokens, 4, 5, 10], 64, draft_min=3, session="s")
    async with parking_engine(model, store, **settings) as engine:
        await engine.ask(prompt_of(model, 200), 40, draft_min=3, session="s")
        saved = await engine.parking.park_slot(0)
    async with client_of(store) as client:
        manifest = await client.get_manifest(saved.name.text)
        assert manifest is not None
        assert "draft" in {chunk.kind for chunk in manifest.chunks}
    async with parking_engine(model, store, **settings) as engine:
        resumed = await engine.ask([*first.tokens, 4, 5, 10], 64, draft_min=3, session="s")
        assert (resumed.cached_tokens, resumed.tokens) == (saved.tokens, stayed.tokens)
        assert (resumed.drafted_tokens, resumed.accepted_tokens) == (stayed.drafted_tokens, stayed.accepted_tokens)


async def test_a_conversation_that_was_put_into_a_slot_belongs_to_whom_the_sender_says(
    tiny_model: Callable[..., SyntheticModel], store: StoreHere
) -> None:
    model = tiny_model("llama", tie_free=True)
    async with parking_engine(model, store, slots=2) as engine:
        first = await engine.ask(prompt_of(model, 100), tenant="aa")
        async with await engine.desk.export(0) as state:
            raw = b"".join([bytes(buffer) async for buffer in state])
        terms = RestoreTerms(origin=Origin("bb", "s"))
        await engine.desk.restore(1, terms, chunks(raw))
        assert (await engine.ask([*first.tokens, 5], tenant="aa", session="t")).cached_tokens == 119
        assert (await engine.parking.park_session("s"))[0].tokens == 119
        assert (await engine.ask([*first.tokens, 6], tenant="bb", session="s")).cached_tokens == 119
