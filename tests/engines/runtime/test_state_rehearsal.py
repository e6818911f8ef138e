"""What a target tries before a conversation's last part has come: its first step finds a graph, and nothing of the try stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import llama_cpp
import pytest

from engines.runtime.core import EngineCore
from engines.runtime.generation import Generation as Work
from engines.runtime.prefix import PrefixCache
from engines.runtime.sampler import SamplingParams
from engines.runtime.state_adopt import Adopting, adopting
from engines.runtime.state_follow import Leaving
from engines.runtime.state_rehearsal import rehearsed
from engines.runtime.state_together import commit_together, rehearse_together
from tests.engines.runtime.test_core import finished, generation, prompt_of
from tests.engines.runtime.test_state_desk import desk_of
from tests.engines.runtime.test_state_follow import (
    FENCE,
    SAMPLED,
    SETTINGS,
    begun,
    delivery_of,
    endless,
    followed,
    gone_on,
    left_alone,
    rest_of,
    stopped,
    text_until,
)
from tests.paced_engine import slow_steps
from tests.synthetic_gguf import SyntheticModel

GREEDY = SamplingParams(temperature=0)
DRAFTS: dict[str, Any] = {"speculation": "mtp", "draft_tokens": 3}


class Steps:
    """Calls of llama_decode on one context: whether each found its graph made."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self.found: list[bool] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        decode = llama_cpp.llama_decode

        def watched(context: Any, batch: Any) -> int:
            before = self._reused if context == self._context else 0
            status = int(decode(context, batch))
            if context == self._context:
                self.found.append(self._reused > before)
            return status

        llama_cpp.llama_decode = watched
        try:
            yield
        finally:
            llama_cpp.llama_decode = decode

    @property
    def _reused(self) -> int:
        return int(llama_cpp.llama_perf_context(self._context).n_reused)


async def states(core: EngineCore) -> list[bytes]:
    """Of all sequences."""

    def look(cache: PrefixCache) -> Any:
        yield from ()
        places = [*cache.slots, *cache.checkpoints]
        sequences = [*(place.sequence for place in places), *cache.scratch]
        return [core.loaded.export_state(one.index).tobytes() for one in sequences]

    return list(await core.perform(look))


async def tried(core: EngineCore, slot_id: int, rows: int) -> bool:
    def work(cache: PrefixCache) -> Any:
        yield from ()
        assert core.codec is not None
        return rehearsed(cache, core.codec, core.loaded, [cache.slots[slot_id]], 0, rows, 1)

    return bool(await core.perform(work))


async def sent(leaving: Leaving, arriving: Adopting, work: Work) -> None:
    """All that can go before the stop."""
    await followed(leaving, arriving, work)
    exported = await leaving.begun_block()
    assert exported is not None
    await arriving.begin(delivery_of(exported), work.tokens[exported.piece.start : exported.piece.end])
    await arriving.settled()
    assert leaving.sent_tokens == exported.piece.end == len(arriving.tokens)


@pytest.mark.parametrize(
    ("architecture", "params", "settings"),
    [
        ("llama", SAMPLED, {}),
        ("llama", SAMPLED, {"sampling": "backend"}),
        ("gemma3", GREEDY, {"full_window": True}),
        ("gemma3", GREEDY, {}),
        ("qwen35", SAMPLED, {"sampling": "backend"}),
        ("qwen35moe", GREEDY, {}),
        ("qwen35moe", GREEDY, DRAFTS),
    ],
)
async def test_a_first_step_that_was_tried_finds_its_graph_and_writes_the_same(
    tiny_model: Callable[..., SyntheticModel],
    slow: ExitStack,
    architecture: str,
    params: SamplingParams,
    settings: dict[str, Any],
) -> None:
    drafts = "speculation" in settings
    model = tiny_model(architecture, **({"nextn": True, "tie_free": True} if drafts else {}))
    fields: dict[str, Any] = {"draft_min": 3} if drafts else {}
    values = SETTINGS | settings
    async with desk_of(model, **values) as (home, desk), desk_of(model, **values) as (away, other):
        alone, _ = await left_alone(home, model, params, **fields)
        terms, theirs = await desk.terms(), await other.terms()
        for tries in (False, True):
            # Somebody's prompt was the last step there, and lies in its slot.
            other_work = generation(prompt_of(model, 60), 1, reuse_prefix=False)
            away.submit(other_work)
            await finished(other_work)
            work, steps = endless(home, model, params, **fields), Steps(away.loaded.context)
            slow.enter_context(slow_steps())
            await begun(home, work, 112)
            async with Leaving(home, terms, work, FENCE) as leaving, await adopting(theirs, away, 1, 800) as arriving:
                await sent(leaving, arriving, work)
                before = await states(away)
                if tries:
                    with steps.watched():
                        assert not await rehearse_together([arriving], 1 + fields.get("draft_min", 0))
                    assert await states(away) == before
                    # Those of a window come with the last part, so that nothing like it can be tried before.
                    assert (steps.found == []) == away.loaded.forgets_window
                manifest = await stopped(leaving)
                slow.close()
                await rest_of(leaving, arriving, manifest)
                steps.found.clear()
                with steps.watched():
                    moved = await gone_on(arriving, manifest, away)
                    await commit_together([leaving], FENCE)
                    await finished(moved)
            assert moved.tokens == alone.tokens
            assert steps.found[0] == (tries and not away.loaded.forgets_window)
            assert sum(steps.found) > len(steps.found) // 2


