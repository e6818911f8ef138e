"""Prompts with images through the core: the right text, and what is reused, shared, put away and cancelled of them."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from engines.errors import DecodeFailed
from engines.runtime.core import EngineCore
from engines.runtime.generation import Generation
from engines.runtime.llama import Batch, Llama
from engines.runtime.media_projector import Projector, bindings
from engines.runtime.media_prompt import MediaPrompt, assemble, new_marker
from engines.runtime.media_span import SpanMap
from engines.runtime.prefix import PrefixCache
from engines.runtime.sampler import log_probabilities
from tests.engines.runtime.test_core import GREEDY, finished, generation, running
from tests.engines.runtime.test_media_projector import config_of, digest, image
from tests.paced_engine import slow_steps
from tests.synthetic_gguf import SyntheticModel

Models = Callable[..., SyntheticModel]
KINDS = ("qwen35", "gemma3")
SYSTEM = "<|im_start|>system\nYou look at pictures and say what they show.<|im_end|>\n"
OPENING = "<|im_start|>assistant\n"


def seeing(model: SyntheticModel, projector: Path, **settings: Any) -> AbstractAsyncContextManager[EngineCore]:
    values = {"batch_tokens": 64, "micro_batch_tokens": 64, "projector_path": str(projector), "context_tokens": 1024}
    return running(model, **{**values, **settings})


def asked(core: EngineCore, *shown: str | np.ndarray) -> MediaPrompt:
    """A conversation's prompt out of texts and images, one after another."""
    assert core.llama is not None
    assert core.projector is not None
    marker = new_marker()
    text = "".join(piece if isinstance(piece, str) else marker for piece in shown)
    images = [piece for piece in shown if not isinstance(piece, str)]
    parts = [core.projector.parts(i, digest(i.tobytes()), 900, "messages") for i in images]
    return assemble(text, marker, parts, core.llama.vocabulary, add_special=True)


def question(*shown: str | np.ndarray) -> Sequence[str | np.ndarray]:
    return (SYSTEM, "<|im_start|>user\n", *shown, "<|im_end|>\n", OPENING)


def work_of(prompt: MediaPrompt, count: int = 20, **fields: Any) -> Generation:
    return generation(prompt.tokens, count, spans=prompt.spans, **fields)


async def run(core: EngineCore, prompt: MediaPrompt, count: int = 20, **fields: Any) -> Generation:
    work = work_of(prompt, count, **fields)
    core.submit(work)
    last = await finished(work)
    assert last.error is None
    return work


def answer(work: Generation) -> list[int]:
    return work.tokens[len(work.prompt) :]


def opening_at(core: EngineCore, prompt: MediaPrompt) -> int:
    """Where the answer's opening begins, which is where a template's cut lies."""
    assert core.llama is not None
    return len(prompt.tokens) - len(core.llama.vocabulary.tokenize(OPENING, add_special=False, parse_special=True))


def by_libmtmds_helper(
    llama: Llama, projector: Projector, images: list[np.ndarray], text: str, count: int
) -> tuple[list[int], list[float]]:
    """The greedy answer as libmtmd's own evaluation has it, and its log probabilities; `text` has its markers."""
    mtmd = bindings()
    bitmaps = (ctypes.c_void_p * len(images))(
        *(
            mtmd.mtmd_bitmap_init(i.shape[1], i.shape[0], i.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)))
            for i in images
        )
    )
    chunks = mtmd.mtmd_input_chunks_init()
    written = mtmd.mtmd_input_text(text.encode(), len(text.encode()), True, True)
    assert mtmd.mtmd_tokenize(projector._context, chunks, ctypes.byref(written), bitmaps, len(images)) == 0
    end = llama_cpp.llama_pos()
    arguments = (llama.context, chunks, 0, 0, 64, True, ctypes.byref(end))
    assert mtmd.mtmd_helper_eval_chunks(projector._context, *arguments) == 0
    mtmd.mtmd_input_chunks_free(chunks)
    for bitmap in bitmaps:
        mtmd.mtmd_bitmap_free(bitmap)
    logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(llama.context, -1), (llama.vocabulary.size,))
    batch, drawn, logprobs = Batch(1), [int(logits.argmax())], [float(log_probabilities(logits).max())]
    while len(drawn) < count:
        batch.clear()
        batch.add(0, end.value + len(drawn) - 1, [drawn[-1]], outputs=1)
        assert llama.decode(batch) == 0
        drawn.append(int(llama.logits(0).argmax()))
        logprobs.append(float(log_probabilities(llama.logits(0)).max()))
    llama.clear(0)
    return drawn, logprobs


