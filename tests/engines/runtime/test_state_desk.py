"""The desk on cores of this process: which states may enter, and that no transfer is in anybody's way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engines.errors import (
    EngineError,
    NoCellsFree,
    SlotBusy,
    StateIncompatible,
    StateInvalid,
    StateSharingOff,
    StateTooLarge,
)
from engines.runtime.core import EngineCore
from engines.runtime.fingerprint import Fingerprint
from engines.runtime.state_desk import RestoreTerms, StateDesk
from engines.runtime.state_forms import STREAM_MAGIC, digest_of, stream_head
from engines.runtime.state_snapshot import Manifest
from tests.engines.runtime.test_core import finished, generation, prompt_of, run, running
from tests.paced_engine import slow_steps
from tests.synthetic_gguf import SyntheticModel

PRELUDE_BYTES = 44


@asynccontextmanager
async def desk_of(model: SyntheticModel, **settings: Any) -> AsyncIterator[tuple[EngineCore, StateDesk]]:
    async with running(model, kv_block_tokens=64, **settings) as core:
        desk = StateDesk(core)
        try:
            yield core, desk
        finally:
            desk.close()


async def exported(desk: StateDesk, slot: int = 0, form: str = "stream") -> bytes:
    async with await desk.export(slot, form) as state:
        raw = b"".join([bytes(buffer) async for buffer in state])
        assert len(raw) == state.total_bytes
        return raw


async def chunks(raw: bytes, size: int = 7919) -> AsyncIterator[bytes]:
    for at in range(0, len(raw), size):
        yield raw[at : at + size]
        await asyncio.sleep(0)


async def restored(desk: StateDesk, raw: bytes, slot: int = 1, **terms: Any) -> str:
    return (await desk.restore(slot, RestoreTerms(**terms), chunks(raw))).model_match


def opened(raw: bytes) -> tuple[Manifest, bytes]:
    """A stream's manifest, and the pieces behind it."""
    assert raw[:4] == STREAM_MAGIC
    end = PRELUDE_BYTES + int.from_bytes(raw[8:12], "little")
    return Manifest.from_json(raw[PRELUDE_BYTES:end]), raw[end:]


async def refused(desk: StateDesk, raw: bytes, error: type[EngineError], words: str, **terms: Any) -> None:
    with pytest.raises(error, match=words):
        await restored(desk, raw, **terms)
    meta = await desk.meta(1)
    assert (meta.n_past, meta.is_transferring) == (0, False)


async def test_a_state_of_another_model_type_or_size_is_refused_by_name(
    tiny_model: Callable[..., SyntheticModel],
) -> None:
    model = tiny_model("llama")
    async with desk_of(model) as (core, desk):
        await run(core, prompt_of(model, 200), 10)
        raw = await exported(desk)
    refusals: list[tuple[SyntheticModel, dict[str, Any], type[EngineError], str]] = [
        (tiny_model("llama", seed=5), {}, StateIncompatible, "model is sha256:.* there"),
        (model, {"kv_type_k": "q8_0"}, StateIncompatible, "kv_type_k is f16 there and q8_0 here"),
        (tiny_model("qwen3"), {}, StateIncompatible, "architecture is llama there and qwen3 here"),
        (model, {"context_tokens": 150}, StateTooLarge, "209 tokens; the context holds 150"),
        (model, {"kv_family": "small"}, StateIncompatible, "model is sha256:.* there and family:small here"),
    ]
    for other, settings, error, words in refusals:
        async with desk_of(other, slots=2, **settings) as (_, desk):
            await refused(desk, raw, error, words)


async def test_quants_of_a_declared_family_share(tiny_model: Callable[..., SyntheticModel]) -> None:
    model, other = tiny_model("qwen35"), tiny_model("qwen35", seed=5)
    async with desk_of(model, kv_family="tiny") as (core, desk), desk_of(other, kv_family="tiny") as (_, second):
        await run(core, prompt_of(model, 100), 10)
        raw = await exported(desk)
        assert await restored(second, raw) == "family"
        assert await restored(desk, raw) == "exact"


