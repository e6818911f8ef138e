"""Prompts that no template wrote, on a hybrid: repeated, gone on with, cut short, or with more before an editor's cursor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engines.runtime.raw_cuts import raw_cuts
from tests.engine_client import post
from tests.engine_process import EngineProcess
from tests.engines.runtime.test_core import prompt_of, run, running
from tests.engines.runtime.test_http_completions import MARKERS, with_numbers
from tests.engines.runtime.test_prefix import cold
from tests.synthetic_gguf import SyntheticModel

TEXT = "".join(f"{number} stones lie in the river, and {number * 7} in the sea. " for number in range(8))


@pytest.fixture(scope="module")
def hybrid_engine(
    tiny_model: Callable[..., SyntheticModel], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    """Its vocabulary has marks for a cursor; its text depends on all of the prompt."""
    folder: Path = tmp_path_factory.mktemp("raw")
    keys = {f"tokenizer.ggml.fim_{name}_token_id": token for name, token in MARKERS.items()}
    with_numbers(tiny_model("qwen35").path, folder / "fim.gguf", keys)
    with EngineProcess(folder, folder / "fim.gguf", context_tokens=1024, checkpoint_min_tokens=16) as engine:
        yield engine


def complete(engine: EngineProcess, **body: Any) -> tuple[str, int, int]:
    """Text, prompt tokens, and how many of them were reused."""
    answer = post(engine, "/v1/completions", {"max_tokens": 12, "temperature": 0, **body}).value
    usage = answer["usage"]
    return answer["choices"][0]["text"], usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def tokens_of(engine: EngineProcess, text: str) -> list[int]:
    tokens: list[int] = post(engine, "/tokenize", {"content": text}).value["tokens"]
    return tokens


def test_a_raw_prompt_is_reused_by_itself_by_longer_and_by_shorter_ones(hybrid_engine: EngineProcess) -> None:
    text, count, cached = complete(hybrid_engine, prompt=TEXT)
    assert cached == 0
    again, _, reused = complete(hybrid_engine, prompt=TEXT)
    assert (again, reused) == (text, count - 4)
    computed, _, none = complete(hybrid_engine, prompt=TEXT, cache_prompt=False)
    assert (computed, none) == (text, 0)
    assert complete(hybrid_engine, prompt=f"{TEXT}And then they move.")[2] == count - 4
    assert complete(hybrid_engine, prompt=f"{TEXT}{text}And then they move.")[2] >= count - 4
    shorter = tokens_of(hybrid_engine, TEXT)[: count * 4 // 5]
    assert complete(hybrid_engine, prompt=shorter)[2] == (count - 4) * 3 // 4


def test_an_editor_that_types_on_finds_what_stands_before_its_cursor(hybrid_engine: EngineProcess) -> None:
    def fill(before: str) -> tuple[int, int]:
        body = {"input_prefix": before, "input_suffix": " of the land. " * 12, "n_predict": 4, "temperature": 0}
        timings = post(hybrid_engine, "/infill", body).value["timings"]
        return timings["prompt_n"] + timings["cache_n"], timings["cache_n"]

    before = f"Not seen yet. {TEXT}"
    count, cached = fill(before)
    assert cached == 0
    assert fill(before) == (count, count - 4)
    typed = len(tokens_of(hybrid_engine, before)) + 1  # the mark before it
    assert fill(f"{before}And")[1] == typed - 4


@pytest.mark.parametrize("architecture", ["qwen35", "qwen35moe"])
async def test_what_a_raw_prompt_leaves_answers_as_a_cold_run(
    tiny_model: Callable[..., SyntheticModel], architecture: str
) -> None:
    model = tiny_model(architecture)
    prompt = prompt_of(model, 280)
    cuts = raw_cuts(prompt, -1)
    async with running(model, slots=2, checkpoints=4) as core:
        await run(core, prompt, cuts=list(cuts))
        later = [prompt, [*prompt, 7, 8, 10], prompt[:240]]
        works = [await run(core, tokens) for tokens in later]
    assert [work.cached_tokens for work in works] == [276, 276, 207]
    for work in works:
        expected = await cold(model, work.prompt, [*cuts, *work.cuts])
        assert work.tokens[len(work.prompt) :] == expected[len(work.prompt) :]


def test_cuts_of_a_raw_prompt_are_worth_their_place() -> None:
    assert raw_cuts(range(15), -1) == []
    assert raw_cuts(range(100), -1) == [96]
    assert raw_cuts(range(404), -1) == [300, 400]
    assert raw_cuts([*range(200), 999, *range(200)], 999) == [196, 397]
    assert raw_cuts([999, *range(50)], 999) == [47]
