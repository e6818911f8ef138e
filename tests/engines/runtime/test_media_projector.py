"""Projectors: an image's spans, their place in a prompt, and that a model reads them as libmtmd's own helper has it."""

from __future__ import annotations

import asyncio
import base64
import ctypes
import hashlib
import io
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from PIL import Image

from engines.config import EngineConfig
from engines.errors import InvalidRequest, ModelLoadFailed, QueueFull
from engines.runtime import memory
from engines.runtime.llama import Batch, Llama
from engines.runtime.media_batch import SpanBatch
from engines.runtime.media_desk import MediaDesk
from engines.runtime.media_image import ImageFile, image_file
from engines.runtime.media_projector import Projector, bindings
from engines.runtime.media_prompt import MediaPrompt, assemble, new_marker
from engines.runtime.media_span import MediaSpan, PlacedSpan, SpanMap
from tests.synthetic_gguf import SyntheticModel

Models = Callable[..., SyntheticModel]
KINDS = ("qwen35", "gemma3")


def config_of(model: Path, projector: Path, **settings: Any) -> EngineConfig:
    values: dict[str, Any] = {"slots": 2, "context_tokens": 512, "batch_tokens": 64, "micro_batch_tokens": 64}
    return EngineConfig(
        model_path=str(model), model_name="tiny", projector_path=str(projector), **{**values, **settings}
    )


@contextmanager
def loaded(model: SyntheticModel, projector: Path, **settings: Any) -> Iterator[tuple[Llama, Projector]]:
    config = config_of(model.path, projector, **settings)
    llama = Llama(config, 1, lambda _share: None)
    try:
        made = Projector(config, llama.model, 1)
        yield llama, made
        made.close()
    finally:
        llama.close()


def image(width: int, height: int, seed: int = 0) -> np.ndarray:
    """Nine fields of any colours: noise would be grey after scaling, whatever its seed."""
    fields = np.random.default_rng(seed).integers(0, 255, (3, 3, 3), dtype=np.uint8)
    rows, columns = np.arange(height) * 3 // height, np.arange(width) * 3 // width
    return np.ascontiguousarray(fields[rows][:, columns])


def digest(name: bytes) -> bytes:
    return hashlib.sha256(name).digest()


def spans_of(parts: list[list[int] | MediaSpan]) -> list[MediaSpan]:
    return [part for part in parts if isinstance(part, MediaSpan)]


def test_an_image_on_a_grid_shares_positions(tiny_model: Models, projectors: Path) -> None:
    with loaded(tiny_model("qwen35"), projectors / "qwen35.gguf") as (llama, projector):
        parts = projector.parts(image(128, 96), digest(b"a"), 100, "messages")
        (span,) = spans_of(parts)
        assert [isinstance(part, MediaSpan) for part in parts] == [False, True, False]
        assert (len(span), span.positions, span.sees_itself) == (12, 4, False)
        assert span.embeddings.shape == (12, llama.embedding_length)
        rows, columns = np.divmod(np.arange(12), 4)
        expected = np.array([np.full(12, 7), 7 + rows, 7 + columns, np.zeros(12)])
        np.testing.assert_array_equal(span.positions_at(7), expected)


def test_an_image_in_a_row_takes_a_position_each(tiny_model: Models, projectors: Path) -> None:
    with loaded(tiny_model("gemma3"), projectors / "gemma3.gguf") as (_, projector):
        (span,) = spans_of(projector.parts(image(100, 300), digest(b"a"), 100, "messages"))
        assert (len(span), span.positions, span.sees_itself) == (16, 16, True)
        np.testing.assert_array_equal(span.positions_at(7), np.arange(7, 23)[None, :])


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_image_gives_the_same_span_and_another_one_does_not(
    tiny_model: Models, projectors: Path, kind: str
) -> None:
    with loaded(tiny_model(kind), projectors / f"{kind}.gguf") as (_, projector):
        one, same, other = (
            spans_of(projector.parts(image(96, 96, seed), digest(name), 100, "messages"))[0]
            for seed, name in ((1, b"1"), (1, b"1"), (2, b"2"))
        )
        assert one.ids == same.ids != other.ids
        np.testing.assert_array_equal(one.embeddings, same.embeddings)
        assert np.abs(one.embeddings - other.embeddings).max() > 0.01


