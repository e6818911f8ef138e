"""Drafts change how fast an answer comes, never the answer."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engines.runtime.core import EngineCore
from engines.runtime.draft_length import Acceptance, DraftLength
from engines.runtime.prompt_lookup import SLICE_TOKENS, WINDOW_TOKENS, RunIndex
from engines.runtime.sampler import SamplingParams
from tests.engines.runtime.test_core import finished, generation, prompt_of, run, running
from tests.synthetic_gguf import SyntheticModel

HYBRIDS = ("qwen35", "qwen35moe")
ModelWriter = Callable[..., SyntheticModel]
FIXED: dict[str, Any] = {"speculation": "mtp", "draft_tokens": 3}
THREE: dict[str, Any] = {"draft_min": 3}


def drafts_of(work: Any) -> tuple[int, int]:
    return work.drafted_tokens, work.accepted_tokens


def expect_cheap_drafts(core: EngineCore) -> DraftLength:
    """What this machine would measure depends on what else it does."""
    assert core.speculation is not None
    length = core.speculation.length
    for rows in range(1, 9):
        length.steps.expect(rows, 1 + rows / 100)
    return length


@pytest.mark.parametrize("sampling", ["host", "backend"])
@pytest.mark.parametrize("architecture", HYBRIDS)
async def test_right_drafts_are_all_accepted(tiny_model: ModelWriter, architecture: str, sampling: str) -> None:
    model = tiny_model(architecture, tie_free=True, nextn=True)
    async with running(model, **FIXED, sampling=sampling) as core:
        work = await run(core, prompt_of(model, 50), 41, **THREE)
        assert work.tokens[50:] == model.follow(10, 41)
        drafted, accepted = drafts_of(work)
        assert drafted == accepted == 30  # a first token, then four a step


@pytest.mark.parametrize("least", [3, 0], ids=["fixed", "auto"])
@pytest.mark.parametrize("architecture", HYBRIDS)
async def test_wrong_drafts_leave_no_trace(tiny_model: ModelWriter, architecture: str, least: int) -> None:
    model = tiny_model(architecture, tie_free=True, nextn=True, wrong_drafts=0.4)
    async with running(model, speculation="auto") as core:
        expect_cheap_drafts(core)
        work = await run(core, prompt_of(model, 50), 120, draft_min=least)
        assert work.tokens[50:] == model.follow(10, 120)
        drafted, accepted = drafts_of(work)
        assert 0 < accepted < drafted


async def wild_eight(core: EngineCore, model: SyntheticModel) -> None:
    """Eight that come one after another, have unequal prompts and answers, and of which two are cancelled on the way."""
    works = []
    for index in range(8):
        prompt, count = prompt_of(model, 20 + 13 * index, start=index), 30 + 7 * index
        works.append(generation(prompt, count, **THREE))
        core.submit(works[-1])
        await asyncio.sleep(0.01)
    for index in (2, 5):
        core.cancel(works[index])
    for index, work in enumerate(works):
        if index not in (2, 5):
            last = await finished(work)
            assert last.error is None
            assert work.tokens[len(work.prompt) :] == model.follow(10, work.max_new_tokens)


@pytest.mark.parametrize("wrong", [0.0, 0.3])
@pytest.mark.parametrize("architecture", HYBRIDS)
async def test_eight_sequences_that_come_and_go(tiny_model: ModelWriter, architecture: str, wrong: float) -> None:
    model = tiny_model(architecture, tie_free=True, nextn=True, wrong_drafts=wrong)
    async with running(model, **FIXED, slots=6, cache_tokens=2048) as core:
        await wild_eight(core, model)
        assert core.cache.ledger.free == core.cache.ledger.count - core.cache.ledger.distinct(
            s.sequence.cells for s in (*core.cache.slots, *core.cache.checkpoints)
        )


@pytest.mark.parametrize("architecture", HYBRIDS)
async def test_who_comes_later_does_not_wait_until_nobody_drafts(tiny_model: ModelWriter, architecture: str) -> None:
    model = tiny_model(architecture, tie_free=True, nextn=True)
    async with running(model, **FIXED, context_tokens=2048, cache_tokens=4096) as core:
        first = generation(prompt_of(model, 20), 1500, **THREE)
        core.submit(first)
        await first.mailbox.take(10)
        works = [generation(prompt_of(model, 30 + index, start=index), 6, **THREE) for index in range(1, 4)]
        core.submit(*works)
        for work in works:
            assert (await finished(work)).error is None
        assert first.new_tokens < 1500
        core.cancel(first)


async def test_a_head_that_is_off_shows_when_its_drafts_would_pay(tiny_model: ModelWriter) -> None:
    model = tiny_model("qwen35", tie_free=True, nextn=True)
    async with running(model, speculation="auto", context_tokens=2048, cache_tokens=4096) as core:
        length = expect_cheap_drafts(core)
        for _ in range(200):
            length.saw(Acceptance(), 1, 0)
        assert length.prior < 0.05
        work = await run(core, prompt_of(model, 20), 600)
        assert work.tokens[20:] == model.follow(10, 600)
        assert work.accepted_tokens > 0
        assert length.prior > 0.1


async def test_a_full_cache_preempts_with_drafts_as_without(tiny_model: ModelWriter) -> None:
    model = tiny_model("qwen35", tie_free=True, nextn=True)
    async with running(model, **FIXED, cache_tokens=512, checkpoints=2) as core:
        works = [generation(prompt_of(model, 60, start=index), 150, **THREE) for index in range(4)]
        core.submit(*works)
        for work in works:
            assert (await finished(work)).error is None
            assert work.tokens[60:] == model.follow(10, 150)
        assert sum(work.preemptions for work in works) > 0


@pytest.mark.parametrize("architecture", HYBRIDS)
async def test_reuse_carries_the_draft_head_along(tiny_model: ModelWriter, architecture: str) -> None:
    model = tiny_model(architecture, tie_free=True, nextn=True)
    async with running(model, **FIXED, slots=2) as core:
        prompt = prompt_of(model, 96)
        first = await run(core, prompt, 25, cuts=[64], **THREE)
        longer = await run(core, [*first.tokens, 4, 5, 10], 25, **THREE)
        assert longer.cached_tokens >= 96
        assert longer.tokens[len(longer.prompt) :] == model.follow(10, 25)
        edited = await run(core, [*prompt[:64], *range(40, 70), 10], 25, **THREE)
        assert edited.cached_tokens == 64
        assert edited.tokens[len(edited.prompt) :] == model.follow(10, 25)
        again = await run(core, prompt, 25, **THREE)
        assert again.tokens[96:] == model.follow(10, 25)
        for work in (longer, edited, again):
            drafted, accepted = drafts_of(work)
            assert drafted == accepted > 0


async def test_a_stop_string_ends_inside_a_draft(tiny_model: ModelWriter) -> None:
    model = tiny_model("qwen35", tie_free=True, nextn=True)
    whole = model.answer_bytes(60).decode("utf-8", "replace")
    async with running(model, **FIXED) as core:
        for at in (17, 18, 19, 20):
            stop = whole[at : at + 3]
            work = generation(prompt_of(model, 40), 60, stops=(stop,), **THREE)
            core.submit(work)
            last = await finished(work)
            assert (last.text, last.finish_reason) == (whole[: whole.index(stop)], "stop")
        # What the slot kept is what was decoded and drawn, so going on from there is right.
        more = await run(core, [*work.tokens, 10], 20, **THREE)
        assert more.tokens[-20:] == model.follow(10, 20)


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "qwen35"])
async def test_lookup_finds_what_the_text_repeats(tiny_model: ModelWriter, architecture: str) -> None:
    model = tiny_model(architecture, tie_free=True)
    passage = model.follow(10, 60)
    settings: dict[str, Any] = {"speculation": "lookup", "draft_tokens": 4}
    async with running(model, **settings) as core:
        work = await run(core, [10, *passage, *prompt_of(model, 20)], 50, **THREE)
        assert work.tokens[-50:] == model.follow(10, 50)
        assert work.accepted_tokens >= 30
        works = [generation([10, *passage[: 20 * i], *prompt_of(model, 20, start=i)], 40, **THREE) for i in range(4)]
        core.submit(*works)
        for work in works:
            assert (await finished(work)).error is None
            assert work.tokens[-40:] == model.follow(10, 40)


def test_a_long_text_is_read_in_slices_and_not_from_its_beginning() -> None:
    tokens = [*range(10, 16), *range(1000, 1000 + WINDOW_TOKENS), 10, 11, 12, 13]
    index = RunIndex()
    looks = 0
    while index.following(tokens, 2) == [] and looks < 100:
        looks += 1
        tokens.append(1000 + WINDOW_TOKENS - 100 + looks)
    assert index.following(tokens, 2) == [tokens[-1] + 1, tokens[-1] + 2]
    assert looks >= WINDOW_TOKENS // SLICE_TOKENS - 1


async def test_auto_without_a_head_looks_up_and_mtp_without_one_is_refused(tiny_model: ModelWriter) -> None:
    model = tiny_model("llama", tie_free=True)
    async with running(model, speculation="auto") as core:
        work = await run(core, [10, *model.follow(10, 60), *prompt_of(model, 20)], 50, **THREE)
        assert work.tokens[-50:] == model.follow(10, 50)
    with pytest.raises(AssertionError, match="no draft head"):
        async with running(model, speculation="mtp"):
            pass


async def test_drawn_text_keeps_its_distribution(tiny_model: ModelWriter) -> None:
    """Three hundred short answers drawn with and without drafts: a chi-squared test over two of their tokens.

    Some drafts are wrong, so both ways out of a draft are taken.
    """
    model = tiny_model("qwen35", tie_free=True, nextn=True, wrong_drafts=0.3)
    params = [SamplingParams(temperature=2.0, top_k=4, top_p=1.0, min_p=0.0, seed=seed) for seed in range(600)]

    async def counts(settings: dict[str, Any], seeds: slice) -> Counter[tuple[int, ...]]:
        async with running(model, **settings, slots=8, cache_tokens=1024) as core:
            works = [generation(prompt_of(model, 12), 8, params=one, **THREE) for one in params[seeds]]
            for start in range(0, len(works), 50):
                core.submit(*works[start : start + 50])
                for work in works[start : start + 50]:
                    assert (await finished(work)).error is None
            if settings:
                assert sum(work.accepted_tokens for work in works) > 200
            return Counter(work.tokens[-1] % 7 + 7 * (work.tokens[-4] % 3) for work in works)  # type: ignore[misc]

    plain, drafted = await counts({}, slice(0, 300)), await counts(FIXED, slice(300, 600))
    cells = [cell for cell in plain.keys() | drafted.keys() if plain[cell] + drafted[cell] >= 20]
    statistic = sum((plain[c] - drafted[c]) ** 2 / (plain[c] + drafted[c]) for c in cells)
    # For so many degrees of freedom a value this large comes by chance once in ten thousand.
    assert statistic < len(cells) + 4 * (2 * len(cells)) ** 0.5


@pytest.mark.parametrize("architecture", HYBRIDS)
async def test_the_same_seed_draws_the_same_text(tiny_model: ModelWriter, architecture: str) -> None:
    model = tiny_model(architecture, tie_free=True, nextn=True, wrong_drafts=0.3)
    params = SamplingParams(temperature=1.5, top_k=8, seed=7)
    async with running(model) as core:
        plain = await run(core, prompt_of(model, 40), 60, params=params)
    async with running(model, **FIXED) as core:
        drafted = await run(core, prompt_of(model, 40), 60, params=params, **THREE)
    assert drafted.tokens == plain.tokens


@pytest.mark.parametrize("architecture", HYBRIDS)
async def test_the_memory_of_drafts_is_predicted(tiny_model: ModelWriter, architecture: str) -> None:
    model = tiny_model(architecture, nextn=True)
    async with running(model, **FIXED, slots=4) as core:
        report = core.loaded.memory_report
        assert report.error_share("CPU") <= 0.05
        assert report.measured.host.recurrent_bytes > 0
    async with running(model, slots=4) as core:
        plain = core.loaded.memory_report.measured.host
    with_drafts = report.measured.host
    assert with_drafts.recurrent_bytes == pytest.approx(4 * plain.recurrent_bytes, rel=0.01)
    assert with_drafts.kv_bytes > plain.kv_bytes
    assert with_drafts.weights_bytes > plain.weights_bytes


@pytest.mark.parametrize("architecture", ["qwen35", "llama"])
async def test_bounds_of_one_request_are_not_the_others(tiny_model: ModelWriter, architecture: str) -> None:
    """One wants no drafts, one has an answer of two tokens after another; the third gets its own all the same."""
    hybrid = architecture != "llama"
    model = tiny_model(architecture, tie_free=True, **({"nextn": True} if hybrid else {}))
    passage = model.follow(10, 100)
    async with running(model, speculation="auto", draft_tokens=3, cache_tokens=2048) as core:
        expect_cheap_drafts(core)
        none = generation([10, *passage, *prompt_of(model, 20)], 60, draft_max=0, draft_min=3)
        free = generation([10, *passage, *prompt_of(model, 24)], 60)
        core.submit(none, free)
        for count in (2, 2, 2, 1):
            short = await run(core, [10, *passage, *prompt_of(model, 12)], count)
            assert short.tokens[-count:] == model.follow(10, count)
        for work in (none, free):
            assert (await finished(work)).error is None
            assert work.tokens[-60:] == model.follow(10, 60)
        assert drafts_of(none) == (0, 0)
        assert free.accepted_tokens > 20


async def test_a_wish_for_drafts_that_lose_is_no_others(tiny_model: ModelWriter) -> None:
    """Where drafts are always wrong one request asks for them all the same, and gets them once it is alone."""
    model = tiny_model("qwen35", tie_free=True, nextn=True, wrong_drafts=1.0)
    async with running(model, **FIXED, cache_tokens=2048) as core:
        length = expect_cheap_drafts(core)
        for _ in range(300):
            length.saw(Acceptance(), 1, 0)
        other = generation(prompt_of(model, 20, start=2), 30)
        asking = generation(prompt_of(model, 20), 100, **THREE)
        core.submit(other, asking)
        for work, count in ((other, 30), (asking, 100)):
            assert (await finished(work)).error is None
            assert work.tokens[-count:] == model.follow(10, count)
        assert drafts_of(other) == (0, 0)
        assert asking.drafted_tokens > 20


def kept_rows(core: EngineCore) -> list[tuple[list[int], NDArray[np.float32]]]:
    """Tokens and hidden rows of the slots that hold some."""
    holders = [slot.sequence for slot in core.cache.slots if len(slot.sequence)]
    return [(list(holder.tokens), holder.draft.hidden()) for holder in holders if holder.draft is not None]


@pytest.mark.parametrize("architecture", HYBRIDS)
async def test_a_resting_head_keeps_the_hidden_rows_of_what_is_written(
    tiny_model: ModelWriter, architecture: str
) -> None:
    """Those of tokens that three streams write side by side are those of the same tokens read as a prompt."""
    model = tiny_model(architecture, nextn=True)
    async with running(model, **FIXED, batch_tokens=64, micro_batch_tokens=64) as core:
        works = [generation(prompt_of(model, 20, start=i), 31, draft_max=0) for i in range(3)]
        core.submit(*works)
        for work in works:
            assert (await finished(work)).error is None
        written = kept_rows(core)
    assert len(written) == 3
    for tokens, rows in written:
        async with running(model, **FIXED, batch_tokens=64, micro_batch_tokens=64) as core:
            await run(core, tokens, 1)
            ((_, read),) = kept_rows(core)
        assert len(tokens) > 30
        assert rows.shape == read.shape == (len(tokens), read.shape[1])
        assert np.abs(rows - read).max() < 0.01 * read.std()


@pytest.mark.parametrize("architecture", HYBRIDS)
async def test_drafts_are_the_same_however_the_head_is_fed(tiny_model: ModelWriter, architecture: str) -> None:
    """In one call with the draft's first row, or before it in several."""
    model = tiny_model(architecture, nextn=True)
    found = []
    for micro_batch_tokens in (64, 16):
        async with running(model, **FIXED, batch_tokens=64, micro_batch_tokens=micro_batch_tokens) as core:
            work = await run(core, prompt_of(model, 60), 60, **THREE)
            found.append((work.tokens, *drafts_of(work)))
    assert found[0] == found[1]


