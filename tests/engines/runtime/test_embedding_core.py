"""The pooling core alone, in this process, on tiny encoders and decoders; values are checked against numpy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from engines.config import EngineConfig
from engines.errors import DeadlineExceeded, DecodeFailed, EngineStopping, ModelLoadFailed, QueueFull
from engines.runtime.embedding_core import EmbeddingCore
from engines.runtime.embedding_job import EmbeddingJob, Values
from engines.runtime.embedding_llama import InputBatch, PoolingLlama
from engines.runtime.embedding_metrics import EmbeddingMetrics
from tests import synthetic_encoders, synthetic_gguf
from tests.synthetic_encoders import Classifier

TOLERANCE = 2e-3


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with bert, ranker, judge (qwen3 with yes and no), qwen3 and qwen35."""
    folder = tmp_path_factory.mktemp("pooling-models")
    synthetic_encoders.write_bert(folder / "bert.gguf")
    synthetic_encoders.write_qwen3_ranker(folder / "judge.gguf")
    synthetic_gguf.write_qwen3(folder / "qwen3.gguf")
    synthetic_gguf.write_qwen35(folder / "qwen35.gguf")
    return folder


@pytest.fixture(scope="module")
def ranker(models: Path) -> Classifier:
    return synthetic_encoders.write_bert_ranker(models / "ranker.gguf")


def config_of(path: Path, pooling: str, **settings: Any) -> EngineConfig:
    values: dict[str, Any] = {"context_tokens": 128, "batch_tokens": 128, "pooling": pooling, **settings}
    return EngineConfig(model_path=str(path), model_name="tiny", **values)


@asynccontextmanager
async def running(path: Path, pooling: str, **settings: Any) -> AsyncIterator[EmbeddingCore]:
    core = EmbeddingCore(config_of(path, pooling, **settings), 1, asyncio.get_running_loop(), EmbeddingMetrics())
    core.start()
    async with asyncio.timeout(120):
        while core.state == "loading":
            await core.changed.wait()
            core.changed.clear()
    assert core.state == "ready", core.failure
    try:
        yield core
    finally:
        core.stop()
        await asyncio.to_thread(core.join, 60)
        assert not core.is_alive()


def job_of(*inputs: list[int], deadline_s: float = 60) -> EmbeddingJob:
    future: asyncio.Future[list[Values]] = asyncio.get_running_loop().create_future()
    return EmbeddingJob("r", [np.array(i, dtype=np.int32) for i in inputs], time.monotonic() + deadline_s, future)


async def pooled(core: EmbeddingCore, *inputs: list[int]) -> list[Values]:
    job = job_of(*inputs)
    core.submit(job)
    async with asyncio.timeout(60):
        return await job.result


def tokens(length: int, start: int = 1) -> list[int]:
    return [4 + (start * 31 + i * 7) % 240 for i in range(length)]


def token_states(path: Path, inputs: list[list[int]]) -> list[Values]:
    """Each input's last hidden states, shape (tokens, embedding), from a context that pools nothing."""
    llama = PoolingLlama(config_of(path, "mean"), 1, lambda _share: None)
    params = llama_cpp.llama_context_default_params()
    params.embeddings, params.pooling_type, params.kv_unified = True, llama_cpp.LLAMA_POOLING_TYPE_NONE, True
    params.n_ctx = params.n_batch = params.n_ubatch = 128
    params.n_threads = params.n_threads_batch = 1
    context = llama_cpp.llama_init_from_model(llama.model, params)
    states = []
    for item in inputs:
        batch = InputBatch(128)
        batch.add_input(0, 0, item)
        assert llama_cpp.llama_decode(context, batch.native) == 0
        rows = [llama_cpp.llama_get_embeddings_ith(context, row) for row in range(len(item))]
        states.append(np.array([np.ctypeslib.as_array(row, (128,)).copy() for row in rows]))
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(context), -1, -1, -1)
    llama_cpp.llama_free(context)
    llama.close()
    return states


@pytest.mark.parametrize(
    ("model", "pooling"), [("bert", "mean"), ("bert", "cls"), ("bert", "last"), ("qwen3", "mean"), ("qwen3", "last")]
)
async def test_pooled_values_are_those_of_the_tokens_states(models: Path, model: str, pooling: str) -> None:
    inputs = [tokens(length, length) for length in (1, 2, 9, 40, 100)]
    states = token_states(models / f"{model}.gguf", inputs)
    async with running(models / f"{model}.gguf", pooling) as core:
        for values, rows in zip(await pooled(core, *inputs), states, strict=True):
            expected = {"mean": rows.mean(axis=0), "cls": rows[0], "last": rows[-1]}[pooling]
            np.testing.assert_allclose(values, expected, atol=TOLERANCE)


async def test_a_rankers_score_is_its_heads(models: Path, ranker: Classifier) -> None:
    inputs = [tokens(length, length) for length in (3, 20, 60)]
    states = token_states(models / "ranker.gguf", inputs)
    async with running(models / "ranker.gguf", "rank") as core:
        for values, rows in zip(await pooled(core, *inputs), states, strict=True):
            np.testing.assert_allclose(values, [ranker.score(rows[0])], atol=TOLERANCE)