async def test_a_manifest_that_contradicts_itself_or_the_engine_is_refused(
    tiny_model: Callable[..., SyntheticModel],
) -> None:
    model = tiny_model("qwen35")
    async with desk_of(model) as (core, desk):
        await run(core, prompt_of(model, 150), 10, cuts=[64])
        raw = await exported(desk)
        manifest, pieces = opened(raw)
        first, *rest = manifest.pieces
        assert [piece.kind for piece in manifest.pieces] == ["block", "block", "block", "part", "checkpoint"]
        changes: list[tuple[dict[str, Any], str]] = [
            ({"pieces": (*rest,)}, "cannot stand there"),
            ({"pieces": (first, first, *rest)}, "cannot stand there"),
            ({"pieces": (replace(first, size_bytes=first.size_bytes + 1), *rest)}, "cannot stand there"),
            ({"pieces": (replace(first, end=1 << 40), *rest)}, "cannot stand there"),
            ({"pieces": (replace(first, start=-3), *rest)}, "cannot stand there"),
            ({"pieces": manifest.pieces[:3]}, "lacks pieces"),
            ({"pieces": (*manifest.pieces[:4], replace(manifest.pieces[4], end=159))}, "cannot stand there"),
            ({"pieces": ()}, "lacks pieces"),
            ({"tokens": ()}, "no tokens"),
            ({"tokens": (*manifest.tokens[:-1], 1 << 20)}, "beyond the vocabulary"),
            ({"tokens": (*manifest.tokens[:-1], -1)}, "beyond the vocabulary"),
            ({"tokens": (manifest.tokens[0] + 1, *manifest.tokens[1:])}, "other tokens"),
            ({"tokens": manifest.tokens[:-1]}, "cannot stand there"),
            ({"fingerprint": "nonsense"}, "no fingerprint"),
            ({"version": 3}, "version 3"),
            ({"next_token": 1 << 20}, "beyond the vocabulary"),
        ]
        for change, words in changes:
            head = stream_head(replace(manifest, **change))
            await refused(desk, head + pieces, StateInvalid, words)
        await refused(desk, raw, StateInvalid, "announced", total_bytes=len(raw) + 1)
        assert await restored(desk, raw, total_bytes=len(raw)) == "exact"


async def test_sound_digests_do_not_let_damaged_bytes_into_llama_cpp(
    tiny_model: Callable[..., SyntheticModel],
) -> None:
    """Who can make digests can make any bytes; whatever they are, the engine lives on and the slot is empty."""
    model = tiny_model("qwen35")
    rng = np.random.default_rng(11)
    async with desk_of(model) as (core, desk):
        await run(core, prompt_of(model, 100), 10)
        manifest, pieces = opened(await exported(desk))
        head, outcomes = stream_head(manifest), {"refused": 0, "taken": 0}
        for _ in range(60):
            damaged = bytearray(pieces)
            at = 0
            for piece in manifest.pieces:  # most of the damage in what is no row
                begin, size = at + 32, piece.size_bytes
                for _ in range(int(rng.integers(0, 3))):
                    damaged[begin + int(rng.integers(0, min(size, 2500)))] = int(rng.integers(0, 256))
                damaged[at:begin] = digest_of(bytes(damaged[begin : begin + size]))
                at = begin + size
            try:
                await restored(desk, head + bytes(damaged))
                outcomes["taken"] += 1
            except (StateInvalid, StateIncompatible):
                outcomes["refused"] += 1
                assert (await desk.meta(1)).n_past == 0
        assert outcomes["refused"] > 10
        assert (await run(core, prompt_of(model, 40, start=4), 5)).new_tokens == 5