async def greedy(core: EngineCore, shown: Sequence[str | np.ndarray], count: int) -> tuple[list[int], list[float]]:
    prompt = asked(core, *shown)
    work = work_of(prompt, count, params=replace(GREEDY, top_logprobs=0))
    core.submit(work)
    last = await finished(work)
    return answer(work), [found.logprob for found in last.logprobs]


@pytest.mark.parametrize("kind", KINDS)
async def test_the_answer_is_that_of_libmtmds_own_evaluation(tiny_model: Models, projectors: Path, kind: str) -> None:
    model, projector_path = tiny_model(kind), projectors / f"{kind}.gguf"
    shown = question(image(128, 96), " and ", image(64, 300, 1), " differ?")
    swapped = question(image(64, 300, 1), " and ", image(128, 96), " differ?")
    async with seeing(model, projector_path, slots=1) as core:
        tokens, logprobs = await greedy(core, shown, 24)
        others = [await greedy(core, other, 1) for other in (swapped, [p for p in shown if isinstance(p, str)])]
    llama = Llama(config_of(model.path, projector_path, slots=1, context_tokens=1024), 1, lambda _share: None)
    try:
        projector = Projector(config_of(model.path, projector_path), llama.model, 1)
        marker = bindings().mtmd_default_marker().decode()
        text = "".join(piece if isinstance(piece, str) else marker for piece in shown)
        images = [piece for piece in shown if not isinstance(piece, str)]
        expected, expected_logprobs = by_libmtmds_helper(llama, projector, images, text, 24)
        projector.close()
    finally:
        llama.close()
    assert tokens == expected
    np.testing.assert_allclose(logprobs, expected_logprobs, atol=1e-3)

    for _, (logprob,) in others:
        assert abs(logprob - logprobs[0]) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
async def test_an_image_is_reused_as_a_whole_and_another_one_is_not(
    tiny_model: Models, projectors: Path, kind: str
) -> None:
    model, projector = tiny_model(kind), projectors / f"{kind}.gguf"
    first, second = image(128, 96), image(128, 96, 1)
    async with seeing(model, projector, slots=1) as core:
        prompt = asked(core, *question(first, " what is it?"))
        begin, cut = prompt.spans.placed[0].start, opening_at(core, prompt)
        once = await run(core, prompt, cuts=[begin, cut])
        again = await run(core, prompt, cuts=[begin, cut])
        longer = MediaPrompt([*once.tokens, 5, 6, 10], prompt.spans, prompt.ends)
        turn = await run(core, longer, cuts=[begin, cut])
        edited = await run(core, asked(core, *question(second, " what is it?")), cuts=[begin, cut])
    assert once.cached_tokens == 0
    assert again.tokens == once.tokens
    # A hybrid goes on at the cut behind the image; a dense model leaves just the last token.
    assert again.cached_tokens == (cut if kind == "qwen35" else len(prompt.tokens) - 1)
    assert edited.cached_tokens == begin
    assert answer(edited) != answer(once)
    assert turn.cached_tokens == len(once.tokens) - 1
    async with seeing(model, projector, slots=1) as core:
        cold = await run(core, asked(core, *question(second, " what is it?")), cuts=[begin])
        assert answer(cold) == answer(edited)
        cold = await run(core, longer, cuts=[turn.cached_tokens], reuse_prefix=False)
        assert answer(cold) == answer(turn)