def test_odd_sizes_are_taken_and_large_ones_bounded(tiny_model: Models, projectors: Path) -> None:
    with loaded(tiny_model("qwen35"), projectors / "qwen35.gguf", image_max_tokens=64) as (_, projector):
        for width, height in ((1, 1), (2, 400), (400, 2), (33, 31), (3000, 2000)):
            (span,) = spans_of(projector.parts(image(width, height), digest(b"a"), 500, "messages"))
            assert 0 < len(span) <= 64
    with (
        loaded(tiny_model("qwen35"), projectors / "qwen35.gguf") as (_, projector),
        pytest.raises(InvalidRequest, match="are the most"),
    ):
        projector.parts(image(1000, 800), digest(b"a"), 500, "messages")


def test_an_image_that_sees_itself_must_fit_a_micro_batch(tiny_model: Models, projectors: Path) -> None:
    settings = {"batch_tokens": 16, "micro_batch_tokens": 16}
    with loaded(tiny_model("gemma3"), projectors / "gemma3.gguf", **settings) as (_, projector):
        assert len(spans_of(projector.parts(image(64, 64), digest(b"a"), 500, "messages"))[0]) == 16
        projector._micro_batch_tokens = 15
        with pytest.raises(InvalidRequest, match="micro_batch_tokens"):
            projector.parts(image(64, 64), digest(b"a"), 500, "messages")


