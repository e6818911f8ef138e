"""Conversations go to host memory and come back a slice at a time: nobody beside them waits or gets another text, bytes stay
bytes, what changes meanwhile is not mixed up, and the budget counts what there is."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import numpy as np
import pytest

from engines.runtime.core import EngineCore
from engines.runtime.errands import ErrandQueue
from engines.runtime.generation import Generation
from engines.runtime.host_cache import TOKEN_BYTES, HostEntry
from engines.runtime.http_forget import forgotten
from engines.runtime.prefix import PrefixCache
from engines.runtime.slots import Slot
from engines.runtime.state_codec import StateCodec
from engines.runtime.state_layout import Bytes
from engines.runtime.state_transfer import look
from tests.engines.runtime.test_core import finished, generation, prompt_of, run, running
from tests.engines.runtime.test_prefix import made
from tests.paced_engine import slow_steps
from tests.synthetic_gguf import SyntheticModel

Models = Callable[..., SyntheticModel]
BLOCK = 16
LONG = 200
ONE_A_SESSION = {"slots": 2, "kv_block_tokens": BLOCK, "context_tokens": 512}
# A memory that is cut anywhere, one with windows kept whole, one that forgets behind its window, one with recurrent state.
KINDS = ("llama", "gemma3", "windowed", "qwen35")


@contextmanager
def noted_slices(core: EngineCore) -> Iterator[list[str]]:
    """What the core's thread does, in order: "step", and inside of slices of errands "piece" for each that left or entered."""
    notes: list[str] = []
    codec, llama = core.codec, core.loaded
    assert codec is not None
    calls = {"take_block": codec, "take_part": codec, "enter_block": codec, "enter_part": codec, "decode": llama}
    old = {name: getattr(owner, name) for name, owner in calls.items()}
    slice_ = ErrandQueue._slice

    def noting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            notes.append("step" if name == "decode" else "piece")
            return old[name](*args, **options)

        return call

    def noted_slice(queue: ErrandQueue, cache: PrefixCache) -> None:
        notes.append("slice")
        slice_(queue, cache)
        notes.append("end")

    for name, owner in calls.items():
        setattr(owner, name, noting(name))
    ErrandQueue._slice = noted_slice  # type: ignore[method-assign]
    try:
        yield notes
    finally:
        ErrandQueue._slice = slice_  # type: ignore[method-assign]
        for name, owner in calls.items():
            setattr(owner, name, old[name])


def pieces_of_each_slice(notes: list[str]) -> tuple[list[int], int]:
    """How many pieces each slice moved, and how many moved outside of slices."""
    counts, outside, inside = [], 0, False
    for note in notes:
        if note == "slice":
            counts.append(0)
        inside = note == "slice" or (inside and note != "end")
        if note == "piece" and inside:
            counts[-1] += 1
        outside += note == "piece" and not inside
    return counts, outside


async def held_bytes(core: EngineCore, slot: Slot) -> list[bytes]:
    """All of a slot's state, in pieces."""

    def work(_cache: PrefixCache) -> Generator[None, None, list[bytes]]:
        yield from ()
        codec, sequence = core.codec, slot.sequence
        assert codec is not None
        edges = range(0, len(sequence), BLOCK)
        blocks = [_block(codec, slot, start, min(start + BLOCK, len(sequence))) for start in edges]
        part = np.zeros(codec.part_bytes(sequence), dtype=np.uint8)
        return [*blocks, codec.export_part(sequence, part).tobytes() if codec.layout.has_part else b""]

    held: list[bytes] = await core.perform(work)
    return held


def _block(codec: StateCodec, slot: Slot, start: int, end: int) -> bytes:
    """In position order: a state that came back lies in other cells."""
    block = codec.export_block(slot.sequence, start, end, np.zeros(codec.capacity_bytes(end - start), dtype=np.uint8))
    return block.tobytes()


async def assert_counted(core: EngineCore) -> None:
    """Nothing is under way any more, and both ledgers tell what there is."""

    def work(cache: PrefixCache) -> Generator[None, None, None]:
        while cache.moves.under_way or not all(slot.idle for slot in cache.slots):
            yield
        assert not cache.aside
        entries = list(cache.host)
        arrays = [array for entry in entries for array in _arrays(entry)]
        assert cache.host.used_bytes == sum(array.nbytes for array in arrays) + TOKEN_BYTES * sum(
            len(entry.tokens) for entry in entries
        )
        # A block that is a view of more memory than it counts would not be seen otherwise.
        assert all(array.base is None or array.base.nbytes == array.nbytes for array in arrays)
        assert len({id(array) for array in arrays}) == len(arrays)
        assert cache.host.used_bytes <= cache.host.budget_bytes
        holders = [slot.sequence.cells for slot in cache.slots] + [c.sequence.cells for c in cache.checkpoints]
        assert cache.ledger.free == cache.ledger.count - cache.ledger.distinct(holders)
        for slot in cache.slots:
            assert core.loaded.last_position(slot.sequence.index) == len(slot.sequence) - 1

    await core.perform(work)