@pytest.mark.parametrize("kind", KINDS)
async def test_images_and_text_run_side_by_side(tiny_model: Models, projectors: Path, kind: str) -> None:
    model = tiny_model(kind, tie_free=True)
    async with seeing(model, projectors / f"{kind}.gguf", slots=4) as core:
        works = []
        for i in range(9):
            shown = (image(64 + 32 * i, 96, i), "both ", image(200, 100, i)) if i % 2 else ("no image " * i,)
            works.append(work_of(asked(core, *question(*shown, f"number {i}")), 30))
        core.submit(*works)
        for work in works:
            assert (await finished(work)).finish_reason == "length"
            assert answer(work) == model.follow(work.prompt[-1], 30)
        assert_nothing_leaked(core)


def until_idle(cache: PrefixCache) -> Generator[None, None, None]:
    while any(not slot.idle for slot in cache.slots):
        yield


def assert_nothing_leaked(core: EngineCore) -> None:
    held = [slot.sequence.cells for slot in core.cache.slots] + [c.sequence.cells for c in core.cache.checkpoints]
    assert core.cache.ledger.free == core.cache.ledger.count - core.cache.ledger.distinct(held)
    assert all(slot.idle for slot in core.cache.slots)
    assert core.llama is not None
    for slot in core.cache.slots:
        sequence = slot.sequence
        assert core.llama.last_position(sequence.index) == sequence.next_position - 1


@pytest.mark.parametrize("kind", KINDS)
async def test_a_cancel_inside_an_image_leaves_nothing_of_it(tiny_model: Models, projectors: Path, kind: str) -> None:
    model, projector = tiny_model(kind), projectors / f"{kind}.gguf"
    # Gemma's spans go as a whole, so there a cancel comes between them.
    shown = [image(600, 500, 1)] if kind == "qwen35" else [image(64, 64, i) for i in range(12)]
    inside = 0
    async with seeing(model, projector, slots=2, batch_tokens=16, micro_batch_tokens=16) as core:
        prompt = asked(core, *question("look: ", *shown, " what is it?"))
        expected = answer(await run(core, prompt, reuse_prefix=False))
        for _ in range(4):
            work = work_of(prompt, reuse_prefix=False, wants_progress=True)
            done = 0
            with slow_steps():
                core.submit(work)
                while done < prompt.spans.placed[0].start + 16:
                    for piece in await work.mailbox.take(5.0):
                        done = max(done, piece.prompt_done_tokens or 0)
                core.cancel(work)
            inside += done < prompt.spans.placed[-1].end
            async with asyncio.timeout(20):
                await core.perform(until_idle)
            assert_nothing_leaked(core)
            again = await run(core, prompt)
            assert answer(again) == expected
    assert inside