def test_a_projector_of_another_model_is_refused_in_a_line(
    tiny_model: Models, projectors: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes((projectors / "qwen35.gguf").read_bytes()[:5000])
    llama = Llama(config_of(tiny_model("qwen35").path, broken), 1, lambda _share: None)
    for path in (broken, tiny_model("llama").path, tmp_path / "nowhere.gguf"):
        with pytest.raises(ModelLoadFailed, match="libmtmd could not load"):
            Projector(config_of(tiny_model("qwen35").path, path), llama.model, 1)
    llama.close()


def test_its_memory_is_planned_with_the_models(tiny_model: Models, projectors: Path) -> None:
    model, projector = tiny_model("qwen35").path, projectors / "qwen35.gguf"
    need = memory.plan(config_of(model, projector, image_max_tokens=64)).host
    assert need.by_kind()["projector"] > projector.stat().st_size * 0.95
    assert need.total_bytes == need.loaded_bytes + need.cache_bytes + need.projector_bytes
    with pytest.raises(ModelLoadFailed, match="libmtmd could not plan"):
        memory.plan(config_of(model, model))


# --- in a prompt ---------------------------------------------------------------------------------


def prompt_of(llama: Llama, projector: Projector, *images: np.ndarray) -> MediaPrompt:
    marker = new_marker()
    text = "<|im_start|>user\n" + "".join(f"{marker} and " for _ in images) + "what is it?<|im_end|>\n"
    parts = [projector.parts(i, digest(bytes([n])), 200, "messages") for n, i in enumerate(images)]
    return assemble(text, marker, parts, llama.vocabulary, add_special=True)


def test_a_prompt_has_its_spans_where_the_markers_were(tiny_model: Models, projectors: Path) -> None:
    with loaded(tiny_model("qwen35"), projectors / "qwen35.gguf") as (llama, projector):
        prompt = prompt_of(llama, projector, image(64, 128), image(200, 96, 1))
        assert [len(entry.span) for entry in prompt.spans.placed] == [8, 18]
        for entry in prompt.spans.placed:
            assert tuple(prompt.tokens[entry.start : entry.end]) == entry.span.ids
        assert sum(token < 0 for token in prompt.tokens) == 8 + 18
        assert len(prompt.ends) == len(prompt.tokens)
        # A cut anywhere in the text is one between whole images.
        for offset in range(int(prompt.ends[-1])):
            cut = prompt.spans.whole(int(np.searchsorted(prompt.ends, offset, side="right")))
            prompt.spans.position(cut)


def test_a_template_that_drops_an_image_is_told(tiny_model: Models, projectors: Path) -> None:
    with loaded(tiny_model("qwen35"), projectors / "qwen35.gguf") as (llama, projector):
        parts = [projector.parts(image(64, 64), digest(b"a"), 200, "messages")]
        for text in ("no image", "<m> twice <m>"):
            with pytest.raises(InvalidRequest, match="of 1 images"):
                assemble(text, "<m>", parts, llama.vocabulary, add_special=True)


# --- decoded -------------------------------------------------------------------------------------


def logits_of(llama: Llama, prompt: MediaPrompt, seq: int, chunk: int, done: int = 0) -> np.ndarray:
    """Decodes the prompt behind its first `done` entries as a core would: stretches of tokens and of spans, at most `chunk` at
    a time."""
    tokens = Batch(chunk)
    axes = prompt.spans.placed[0].span.offsets.shape[0]
    stretch = SpanBatch(chunk, llama.embedding_length, axes)
    while done < len(prompt.tokens):
        entry = prompt.spans.covering(done)
        if entry is not None:
            count = min(chunk, entry.end - done)
            stretch.fill(seq, prompt.spans.position(entry.start), entry.span, done - entry.start, count)
            if entry.span.sees_itself:
                llama_cpp.llama_set_causal_attn(llama.context, False)
            assert llama_cpp.llama_decode(llama.context, stretch.native) == 0
            llama_cpp.llama_set_causal_attn(llama.context, True)
        else:
            count = min(chunk, prompt.spans.until_span(done) or len(prompt.tokens), len(prompt.tokens) - done)
            tokens.clear()
            start = prompt.spans.position(done)
            tokens.add(seq, start, prompt.tokens[done : done + count], outputs=1)
            assert llama.decode(tokens) == 0
            logits = llama.logits(count - 1).copy()
        done += count
    return logits


def reference_logits(llama: Llama, projector: Projector, *images: np.ndarray) -> np.ndarray:
    """libmtmd's own helper, from text with its markers to the last logits, on sequence 0."""
    mtmd = bindings()
    marker = mtmd.mtmd_default_marker().decode()
    text = "<|im_start|>user\n" + "".join(f"{marker} and " for _ in images) + "what is it?<|im_end|>\n"
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
    logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(llama.context, -1), (llama.vocabulary.size,)).copy()
    mtmd.mtmd_input_chunks_free(chunks)
    for bitmap in bitmaps:
        mtmd.mtmd_bitmap_free(bitmap)
    llama.clear(0)
    return logits


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_reads_a_prompt_as_libmtmds_helper_has_it(tiny_model: Models, projectors: Path, kind: str) -> None:
    images = [image(128, 96), image(64, 300, 1)]
    with loaded(tiny_model(kind), projectors / f"{kind}.gguf") as (llama, projector):
        expected = reference_logits(llama, projector, *images)
        prompt = prompt_of(llama, projector, *images)
        np.testing.assert_allclose(logits_of(llama, prompt, 0, 64), expected, atol=1e-4)
        assert llama.last_position(0) == prompt.spans.position(len(prompt.tokens)) - 1
        # In small pieces the low bits differ; a span that sees itself is never cut.
        small = 16 if kind == "gemma3" else 5
        np.testing.assert_allclose(logits_of(llama, prompt, 1, small), expected, atol=1e-3)
        other = prompt_of(llama, projector, images[0], image(64, 300, 2))
        llama.clear(1)
        assert np.abs(logits_of(llama, other, 1, 64) - expected).max() > 5e-3


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefix_with_an_image_is_shared_and_moved_like_any_other(
    tiny_model: Models, projectors: Path, kind: str
) -> None:
    with loaded(tiny_model(kind), projectors / f"{kind}.gguf", slots=4) as (llama, projector):
        prompt = prompt_of(llama, projector, image(128, 96), image(64, 300, 1))
        expected = logits_of(llama, prompt, 0, 64)
        begin = prompt.spans.placed[1].start
        position = prompt.spans.position(begin)
        prefix = MediaPrompt(prompt.tokens[:begin], prompt.spans.first(begin), prompt.ends)
        logits_of(llama, prefix, 1, 64)
        llama.share(1, 2, position)
        assert llama.import_state(3, llama.export_state(1))
        for seq in (2, 3):
            assert llama.last_position(seq) == position - 1
            np.testing.assert_allclose(logits_of(llama, prompt, seq, 64, begin), expected, atol=1e-3)
        if not llama.has_recurrent_state:
            assert llama.keep_prefix(0, position)
            np.testing.assert_allclose(logits_of(llama, prompt, 0, 64, begin), expected, atol=1e-3)