def _arrays(entry: HostEntry) -> list[Bytes]:
    state = entry.state
    return [array for array in (*state.blocks, state.part, state.whole) if array is not None]


@asynccontextmanager
async def beside(core: EngineCore, model: SyntheticModel) -> AsyncIterator[None]:
    """Another stream decodes meanwhile, whose text is right."""
    neighbour = generation(prompt_of(model, 20, start=8), 150, reuse_prefix=False)
    with slow_steps(0.002):
        core.submit(neighbour)
        while neighbour.first_token_at is None:  # noqa: ASYNC110 - the core is another thread and sets no event for this
            await asyncio.sleep(0.001)
        yield
    assert (await finished(neighbour)).error is None
    assert neighbour.tokens[20:] == model.follow(10, 150)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_slice_is_one_piece_on_the_way_out_and_back(tiny_model: Models, kind: str) -> None:
    model, settings = made(tiny_model, kind)
    model = tiny_model("gemma3" if kind == "windowed" else kind, tie_free=True)
    async with running(model, **ONE_A_SESSION, **settings) as core:
        first = await run(core, prompt_of(model, LONG))
        home = core.cache.slots[0]
        before = await held_bytes(core, home)
        async with beside(core, model):
            with noted_slices(core) as notes:
                other = await run(core, prompt_of(model, 60, start=3), 2)
                assert other.tokens[60:] == model.follow(10, 2)
                await _until_in_host_memory(core, first)
                counts, outside = pieces_of_each_slice(notes)
                assert (max(counts), outside) == (1, 0)
                assert sum(counts) >= LONG // BLOCK
                notes.clear()
                back = await run(core, [*first.tokens, 5, 10], 2)
                counts, outside = pieces_of_each_slice(notes)
                assert (max(counts), outside) == (1, 0)
                assert sum(counts) >= LONG // BLOCK
            assert back.cached_tokens == LONG + 19
            assert back.restore_s > 0
        await assert_counted(core)
        (holder,) = [slot for slot in core.cache.slots if slot.sequence.tokens[:LONG] == first.tokens[:LONG]]
        full = (LONG + 19) // BLOCK
        assert _in_order(core, (await held_bytes(core, holder))[:full]) == _in_order(core, before[:full])


async def _until_in_host_memory(core: EngineCore, work: Generation) -> None:
    async with asyncio.timeout(30):
        while not any(entry.tokens == work.tokens[:-1] for entry in core.cache.host):  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.005)


def _in_order(core: EngineCore, blocks: list[bytes]) -> list[dict[int, bytes]]:
    """Each block's rows by position: one cell's of every tensor."""
    assert core.codec is not None
    attention, found = core.codec.layout.attention, []
    for block in blocks:
        section = np.frombuffer(block, dtype=np.uint8)[8:]
        count = int(section[4:8].view(np.uint32)[0])
        positions = attention.cells(section, count)["pos"].tolist()
        rows = []
        for tensor, at in zip(attention.tensors, attention.head_offsets(count), strict=True):
            begin = int(at) + 12
            rows.append(section[begin : begin + count * tensor.row_bytes].reshape(count, -1))
        found.append({position: b"".join(row[i].tobytes() for row in rows) for i, position in enumerate(positions)})
    return found


CHANGES = ("cut", "cleared", "gone on", "filled anew with the same", "forgotten")


@pytest.mark.parametrize("kind", KINDS)
async def test_what_changes_on_its_way_out_is_dropped(tiny_model: Models, kind: str) -> None:
    model, settings = made(tiny_model, kind)
    async with running(model, **ONE_A_SESSION, **settings) as core:
        for change in CHANGES:
            await run(core, prompt_of(model, LONG), session="s")
            await core.perform(lambda cache, change=change: _changed_on_its_way(core, cache, change))
            await assert_counted(core)


