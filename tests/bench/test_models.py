"""The written models are what llama.cpp loads; the true shape is the one that was measured."""

from __future__ import annotations

import ctypes
from pathlib import Path

import gguf
import llama_cpp
import pytest

from bench.errors import BenchError
from bench.models import BLOCK_BYTES, BLOCK_WEIGHTS, SHAPES, tensors, write
from bench.vocabulary import SOURCE_GLOB, Vocabulary, qwen35
from pools.gguf_header import read_header
from tests.bench.small_vocabulary import small_vocabulary


@llama_cpp.llama_log_callback
def _quiet(_level: int, _text: bytes, _data: object) -> None:
    pass


def test_it_takes_only_whole_characters_for_text() -> None:
    kinds = [gguf.TokenType.NORMAL] * 4 + [gguf.TokenType.CONTROL]
    vocabulary = Vocabulary(["Ġriver", "Ã", "Ã¤", "<tool>", "<|end|>"], kinds, [], "qwen2", 4, "")
    assert vocabulary.plain == [True, False, True, True, False]


@pytest.mark.parametrize("name", ["tiny-dense", "tiny-hybrid", "tiny-moe"])
def test_it_writes_models_that_llama_cpp_loads(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, SHAPES[name], small_vocabulary())
    assert read_header(path).is_hybrid == SHAPES[name].is_hybrid
    llama_cpp.llama_log_set(_quiet, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    assert model
    assert llama_cpp.llama_model_n_embd(model) == SHAPES[name].embedding
    llama_cpp.llama_model_free(model)


def test_it_writes_the_same_bytes_for_the_same_seed(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write(tmp_path / name, SHAPES["tiny-dense"], small_vocabulary(), seed)
    first, again, other = ((tmp_path / name).read_bytes() for name in "abc")
    assert first == again != other


def test_it_has_the_true_shape_of_the_large_model() -> None:
    listed = list(tensors(SHAPES["35b-a3b"], 151936))
    assert sum(t.weights for t in listed) == pytest.approx(35.1e9, rel=0.01)
    packed_bytes = sum(t.weights for t in listed if not t.is_plain) // BLOCK_WEIGHTS * BLOCK_BYTES
    assert packed_bytes == pytest.approx(19.8e9, rel=0.01)


def test_it_reads_the_real_vocabulary() -> None:
    try:
        vocabulary = qwen35()
    except BenchError:
        pytest.skip(f"{SOURCE_GLOB} is not there: make peer unpacks it")
    assert len(vocabulary.tokens) == len(vocabulary.types) == 151936
    assert sum(vocabulary.plain) > 150_000
    assert "reasoning_content" in vocabulary.template
