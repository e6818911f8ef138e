"""The synthetic models really load in llama.cpp, decode, and write what they promise."""

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from tests import synthetic_gguf
from tests.synthetic_gguf import SyntheticModel
from tests.synthetic_vocabulary import END_OF_TEXT, IM_END, IM_START, NEWLINE, next_token, token_text

Write = Callable[..., SyntheticModel]

WRITERS: list[Write] = [
    synthetic_gguf.write_llama,
    synthetic_gguf.write_qwen3,
    synthetic_gguf.write_gemma3,
    synthetic_gguf.write_qwen35,
    synthetic_gguf.write_qwen35moe,
]
HYBRIDS = {"qwen35", "qwen35moe"}
CONTEXT_TOKENS = 512
CHUNK_TOKENS = 64
TEXTS = [
    "Name a colour.",
    "the then in an error\n\n  other",
    "Zwölf Boxkämpfer: Ж 你好 😀👩‍👩‍👧 \u0000\x7f é̂",
    "1234567890 <|im_start|> it's",
]
SILENCE = llama_cpp.llama_log_callback(lambda _level, _text, _user_data: None)


class LoadedModel:
    """One model and one context of the real library, on one thread."""

    def __init__(self, path: Path) -> None:
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = 0
        model_params.load_mtp = True
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
        assert self.model, f"{path} did not load"
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = CONTEXT_TOKENS, CHUNK_TOKENS, CHUNK_TOKENS
        params.n_threads = params.n_threads_batch = 1
        params.swa_full = False  # sliding windows really slide
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        assert self.context
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(self.vocab)
        self.position = 0

    def close(self) -> None:
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)

    def decode(self, tokens: list[int]) -> np.ndarray:
        """Decodes in chunks; the logits of every token, (len(tokens), vocab)."""
        rows = []
        for start in range(0, len(tokens), CHUNK_TOKENS):
            chunk = tokens[start : start + CHUNK_TOKENS]
            batch = llama_cpp.llama_batch_init(len(chunk), 0, 1)
            batch.n_tokens = len(chunk)
            for i, token in enumerate(chunk):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, self.position + i, 1
                batch.seq_id[i][0], batch.logits[i] = 0, 1
            assert llama_cpp.llama_decode(self.context, batch) == 0
            for i in range(len(chunk)):
                row = llama_cpp.llama_get_logits_ith(self.context, i)
                rows.append(np.ctypeslib.as_array(row, shape=(self.vocab_size,)).copy())
            llama_cpp.llama_batch_free(batch)
            self.position += len(chunk)
        return np.stack(rows)

    def tokenize(self, text: bytes) -> list[int]:
        buffer = (llama_cpp.llama_token * (len(text) + 8))()
        count = llama_cpp.llama_tokenize(self.vocab, text, len(text), buffer, len(buffer), True, True)
        assert count >= 0
        return list(buffer[:count])

    def pieces(self, tokens: list[int]) -> bytes:
        buffer = ctypes.create_string_buffer(64)
        text = b""
        for token in tokens:
            count = llama_cpp.llama_token_to_piece(self.vocab, token, buffer, len(buffer), 0, True)
            assert count >= 0
            text += buffer.raw[:count]
        return text


@pytest.fixture
def load() -> Iterator[Callable[[Path], LoadedModel]]:
    opened: list[LoadedModel] = []

    def _load(path: Path) -> LoadedModel:
        opened.append(LoadedModel(path))
        return opened[-1]

    yield _load
    for model in opened:
        model.close()


@pytest.fixture
def loader_complaints() -> Iterator[list[str]]:
    """What the library logs at warning level or above; its log stays off the test's output."""
    complaints: list[str] = []

    def keep(level: int, text: bytes, _user_data: object) -> None:
        if level in (3, 4):  # warning, error
            complaints.append(text.decode(errors="replace"))

    callback = llama_cpp.llama_log_callback(keep)
    llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))
    yield complaints
    # the library keeps the pointer, so what is set last must outlive every fixture
    llama_cpp.llama_log_set(SILENCE, ctypes.c_void_p(0))


def options_for(write: Write) -> dict[str, bool]:
    return {"nextn": True} if write.__name__.removeprefix("write_") in HYBRIDS else {}


@pytest.mark.parametrize("write", WRITERS)
def test_it_loads_without_complaint_and_decodes_300_tokens_to_finite_logits(
    write: Write, tmp_path: Path, load: Callable[[Path], LoadedModel], loader_complaints: list[str]
) -> None:
    written = write(tmp_path / "model.gguf", seed=3)
    model = load(written.path)
    tokens = [int(token) for token in np.random.default_rng(1).integers(0, written.vocab, 300)]
    logits = model.decode(tokens)
    assert logits.shape == (300, written.vocab)
    assert np.isfinite(logits).all()
    assert logits.std(axis=1).min() > 0.1
    assert written.path.stat().st_size < 8_000_000
    assert loader_complaints == []