def _changed_on_its_way(core: EngineCore, cache: PrefixCache, change: str) -> Generator[None, None, None]:
    sequence, moves = next(slot.sequence for slot in cache.slots if len(slot.sequence)), cache.moves
    tokens, state = list(sequence.tokens), core.loaded.export_state(sequence.index)
    assert not moves.is_out(sequence)
    # It is the next errand: a few slices of it run before this one's next.
    while not cache.host.used_bytes:
        yield
    assert not moves.is_out(sequence)
    if change == "cut":
        sequence.cut(LONG // 2)
    elif change == "cleared":
        sequence.clear()
    elif change == "gone on":
        sequence.append([7])
        sequence.take_back(len(tokens))
    elif change == "forgotten":
        yield from forgotten(cache, "s")
    else:
        origin = sequence.origin
        assert sequence.load(state, tokens, origin=origin)
    while moves.under_way:
        yield
    assert (len(cache.host), cache.host.used_bytes) == (0, 0), change
    sequence.clear()


async def test_a_conversation_that_grew_leaves_only_what_is_new_of_it(tiny_model: Models) -> None:
    model = tiny_model("llama", tie_free=True)
    async with running(model, **ONE_A_SESSION) as core:

        def leave(cache: PrefixCache) -> Generator[None, None, None]:
            while not cache.moves.is_out(cache.slots[0].sequence):
                yield

        first = await run(core, prompt_of(model, LONG))
        await core.perform(leave)
        (old,) = list(core.cache.host)
        for again in range(2):
            turn = await run(core, [*first.tokens, 5, *range(20, 50), 10])
            assert turn.cached_tokens >= LONG
            with noted_slices(core) as notes:
                await core.perform(leave)
            (entry,) = list(core.cache.host)
            assert entry.tokens == turn.tokens[:-1]
            assert entry.state.blocks[: LONG // BLOCK] == old.state.blocks[: LONG // BLOCK]
            new = -(-len(entry.tokens) // BLOCK) - (len(old.tokens) // BLOCK)
            assert notes.count("piece") == new, again
            await assert_counted(core)
            first, old = turn, entry


async def test_who_is_on_its_way_out_is_still_lent_and_gone_on_with(tiny_model: Models) -> None:
    """It has stepped aside for another content of its slot; its next turn comes before it has left."""
    model = tiny_model("llama", tie_free=True)
    async with running(model, **ONE_A_SESSION) as core:
        first = await run(core, prompt_of(model, LONG), session="s")
        async with beside(core, model):
            held = asyncio.Event()
            core_holds = _holding(core, held)
            other = await run(core, prompt_of(model, 60, start=3), 2)
            assert [place.sequence.origin.session for place in core.cache.aside] == ["s"]
            back = await run(core, [*first.tokens, 5, 10], 2, session="s")
            assert (other.cached_tokens, back.cached_tokens) == (0, LONG + 19)
            held.set()
            await core_holds
        await assert_counted(core)


def _holding(core: EngineCore, until: asyncio.Event) -> asyncio.Future[None]:
    """Nothing leaves for host memory until then."""
    send = core.cache.moves._errand
    waiting: list[Any] = []

    def hold(work: Any) -> Future[Any]:
        waiting.append(work)
        return Future()

    core.cache.moves._errand = hold

    async def release() -> None:
        await until.wait()
        core.cache.moves._errand = send
        for work in waiting:
            send(work)

    return asyncio.ensure_future(release())


# --- at random --------------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "llama": {"host_cache_bytes": 700_000},
    "gemma3": {"host_cache_bytes": 2_000_000},
    "windowed": {"host_cache_bytes": 2_000_000},
    "qwen35": {"host_cache_bytes": 6_000_000, "checkpoints": 2},
}
SMALL = {"slots": 3, "context_tokens": 512, "cache_tokens": 700, "kv_block_tokens": BLOCK, "put_away_idle": True}


async def _someone(core: EngineCore, model: SyntheticModel, name: int, rng: random.Random, count: int) -> int:
    """Turns of a few conversations, some of which are given up, looked at or deleted; returns how many tokens were reused."""
    talks = [prompt_of(model, rng.randrange(70, 200), start=name * 5 + i) for i in range(3)]
    reused = 0
    for _ in range(count):
        which = rng.randrange(3)
        if len(talks[which]) > 380 or rng.random() < 0.1:
            talks[which] = prompt_of(model, rng.randrange(70, 200), start=rng.randrange(40))
        prompt = [*talks[which], *(rng.randrange(3, 250) for _ in range(rng.randrange(6))), 10]
        session = f"{name}.{which}"
        work = generation(prompt, rng.randrange(1, 30), session=session, cuts=sorted(rng.sample(range(20, 70), 2)))
        core.submit(work)
        kind = rng.random()
        if kind < 0.25:
            await asyncio.sleep(rng.random() * 0.02)
            core.cancel(work)
            continue
        assert (await finished(work)).error is None
        assert work.tokens[len(prompt) :] == model.follow(10, len(work.tokens) - len(prompt))
        reused += work.cached_tokens
        talks[which] = work.tokens
        if kind < 0.35:
            await core.perform(lambda cache: _looked(core, cache, rng.randrange(3)))
        elif kind < 0.45:
            # A request of the session that was given up may still be there.
            await core.perform(lambda cache, session=session: _deleted(cache, session))
        assert core.cache.host.used_bytes <= core.cache.host.budget_bytes
    return reused


def _looked(core: EngineCore, cache: PrefixCache, slot: int) -> Generator[None, None, None]:
    assert core.codec is not None
    yield from look(cache, core.codec, slot)


def _deleted(cache: PrefixCache, session: str) -> Generator[None, None, None]:
    if not any(slot.sequence.origin.session == session and not slot.idle for slot in cache.slots):
        yield from forgotten(cache, session)
        assert session not in {entry.origin.session for entry in cache.host}


@pytest.mark.parametrize("count", [3, pytest.param(150, marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", CASES)
async def test_whatever_happens_the_text_is_right_and_all_is_counted(tiny_model: Models, kind: str, count: int) -> None:
    _, settings = made(tiny_model, kind)
    model = tiny_model("gemma3" if kind == "windowed" else kind, tie_free=True)
    async with running(model, **{**SMALL, **CASES[kind], **settings}) as core:
        async with asyncio.timeout(600):
            asking = (_someone(core, model, name, random.Random(name + count), count) for name in range(4))
            assert sum(await asyncio.gather(*asking)) > 0
        await assert_counted(core)