async def test_a_slot_is_taken_while_its_state_moves_and_others_run_on(
    tiny_model: Callable[..., SyntheticModel],
) -> None:
    model = tiny_model("llama", tie_free=True)
    async with desk_of(model, slots=2) as (core, desk):
        await run(core, prompt_of(model, 200), 10)
        other = generation(prompt_of(model, 30, start=2), 200)
        core.submit(other)
        async with await desk.export(0) as state:
            with pytest.raises(SlotBusy):
                await desk.export(0)
            meta = await desk.meta(0)
            assert (meta.operation, meta.is_transferring, meta.is_processing) == ("export", True, False)
            assert next(view.state for view in core.views()) == "export"
            waits = generation([*prompt_of(model, 200), 3, 10], 5)
            core.submit(waits)  # for the other slot: this one may not be used
            raw = b"".join([bytes(buffer) async for buffer in state])
            assert raw == b"".join([bytes(buffer) async for buffer in state])
            assert (await finished(other)).error is None
            assert other.tokens[30:] == model.follow(10, 200)
        assert (await finished(waits)).error is None
        assert (await desk.meta(0)).operation == ""
        assert await restored(desk, raw) == "exact"


async def test_a_transfer_that_is_cancelled_gives_everything_back(tiny_model: Callable[..., SyntheticModel]) -> None:
    model = tiny_model("qwen35")
    async with desk_of(model) as (core, desk):
        await run(core, prompt_of(model, 300), 10)
        raw = await exported(desk)
        arena = desk._arena
        assert arena is not None
        for wait_s in (0, 0.0005, 0.001, 0.002, 0.004, 0.008):
            coming = asyncio.ensure_future(restored(desk, raw))
            leaving = asyncio.ensure_future(exported(desk))
            await asyncio.sleep(wait_s)
            coming.cancel()
            leaving.cancel()
            await asyncio.gather(coming, leaving, return_exceptions=True)
            seen = [await desk.meta(slot) for slot in (0, 1)]
            assert not any(meta.is_transferring for meta in seen)
            assert seen[1].n_past in (0, 309)
            assert arena.free_bytes == arena.size_bytes
        assert await exported(desk) == raw
        assert not any(checkpoint.leaving for checkpoint in core.cache.checkpoints)
        held = sum(len(slot.sequence) for slot in core.cache.slots)
        assert core.cache.ledger.count - core.cache.ledger.free <= held


async def test_a_state_does_not_push_running_requests_out(tiny_model: Callable[..., SyntheticModel]) -> None:
    model = tiny_model("llama", tie_free=True)
    async with desk_of(model, slots=2, context_tokens=300, cache_tokens=300) as (core, desk):
        await run(core, prompt_of(model, 150), 10)
        raw = await exported(desk)
        runs = generation(prompt_of(model, 200, start=3), 60)
        with slow_steps(0.05):
            core.submit(runs)
            await runs.mailbox.take(10)
            idle = next(view.id for view in core.views() if not view.is_processing)
            with pytest.raises(NoCellsFree):
                await restored(desk, raw, slot=idle)
        assert (await finished(runs)).error is None
        assert runs.tokens[200:] == model.follow(10, 60)
        assert await restored(desk, raw, slot=idle) == "exact"


async def test_an_engine_that_knows_no_layout_refuses_every_transfer(tiny_model: Callable[..., SyntheticModel]) -> None:
    model = tiny_model("llama")
    async with desk_of(model) as (core, desk):
        await run(core, prompt_of(model, 50), 5)
        raw = await exported(desk)
        core.codec, core.sharing_refusal = None, "2 layouts fit a state of 7 tokens"
        for action in (desk.meta(0), desk.export(0), restored(desk, raw)):
            with pytest.raises(StateSharingOff, match="2 layouts fit"):
                await action
        assert b"hydra_engine_state_sharing 0.0" in core.metrics.text()
        assert (await run(core, prompt_of(model, 20), 5)).new_tokens == 5


def test_a_fingerprint_is_text_that_comes_back_the_same() -> None:
    fingerprint = Fingerprint("sha256:ab", "qwen35", "t", "f16", "f16", "on", "r", "none", "3-x")
    assert Fingerprint.parse(fingerprint.text) == fingerprint
    assert len(fingerprint.digest) == 32
    for text in ("", "hydra-kv-1", fingerprint.text + ";more=1", fingerprint.text.replace("rope", "rape")):
        with pytest.raises(StateInvalid):
            Fingerprint.parse(text)