@pytest.mark.parametrize(("architecture", "settings"), [("llama", {}), ("qwen35", {"sampling": "backend"})])
async def test_what_the_source_writes_meanwhile_does_not_make_the_first_step_another_one(
    tiny_model: Callable[..., SyntheticModel], slow: ExitStack, architecture: str, settings: dict[str, Any]
) -> None:
    model, values = tiny_model(architecture), SETTINGS | settings
    async with desk_of(model, **values) as (home, desk), desk_of(model, **values) as (away, other):
        alone, _ = await left_alone(home, model)
        terms, theirs = await desk.terms(), await other.terms()
        work, steps = endless(home, model), Steps(away.loaded.context)
        slow.enter_context(slow_steps())
        # A window of 256 cells is nearly full, and is when the generation has stopped.
        await begun(home, work, 248)
        async with Leaving(home, terms, work, FENCE) as leaving, await adopting(theirs, away, 1, 800) as arriving:
            await sent(leaving, arriving, work)
            with steps.watched():
                later = await rehearse_together([arriving], 1)
            assert (later, steps.found) == (256 - leaving.sent_tokens, [])
            await text_until(work, leaving.sent_tokens + later + 1)
            await sent(leaving, arriving, work)
            assert not await rehearse_together([arriving], 1)
            manifest = await stopped(leaving)
            slow.close()
            assert manifest.count >= 256
            await rest_of(leaving, arriving, manifest)
            with steps.watched():
                moved = await gone_on(arriving, manifest, away)
                await commit_together([leaving], FENCE)
                await finished(moved)
        assert steps.found[0]
        assert moved.tokens == alone.tokens


@pytest.mark.parametrize("architecture", ["llama", "qwen35"])
async def test_a_move_that_fails_behind_its_try_leaves_the_target_as_it_was(
    tiny_model: Callable[..., SyntheticModel], slow: ExitStack, architecture: str
) -> None:
    model = tiny_model(architecture)
    async with desk_of(model, **SETTINGS) as (home, desk), desk_of(model, **SETTINGS) as (away, other):
        alone, _ = await left_alone(home, model)
        before, free = await states(away), away.cache.ledger.free
        work, terms, theirs = endless(home, model), await desk.terms(), await other.terms()
        slow.enter_context(slow_steps())
        await begun(home, work, 150)
        for gets_rest in (False, True):
            with pytest.raises(ConnectionError):
                async with (
                    Leaving(home, terms, work, FENCE) as leaving,
                    await adopting(theirs, away, 0, 800) as arriving,
                ):
                    await sent(leaving, arriving, work)
                    await rehearse_together([arriving], 1)
                    # A step larger than any batch would end the process.
                    assert not await tried(away, arriving.slot_id, away.loaded.batch_tokens + 1)
                    if gets_rest:
                        await rest_of(leaving, arriving, await stopped(leaving))
                    raise ConnectionError
            assert await states(away) == before
            assert (away.cache.ledger.free, away.cache.promised_cells()) == (free, 0)
        slow.close()
        assert (await finished(work)).finish_reason == "length"
        assert work.tokens == alone.tokens
        # A place for a recurrent state that was not given back would be missing now.
        others = [generation(prompt_of(model, 30 + one), 4, reuse_prefix=False) for one in range(4)]
        away.submit(*others)
        assert [(await finished(one)).finish_reason for one in others] == ["length"] * 4


async def test_where_others_write_nothing_is_tried(tiny_model: Callable[..., SyntheticModel], slow: ExitStack) -> None:
    model = tiny_model("qwen35", tie_free=True)
    async with desk_of(model, **SETTINGS) as (home, desk), desk_of(model, **SETTINGS) as (away, other):
        alone, _ = await left_alone(home, model)
        neighbour, work = endless(away, model), endless(home, model)
        terms, theirs = await desk.terms(), await other.terms()
        slow.enter_context(slow_steps())
        await begun(home, work, 150)
        await begun(away, neighbour, 110)
        steps = Steps(away.loaded.context)
        async with Leaving(home, terms, work, FENCE) as leaving, await adopting(theirs, away, 1, 800) as arriving:
            await sent(leaving, arriving, work)
            asked_at = neighbour.new_tokens
            with steps.watched():
                await rehearse_together([arriving], 1)
            # A step between, at most.
            written = neighbour.new_tokens - asked_at
            manifest = await stopped(leaving)
            await rest_of(leaving, arriving, manifest)
            moved = await gone_on(arriving, manifest, away)
            await commit_together([leaving], FENCE)
        slow.close()
        await finished(moved)
        await finished(neighbour)
        assert len(steps.found) <= written + 1
        assert moved.tokens == alone.tokens == neighbour.tokens
