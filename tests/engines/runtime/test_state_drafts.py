"""What a draft head holds travels with the state, and nothing depends on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from engines.errors import StateInvalid
from engines.runtime.core import EngineCore
from engines.runtime.generation import Generation
from engines.runtime.state_forms import digest_of, stream_head
from tests.engines.runtime.test_core import prompt_of, run
from tests.engines.runtime.test_state_desk import desk_of, exported, opened, restored
from tests.synthetic_gguf import SyntheticModel

FIXED: dict[str, Any] = {"speculation": "mtp", "draft_tokens": 3, "slots": 2}
THREE: dict[str, Any] = {"draft_min": 3}


async def goes_on(core: EngineCore, first: Generation, count: int = 64) -> Generation:
    return await run(core, [*first.tokens, 4, 5, 10], count, **THREE)


def without(raw: bytes, *kinds: str) -> bytes:
    """The stream with those pieces left out."""
    manifest, pieces = opened(raw)
    kept, at = b"", 0
    for piece in manifest.pieces:
        end = at + 32 + piece.size_bytes
        kept += pieces[at:end] if piece.kind not in kinds else b""
        at = end
    left = tuple(piece for piece in manifest.pieces if piece.kind not in kinds)
    return stream_head(replace(manifest, pieces=left)) + kept


@pytest.mark.parametrize("architecture", ["qwen35", "qwen35moe"])
async def test_drafts_go_on_behind_an_import_as_at_home(
    tiny_model: Callable[..., SyntheticModel], architecture: str
) -> None:
    """On random weights, where drafts hang on all that came before: the same ones are made and accepted, not just as many."""
    model = tiny_model(architecture, nextn=True)
    async with desk_of(model, **FIXED) as (home, desk), desk_of(model, **FIXED) as (away, other):
        first = await run(home, prompt_of(model, 90), 40, **THREE)
        raw = await exported(desk)
        manifest, _ = opened(raw)
        kinds = [piece.kind for piece in manifest.pieces]
        assert kinds[-1] == "hidden"
        assert manifest.pieces[kinds.index("draft")].start == 0
        await restored(other, raw)
        assert without(await exported(other, 1), "checkpoint") == without(raw, "checkpoint")
        here, there = await goes_on(home, first), await goes_on(away, first)
        assert there.cached_tokens == len(manifest.tokens)
        assert there.tokens == here.tokens
        assert (there.drafted_tokens, there.accepted_tokens) == (here.drafted_tokens, here.accepted_tokens)
        assert here.drafted_tokens > 0


@pytest.mark.parametrize("given", ["no-head-here", "no-drafts-there"])
async def test_without_them_the_text_is_the_same(tiny_model: Callable[..., SyntheticModel], given: str) -> None:
    model = tiny_model("qwen35", tie_free=True, nextn=True)
    plain = {"slots": 2} if given == "no-head-here" else FIXED
    async with desk_of(model, **FIXED) as (home, desk), desk_of(model, **plain) as (away, other):
        first = await run(home, prompt_of(model, 90), 40, **THREE)
        raw = await exported(desk)
        await restored(other, raw if given == "no-head-here" else without(raw, "draft", "hidden"))
        there = await goes_on(away, first)
        assert there.tokens[len(there.prompt) :] == model.follow(10, 64)
        assert there.cached_tokens > 120
        assert (there.drafted_tokens > 0) == (given == "no-drafts-there")


async def test_wrong_drafts_pieces_are_refused_or_left_out(tiny_model: Callable[..., SyntheticModel]) -> None:
    model = tiny_model("qwen35", tie_free=True, nextn=True)
    async with desk_of(model, **FIXED) as (home, desk), desk_of(model, **FIXED) as (away, other):
        first = await run(home, prompt_of(model, 90), 40, **THREE)
        raw = await exported(desk)
        with pytest.raises(StateInvalid, match="lacks pieces"):
            await restored(other, without(raw, "hidden"))
        with pytest.raises(StateInvalid, match="cannot stand there"):
            await restored(other, without(raw, "part"))
        manifest, pieces = opened(raw)
        draft = next(piece for piece in manifest.pieces if piece.kind == "draft")
        smaller = replace(draft, size_bytes=draft.size_bytes - 1)  # as of another build: of no use here, and no error
        at = sum(32 + p.size_bytes for p in manifest.pieces[: manifest.pieces.index(draft)])
        body = pieces[at + 32 : at + 31 + draft.size_bytes]
        other_size = pieces[:at] + digest_of(body) + body + pieces[at + 32 + draft.size_bytes :]
        changed = replace(manifest, pieces=tuple(smaller if p == draft else p for p in manifest.pieces))
        await restored(other, stream_head(changed) + other_size)
        there = await goes_on(away, first)
        assert there.tokens[len(there.prompt) :] == model.follow(10, 64)
        assert there.drafted_tokens == there.accepted_tokens > 0