async def test_a_judge_gives_the_probability_of_yes(models: Path) -> None:
    async with running(models / "judge.gguf", "rank") as core:
        for values in await pooled(core, tokens(5), tokens(30, 2)):
            assert values.shape == (2,)
            assert values.sum() == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(
    ("model", "pooling"),
    [("bert", "mean"), ("bert", "cls"), ("qwen3", "last"), ("qwen3", "mean"), ("qwen35", "last"), ("judge", "rank")],
)
async def test_in_company_an_input_pools_as_alone(models: Path, model: str, pooling: str) -> None:
    inputs = [tokens(1 + 11 * i % 90, i) for i in range(40)]
    async with running(models / f"{model}.gguf", pooling) as core:
        alone = [(await pooled(core, item))[0] for item in inputs]
        together = await pooled(core, *inputs)
        spread = await asyncio.gather(*(pooled(core, item) for item in inputs))
        np.testing.assert_allclose(together, alone, atol=TOLERANCE)
        np.testing.assert_allclose([values for (values,) in spread], alone, atol=TOLERANCE)
        # One call for each input while they came alone, and far fewer in company.
        assert core.metrics.decode_calls._value.get() < 40 + 40


@pytest.mark.parametrize("model", ["qwen3", "qwen35"])
async def test_a_long_input_of_a_causal_model_goes_in_chunks(models: Path, model: str) -> None:
    inputs = [tokens(1000, 3), tokens(7), tokens(500, 5), tokens(64)]
    small, large = {"batch_tokens": 64, "cache_tokens": 1024}, {"batch_tokens": 2048, "micro_batch_tokens": 2048}
    async with running(models / f"{model}.gguf", "last", context_tokens=1024, **large) as core:
        whole = await pooled(core, *inputs)
    async with running(models / f"{model}.gguf", "last", context_tokens=1024, **small) as core:
        chunked = await pooled(core, *inputs)
        np.testing.assert_allclose(chunked, whole, atol=5 * TOLERANCE)


async def test_a_request_that_llama_refuses_ends_alone(models: Path) -> None:
    async with running(models / "bert.gguf", "mean") as core:
        expected = await pooled(core, tokens(9))
        long = job_of(*[tokens(60, i) for i in range(30)])
        bad, good = job_of(tokens(5), [4, 99999, 5]), job_of(tokens(9), tokens(12))
        for job in (long, bad, good):
            core.submit(job)
        with pytest.raises(DecodeFailed, match="input 1"):
            await bad.result
        np.testing.assert_allclose((await good.result)[0], expected[0], atol=TOLERANCE)
        assert len(await long.result) == 30
        np.testing.assert_allclose((await pooled(core, tokens(9)))[0], expected[0], atol=TOLERANCE)


async def test_a_cancelled_request_leaves_and_the_others_go_on(models: Path) -> None:
    async with running(models / "qwen3.gguf", "last", context_tokens=4096) as core:
        gone = job_of(*[tokens(3000, i) for i in range(20)])
        core.submit(gone)
        await pooled(core, tokens(7))
        assert not gone.result.done()
        core.cancel(gone)
        assert len(await pooled(core, tokens(9))) == 1
        assert not gone.result.done()
        assert (core.running, core.waiting) == (0, 0)
        assert 'hydra_engine_requests_total{outcome="cancelled"} 1.0' in core.metrics.text().decode()


async def test_a_short_request_passes_a_long_one(models: Path) -> None:
    """Order, not time."""
    async with running(models / "qwen3.gguf", "last", context_tokens=4096) as core:
        long = job_of(*[tokens(2000, i) for i in range(6)])
        core.submit(long)
        await pooled(core, tokens(9))
        assert not long.result.done()
        assert len(await long.result) == 6


async def test_the_waiting_line_is_bounded(models: Path) -> None:
    async with running(models / "qwen3.gguf", "last", context_tokens=4096, queue_limit=1) as core:
        first = job_of(*[tokens(3000, i) for i in range(20)])
        core.submit(first)
        with pytest.raises(QueueFull):
            for _ in range(3):
                core.submit(job_of(tokens(3000)))
        core.cancel(first)


async def test_a_deadline_ends_a_request(models: Path) -> None:
    async with running(models / "qwen3.gguf", "last", context_tokens=4096) as core:
        late = job_of(*[tokens(3000, i) for i in range(20)], deadline_s=0.05)
        core.submit(late)
        with pytest.raises(DeadlineExceeded):
            await late.result


async def test_stopping_ends_everybody_with_a_word(models: Path) -> None:
    async with running(models / "qwen3.gguf", "last", context_tokens=4096) as core:
        jobs = [job_of(*[tokens(3000, i) for i in range(20)]) for _ in range(3)]
        for job in jobs:
            core.submit(job)
        core.stop()
        for job in jobs:
            with pytest.raises(EngineStopping):
                await job.result
        with pytest.raises(EngineStopping):
            core.submit(job_of(tokens(3)))


def test_a_model_without_a_classifier_does_not_rank(models: Path) -> None:
    with pytest.raises(ModelLoadFailed, match="no classifier"):
        PoolingLlama(config_of(models / "bert.gguf", "rank"), 1, lambda _share: None)
