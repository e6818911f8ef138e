"""A windowed conversation that goes to another engine can be cut back there as at home: for as long as it lasts, one window."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engines.runtime.core import EngineCore
from engines.runtime.prefix import PrefixCache
from engines.runtime.sampler import SamplingParams
from engines.runtime.state_adopt import adopting
from engines.runtime.state_codec import StateCodec
from engines.runtime.state_desk import StateDesk
from engines.runtime.state_follow import Leaving, commit_together
from engines.runtime.state_snapshot import Manifest
from tests.engines.runtime.test_core import finished, generation, prompt_of, run
from tests.engines.runtime.test_state_codec import done
from tests.engines.runtime.test_state_desk import desk_of, exported, opened, restored
from tests.engines.runtime.test_state_follow import (
    FENCE,
    begun,
    delivery_of,
    followed,
    gone_on,
    rest_of,
    stopped,
)
from tests.paced_engine import slow_steps
from tests.synthetic_gguf import SyntheticModel

WINDOW, PROMPT, ANSWER = 64, 180, 20
# The last token drawn has no state.
HELD = PROMPT + ANSWER - 1
CUT = HELD - WINDOW


async def talked(core: EngineCore, desk: StateDesk, model: SyntheticModel) -> tuple[list[int], bytes]:
    """A conversation's tokens, and its state as it leaves."""
    work = await run(core, prompt_of(model, PROMPT), ANSWER)
    return work.tokens[:HELD], await exported(desk)


def first_position(slot: int) -> Callable[[PrefixCache, StateCodec], int]:
    return lambda cache, codec: cache.slots[slot].sequence.llama.first_position(cache.slots[slot].sequence.index)


@pytest.mark.parametrize("back", [CUT, HELD - 5])
async def test_the_next_turn_branches_off_before_the_end_as_at_home(
    tiny_model: Callable[..., SyntheticModel], back: int
) -> None:
    model = tiny_model("gemma3")
    async with desk_of(model) as (core, home), desk_of(model) as (other, away):
        tokens, raw = await talked(core, home, model)
        kinds = [(piece.kind, piece.end) for piece in opened(raw)[0].pieces]
        assert kinds[-2:] == [("part", HELD), ("checkpoint", CUT)]
        assert await restored(away, raw) == "exact"
        turn = [*tokens[:back], 9, 9, 10]
        moved, stayed = await run(other, turn, 40), await run(core, turn, 40)
        assert (moved.cached_tokens, moved.tokens) == (back, stayed.tokens)
        assert stayed.cached_tokens == back


async def test_what_would_need_more_than_came_is_computed_anew(tiny_model: Callable[..., SyntheticModel]) -> None:
    model = tiny_model("gemma3")
    async with desk_of(model) as (core, home), desk_of(model) as (other, away):
        tokens, raw = await talked(core, home, model)
        await restored(away, raw)
        turn = [*tokens[: CUT - 1], 9, 9, 10]
        moved, cold = await run(other, turn, 40), await run(core, turn, 40, reuse_prefix=False)
        assert (moved.cached_tokens, moved.tokens) == (0, cold.tokens)


async def test_what_leaves_of_the_window_gives_its_cells_back(tiny_model: Callable[..., SyntheticModel]) -> None:
    model = tiny_model("gemma3")
    async with desk_of(model) as (core, home), desk_of(model) as (other, away):
        _, raw = await talked(core, home, model)
        assert await exported(home) == raw, "what is there only to leave is gone again"
        await restored(away, raw)
        assert await done(other, first_position(1)) == CUT - WINDOW
        for one in (core, other):
            free = one.cache.ledger.count - HELD
            assert one.cache.ledger.free == free
            assert all(not len(place.sequence) and not place.leaving for place in one.cache.window_places)


@pytest.mark.parametrize("settings", [{"full_window": False}, {"checkpoints": 0}])
async def test_an_engine_without_a_place_for_it_takes_the_rest(
    tiny_model: Callable[..., SyntheticModel], settings: dict[str, object]
) -> None:
    model = tiny_model("gemma3")
    async with desk_of(model) as (core, home), desk_of(model, **settings) as (other, away):
        tokens, raw = await talked(core, home, model)
        await restored(away, raw)
        assert await done(other, first_position(1)) == CUT
        # And further on: with its last window only.
        onward = opened(await exported(away, 1))[0]
        assert [piece.kind for piece in onward.pieces][-1] == "part"
        goes_on = [*tokens, 9, 10]
        moved, stayed = await run(other, goes_on, 20), await run(core, goes_on, 20)
        assert (moved.cached_tokens, moved.tokens) == (HELD, stayed.tokens)


async def test_who_moved_in_the_middle_of_an_answer_can_be_asked_the_same_again(
    tiny_model: Callable[..., SyntheticModel],
) -> None:
    """However far it had come: the answer is shorter than the window."""
    model, window, prompt_tokens, count = tiny_model("gemma3", window_tokens=256), 256, 300, 230
    settings = {"slots": 2, "context_tokens": 1024}
    prompt = prompt_of(model, prompt_tokens)
    async with desk_of(model, **settings) as (core, home), desk_of(model, **settings) as (other, away):
        bias = tuple((token, float("-inf")) for token in core.loaded.vocabulary.end_tokens)
        work = generation(prompt, count, params=SamplingParams(temperature=0, logit_bias=bias))
        terms, theirs = await home.terms(), await away.terms()
        with slow_steps(0.02):
            await begun(core, work, prompt_tokens + 2)
            async with Leaving(core, terms, work, FENCE) as leaving, await adopting(theirs, other, 1, 800) as arriving:
                await followed(leaving, arriving, work)
                (piece,) = await leaving.unsent_cuts()
                exported_cut = await leaving.cut(piece)
                assert exported_cut is not None
                await arriving.begin_cut(delivery_of(exported_cut))
                await followed(leaving, arriving, work)
                manifest = Manifest.from_json((await stopped(leaving)).to_json())
                assert len(manifest.tokens) > window
                await rest_of(leaving, arriving, manifest)
                moved = await gone_on(arriving, manifest, other)
                await commit_together([leaving], FENCE)
        await finished(moved)
        assert all(not len(place.sequence) for one in (core, other) for place in one.cache.window_places)
        again = await run(other, prompt, 40)
        assert again.cached_tokens == prompt_tokens - 1
        assert again.tokens == (await run(core, prompt, 40, reuse_prefix=False)).tokens