# --- the desk ------------------------------------------------------------------------------------


def file_of(width: int, height: int, seed: int = 0) -> ImageFile:
    buffer = io.BytesIO()
    Image.fromarray(image(width, height, seed)).save(buffer, "PNG")
    return image_file(f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}", "messages")


@asynccontextmanager
async def desk_of(model: SyntheticModel, projector: Path, cache_bytes: int) -> AsyncIterator[MediaDesk]:
    with loaded(model, projector, queue_limit=2) as (_, made):
        desk = MediaDesk(config_of(model.path, projector, queue_limit=2), made, cache_bytes)
        try:
            yield desk
        finally:
            await asyncio.to_thread(desk.close)


async def test_an_image_is_computed_once_for_all_who_ask(tiny_model: Models, projectors: Path) -> None:
    async with desk_of(tiny_model("qwen35"), projectors / "qwen35.gguf", 1 << 20) as desk:
        files = [file_of(64, 128), file_of(96, 96, 1), file_of(64, 128)]
        found = await asyncio.gather(*(desk.parts([file], ["messages"]) for file in files))
        assert desk.computed == 2
        assert found[0][0] is found[2][0]
        await desk.parts(files, ["messages"] * 3)
        assert desk.computed == 2


async def test_the_cache_is_bounded(tiny_model: Models, projectors: Path) -> None:
    span_bytes = 8 * 128 * 4
    async with desk_of(tiny_model("qwen35"), projectors / "qwen35.gguf", 3 * span_bytes) as desk:
        for seed in (0, 1, 2, 3, 0):
            await desk.parts([file_of(64, 128, seed)], ["messages"])
        assert desk.computed == 5
        assert desk._used_bytes <= 3 * span_bytes


async def test_a_fault_is_the_askers_own_and_the_line_is_bounded(tiny_model: Models, projectors: Path) -> None:
    async with desk_of(tiny_model("qwen35"), projectors / "qwen35.gguf", 1 << 20) as desk:
        asked = [desk.parts([ImageFile(b"x", digest(b"x"))], ["messages.3"])]
        asked += [desk.parts([file_of(64, 128, seed)], ["messages"]) for seed in range(9)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(answers[0], InvalidRequest)
        assert answers[0].param == "messages.3"
        assert sum(isinstance(answer, QueueFull) for answer in answers) == 7
        assert len(await desk.parts([file_of(64, 128, 99)], ["messages"])) == 1


async def test_what_waiting_requests_hold_is_bounded(tiny_model: Models, projectors: Path) -> None:
    async with desk_of(tiny_model("qwen35"), projectors / "qwen35.gguf", 1 << 20) as desk:
        ((_, span, _),) = await desk.parts([file_of(64, 128)], ["messages"])
        assert isinstance(span, MediaSpan)
        spans = SpanMap([PlacedSpan(1, span)])
        limit_bytes = spans.size_bytes * 2
        with desk.holding(spans, limit_bytes), desk.holding(spans, limit_bytes), pytest.raises(QueueFull, match="MiB"):
            desk.holding(spans, limit_bytes).__enter__()
        with desk.holding(spans, 1):  # whoever is alone may be larger
            pass


async def test_whoever_leaves_takes_nobody_with_them(tiny_model: Models, projectors: Path) -> None:
    async with desk_of(tiny_model("qwen35"), projectors / "qwen35.gguf", 1 << 20) as desk:
        leaves = asyncio.create_task(desk.parts([file_of(64, 128)], ["messages"]))
        stays = asyncio.create_task(desk.parts([file_of(64, 128)], ["messages"]))
        await asyncio.sleep(0)
        leaves.cancel()
        assert len(await stays) == 1
        assert leaves.cancelled()
        assert desk.computed == 1
