"""A windowed conversation that goes to another engine can be cut back there as at home: for as long as it lasts, one window."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import pytest

from engines.runtime.core import EngineCore
from engines.runtime.prefix import PrefixCache
from engines.runtime.state_adopt import adopting
from engines.runtime.state_codec import StateCodec
from engines.runtime.state_desk import StateDesk
from engines.runtime.state_follow import Leaving
from engines.runtime.state_together import commit_together
from tests.engines.runtime.test_core import finished, prompt_of, run
from tests.engines.runtime.test_state_codec import done
from tests.engines.runtime.test_state_desk import desk_of, exported, opened, restored
from tests.engines.runtime.test_state_follow import (
    FENCE,
    SETTINGS,
    begun,
    endless,
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


def emptied(cache: PrefixCache, _codec: StateCodec) -> None:
    for slot in cache.slots:
        slot.sequence.clear()


async def talked(core: EngineCore, desk: StateDesk, model: SyntheticModel) -> tuple[list[int], bytes]:
    """A conversation's tokens, and its state as it leaves."""
    work = await run(core, prompt_of(model, PROMPT), ANSWER)
    return work.tokens[:HELD], await exported(desk)


def first_position(slot: int) -> Callable[[PrefixCache, StateCodec], int]:
    return lambda cache, codec: cache.slots[slot].sequence.llama.first_position(cache.slots[slot].sequence.index)


async def test_the_next_turn_branches_off_before_the_end_as_at_home(tiny_model: Callable[..., SyntheticModel]) -> None:
    model = tiny_model("gemma3")
    async with desk_of(model) as (core, home), desk_of(model) as (other, away):
        tokens, raw = await talked(core, home, model)
        kinds = [(piece.kind, piece.end) for piece in opened(raw)[0].pieces]
        assert kinds[-2:] == [("part", HELD), ("checkpoint", CUT)]
        assert await exported(home) == raw, "what is there only to leave is gone again"
        for slot, back in enumerate((HELD - 5, CUT, CUT - 1)):
            # Where it needs more than came it is computed anew.
            cached = back if back >= CUT else 0
            assert await restored(away, raw, slot, erase_existing=True) == "exact"
            assert await done(other, first_position(slot)) == CUT - WINDOW
            turn = [*tokens[:back], 9 + slot, 9, 10]
            moved = await run(other, turn, 40)
            alone = await run(core, turn, 40, reuse_prefix=False)
            assert (moved.cached_tokens, moved.tokens) == (cached, alone.tokens)
            await done(other, emptied)
        for one in (core, other):
            assert all(not len(place.sequence) and not place.leaving for place in one.cache.window_places)
        assert other.cache.ledger.free == other.cache.ledger.count


@pytest.mark.parametrize("settings", [{"full_window": False}, pytest.param({"checkpoints": 0}, marks=pytest.mark.soak)])
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


async def test_what_moved_while_it_ran_branches_off_behind_its_stop(
    tiny_model: Callable[..., SyntheticModel], slow: ExitStack
) -> None:
    model = tiny_model("gemma3", tie_free=True)
    async with desk_of(model, **SETTINGS) as (core, home), desk_of(model, **SETTINGS) as (other, away):
        work = endless(core, model, session="s")
        slow.enter_context(slow_steps())
        await begun(core, work, 200)
        ours, theirs = await home.terms(), await away.terms()
        async with Leaving(core, ours, work, FENCE) as leaving, await adopting(theirs, other, 1, 800) as arriving:
            await followed(leaving, arriving, work)
            manifest = await stopped(leaving)
            slow.close()
            await rest_of(leaving, arriving, manifest)
            moved = await gone_on(arriving, manifest, other)
            await commit_together([leaving], FENCE)
        await finished(moved)
        stop = manifest.count
        assert await done(other, first_position(1)) == stop - WINDOW
        for back, cached in ((stop - 1, 0), (len(moved.tokens) - 5, len(moved.tokens) - 5), (stop, stop)):
            turn = [*moved.tokens[:back], 9, 10]
            again = await run(other, turn, 20)
            alone = await run(core, turn, 20, reuse_prefix=False)
            assert (again.cached_tokens, again.tokens) == (cached, alone.tokens)