@pytest.mark.parametrize("architecture", HYBRIDS)
async def test_a_shared_prefix_takes_room_of_the_head_once(tiny_model: ModelWriter, architecture: str) -> None:
    """Four streams of one long prompt, in a cache that holds it once: their heads go on from all of it."""
    model = tiny_model(architecture, tie_free=True, nextn=True)
    settings = {**FIXED, "slots": 4, "cache_tokens": 520, "context_tokens": 400, "batch_tokens": 512}
    async with running(model, **settings, micro_batch_tokens=512) as core:
        assert core.speculation is not None and core.speculation.head is not None
        prompt = prompt_of(model, 300)
        await run(core, prompt, 2, cuts=[300], draft_max=0)
        works = [generation([*prompt, index, 10], 30, **THREE) for index in range(4)]
        core.submit(*works)
        for work in works:
            assert (await finished(work)).error is None
            assert work.tokens[-30:] == model.follow(10, 30)
            assert work.cached_tokens >= 299
        assert sum(work.drafted_tokens for work in works) > 40
        assert core.speculation.head.epoch == 0


async def test_long_drafts_of_few_slots_are_timed_at_the_start(
    tiny_model: ModelWriter, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("llama", tie_free=True)
    async with running(model, speculation="lookup", draft_tokens=16, slots=2) as core:
        assert core.speculation is not None
        assert not core.speculation.length.steps.knows(0)
        assert core.loaded.last_position(0) == -1
    assert "refused in the warm-up" not in caplog.text
