"""Long runs of one kind of characters: tokenised piece by piece where llama.cpp would overflow its stack, and exactly."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from engines.runtime.llama import Vocabulary
from engines.runtime.long_runs import BLOCK_CHARS, cut_long_runs
from tests.engine_client import post
from tests.engine_process import EngineProcess
from tests.synthetic_gguf import SyntheticModel

MARK = "<|im_end|>"
RUNS = ("x", "-", "é", "\u0301", " ", "\n", "中", "7")


@given(st.lists(st.tuples(st.sampled_from([*RUNS, MARK, "ab cd"]), st.integers(1, 3 * BLOCK_CHARS)), max_size=4))
def test_pieces_are_the_text_and_no_run_is_longer_than_two_blocks(parts: list[tuple[str, int]]) -> None:
    text = "".join((unit * count)[: 4 * BLOCK_CHARS] for unit, count in parts)
    pieces = cut_long_runs(text, [MARK])
    assert "".join(pieces) == text
    for piece in pieces:
        assert _longest_run(piece) < 2 * BLOCK_CHARS + len(MARK)
    assert sum(piece.count(MARK) for piece in pieces) == text.count(MARK)


def _longest_run(text: str) -> int:
    return max((len(list(run)) for _, run in groupby(text, str.isspace)), default=0)


def test_ordinary_text_is_left_whole() -> None:
    for text in ("", "a", "x" * (BLOCK_CHARS - 1), "some words " * 5000):
        assert cut_long_runs(text, [MARK]) == [text]


def test_a_longer_text_begins_with_the_same_tokens(tiny_vocabulary: Vocabulary) -> None:
    text = "中文" * 5000 + MARK + "and more " * 300
    first = tiny_vocabulary.tokenize(text[:9000], add_special=False, parse_special=True)
    second = tiny_vocabulary.tokenize(text, add_special=False, parse_special=True)
    assert second[: len(first)] == first
    assert second.count(tiny_vocabulary.tokenize(MARK, add_special=False, parse_special=True)[0]) == 1
    assert b"".join(tiny_vocabulary.pieces[token] for token in second).decode() == text.replace(MARK, "")


def test_an_engine_survives_what_overflows_the_tokenizers_stack(tie_free_model: SyntheticModel, tmp_path: Path) -> None:
    # A vocabulary that is split by the regular expression of Bloom's, which llama.cpp leaves to std::regex.
    path = tmp_path / "other.gguf"
    raw = tie_free_model.path.read_bytes()
    assert raw.count(b"qwen2") == 1
    path.write_bytes(raw.replace(b"qwen2", b"bloom"))
    with EngineProcess(tmp_path, path, slots=1, context_tokens=512, max_body_bytes=1 << 22) as engine:
        for unit in RUNS:
            text = unit * 100_000
            tokens = post(engine, "/tokenize", {"content": text}).value["tokens"]
            assert post(engine, "/detokenize", {"tokens": tokens}).value["content"] == text
        assert engine.process.poll() is None