@pytest.mark.parametrize("kind", KINDS)
async def test_only_the_faulty_one_ends(tiny_model: Models, projectors: Path, kind: str) -> None:
    model = tiny_model(kind, tie_free=True)
    async with seeing(model, projectors / f"{kind}.gguf", slots=4) as core:
        prompt = asked(core, *question(image(200, 100), "what is it?"))
        entry = prompt.spans.placed[0]
        # llama.cpp refuses positions before those that are there, and tokens that do not exist.
        back = replace(entry.span, moves=np.zeros_like(entry.span.moves), offsets=np.zeros_like(entry.span.offsets))
        no_span = replace(prompt, spans=SpanMap([replace(entry, span=back)]))
        no_token = replace(prompt, tokens=[*prompt.tokens[:-1], 1 << 20, 10])
        right = [work_of(prompt, 40), work_of(asked(core, *question("no image", image(96, 96))), 40)]
        wrong = [work_of(no_span, 40, reuse_prefix=False), work_of(no_token, 40)]
        core.submit(right[0], wrong[0], right[1], wrong[1])
        for work in wrong:
            assert isinstance((await finished(work)).error, DecodeFailed)
        for work in right:
            await finished(work)
            assert answer(work) == model.follow(10, 40)
        assert_nothing_leaked(core)
        assert answer(await run(core, prompt)) == model.follow(10, 20)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_conversation_with_an_image_comes_back_from_host_memory(
    tiny_model: Models, projectors: Path, kind: str
) -> None:
    model, projector = tiny_model(kind), projectors / f"{kind}.gguf"
    async with seeing(model, projector, slots=1, checkpoints=0) as core:
        prompt = asked(core, *question(image(128, 96), "long enough to be kept " * 4))
        once = await run(core, prompt)
        await run(core, asked(core, SYSTEM[::-1], "of something else", OPENING))
        longer = MediaPrompt([*once.tokens, 5, 6, 10], prompt.spans, prompt.ends)
        back = await run(core, longer)
        assert back.cached_tokens == len(once.tokens) - 1
        cold = await run(core, longer, reuse_prefix=False, cuts=[back.cached_tokens])
        assert answer(back) == answer(cold)


@pytest.mark.parametrize("kind", KINDS)
async def test_whoever_gives_way_computes_its_images_again(tiny_model: Models, projectors: Path, kind: str) -> None:
    model = tiny_model(kind, tie_free=True)
    settings = {"slots": 4, "context_tokens": 256, "cache_tokens": 320, "host_cache_bytes": 0, "checkpoints": 1}
    async with seeing(model, projectors / f"{kind}.gguf", **settings) as core:
        works = [work_of(asked(core, f"{i}: ", image(96, 96, i), "?"), 100) for i in range(5)]
        core.submit(*works)
        for work in works:
            await finished(work)
            assert answer(work) == model.follow(work.prompt[-1], 100)
        assert sum(work.preemptions for work in works) > 0
        assert_nothing_leaked(core)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_prompt_that_begins_alike_waits_for_the_image_and_shares_it(
    tiny_model: Models, projectors: Path, kind: str
) -> None:
    model, projector = tiny_model(kind), projectors / f"{kind}.gguf"
    async with seeing(model, projector, slots=3, batch_tokens=16, micro_batch_tokens=16) as core:
        shown = ("look: ", *(image(200, 300, i) for i in range(3)))
        prompts = [asked(core, *question(*shown, f" question {i}")) for i in range(3)]
        works = [work_of(prompt) for prompt in prompts]
        core.submit(*works)
        for work in works:
            assert (await finished(work)).finish_reason == "length"
        behind = prompts[0].spans.placed[-1].end
        assert sum(work.cached_tokens >= behind for work in works) == 2


@pytest.mark.parametrize("speculation", ["mtp", "lookup"])
async def test_drafts_go_on_behind_an_image(tiny_model: Models, projectors: Path, speculation: str) -> None:
    model = tiny_model("qwen35", tie_free=True, nextn=True)
    settings = {"slots": 2, "speculation": speculation}
    async with seeing(model, projectors / "qwen35.gguf", **settings) as core:
        prompts = [asked(core, *question(image(128, 96, i), "say it twice ", image(64, 64), "say it")) for i in (1, 2)]
        works = [work_of(prompts[0], 60), work_of(prompts[1], 60), work_of(prompts[0], 60, draft_min=3)]
        works.append(work_of(asked(core, *question("no image at all")), 60))
        core.submit(*works)
        for work in works:
            await finished(work)
            assert answer(work) == model.follow(work.prompt[-1], 60)
        if speculation == "mtp":
            assert sum(work.accepted_tokens for work in works) > 0
        again = await run(core, prompts[0], 60, draft_min=3)
        assert answer(again) == model.follow(again.prompt[-1], 60)
        assert_nothing_leaked(core)