@pytest.mark.parametrize("write", WRITERS)
def test_its_random_weights_let_the_context_decide(
    write: Write, tmp_path: Path, load: Callable[[Path], LoadedModel], loader_complaints: list[str]
) -> None:
    path = write(tmp_path / "model.gguf").path
    ours, others = load(path), load(path)
    shared = list(range(60, 90))
    after_one = ours.decode([*shared, 97, *shared])[-1]
    after_other = others.decode([*shared, 98, *shared])[-1]
    assert np.abs(after_one - after_other).max() > 1e-3


@pytest.mark.parametrize("utf8_cycle", [False, True], ids=["ascii", "utf8"])
@pytest.mark.parametrize("write", WRITERS)
def test_a_tie_free_model_follows_its_permutation_by_a_wide_margin(
    write: Write,
    utf8_cycle: bool,
    tmp_path: Path,
    load: Callable[[Path], LoadedModel],
    loader_complaints: list[str],
) -> None:
    written = write(tmp_path / "model.gguf", seed=5, tie_free=True, utf8_cycle=utf8_cycle, **options_for(write))
    model = load(written.path)
    prompt = model.tokenize("<|im_start|>user\nNäme a colour.<|im_end|>\n<|im_start|>assistant\n".encode())
    assert prompt[0] == IM_START
    assert prompt[-1] == NEWLINE
    answer = written.follow(NEWLINE, 300)
    logits = model.decode([*prompt, *answer])[len(prompt) - 1 : -1]
    assert logits.argmax(axis=1).tolist() == answer
    ranked = np.sort(logits, axis=1)
    assert (ranked[:, -1] - ranked[:, -2]).min() > 2.0


@pytest.mark.parametrize("write", [synthetic_gguf.write_qwen35, synthetic_gguf.write_qwen35moe])
def test_the_draft_block_of_a_tie_free_model_names_the_same_next_token(
    write: Write, tmp_path: Path, load: Callable[[Path], LoadedModel], loader_complaints: list[str]
) -> None:
    written = write(tmp_path / "model.gguf", tie_free=True, nextn=True)
    target = load(written.path)
    assert llama_cpp.llama_model_n_layer_nextn(target.model) == 1
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_threads = CONTEXT_TOKENS, 1
    params.ctx_type, params.ctx_other = llama_cpp.LLAMA_CONTEXT_TYPE_MTP, target.context
    draft = llama_cpp.llama_init_from_model(target.model, params)
    answer = written.follow(NEWLINE, 30)
    width = llama_cpp.llama_model_n_embd(target.model)
    batch = llama_cpp.llama_batch_init(len(answer), width, 1)
    tokens = (llama_cpp.llama_token * len(answer))(*answer)
    batch.token, batch.n_tokens = ctypes.cast(tokens, type(batch.token)), len(answer)
    ctypes.memset(batch.embd, 0, len(answer) * width * 4)  # no hidden rows: this block must not need them
    for i in range(len(answer)):
        batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = i, 1, 0, 1
    assert llama_cpp.llama_decode(draft, batch) == 0
    drafted = []
    for i in range(len(answer)):
        row = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(draft, i), shape=(target.vocab_size,))
        drafted.append(int(row.argmax()))
    batch.token = type(batch.token)()  # ours, not the library's to free
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(draft)
    assert drafted == [written.next_token(token) for token in answer]


@pytest.mark.parametrize("utf8_cycle", [False, True], ids=["ascii", "utf8"])
def test_an_answer_is_valid_text_that_tokenises_to_itself(
    utf8_cycle: bool, tmp_path: Path, load: Callable[[Path], LoadedModel], loader_complaints: list[str]
) -> None:
    for seed in range(5):
        written = synthetic_gguf.write_llama(tmp_path / f"{seed}.gguf", seed=seed, tie_free=True, utf8_cycle=utf8_cycle)
        cycle = written.follow(NEWLINE, written.follow(NEWLINE, written.vocab).index(NEWLINE) + 1)
        text = written.answer_bytes(len(cycle))
        assert len(text) > 60
        assert text.decode().isascii() is not utf8_cycle
        assert not {IM_START, IM_END, END_OF_TEXT} & set(cycle)
        model = load(written.path)
        assert model.tokenize(text) == cycle
        assert next_token(seed, written.vocab, NEWLINE, utf8_cycle=utf8_cycle) == cycle[0]


def test_every_text_comes_back_from_its_tokens(
    tmp_path: Path, load: Callable[[Path], LoadedModel], loader_complaints: list[str]
) -> None:
    model = load(synthetic_gguf.write_llama(tmp_path / "model.gguf").path)
    for text in TEXTS:
        tokens = model.tokenize(text.encode())
        assert model.pieces(tokens) == text.encode()
    every = [token for token in range(model.vocab_size) if token not in {IM_START, IM_END, END_OF_TEXT}]
    assert model.pieces(every) == token_text(every)
    assert llama_cpp.llama_vocab_is_eog(model.vocab, IM_END)


def test_the_same_seed_writes_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    first, again, other = (
        synthetic_gguf.write_qwen35moe(tmp_path / name, seed=seed, nextn=True).path.read_bytes()
        for name, seed in (("first", 1), ("again", 1), ("other", 2))
    )
    assert first == again
    assert first != other


def test_a_vocabulary_too_small_for_the_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not hold"):
        synthetic_gguf.write_llama(tmp_path / "model.gguf", vocab=256)
