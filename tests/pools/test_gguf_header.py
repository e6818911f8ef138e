"""Headers of real, synthetic and hostile GGUF files."""

import os
import random
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pools.errors import GgufInvalid, ModelFileUnreadable
from pools.gguf_header import GgufHeader, describe, read_header
from pools.gguf_reader import FRONT_LIMIT_BYTES, WINDOW_BYTES, read_front
from tests import synthetic_gguf
from tests.conftest import PulledModel
from tests.pools.gguf_bytes import ARRAY, BOOL, F32, LLAMA, STRING, U8, U32, U64, array, gguf_file, number, tensor, text
from tests.synthetic_gguf import SyntheticModel
from tests.synthetic_vocabulary import END_OF_TEXT, IM_END

HUGE = 2**63


@pytest.fixture
def header_of(tmp_path: Path) -> Callable[[bytes], GgufHeader]:
    """Reads the header of a file with the given content."""

    def read(content: bytes) -> GgufHeader:
        path = tmp_path / "made.gguf"
        path.write_bytes(content)
        return read_header(path)

    return read


@pytest.fixture(scope="module")
def hybrid_front(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, int]:
    """Everything but tensor data of a hybrid model with a draft block, and the whole file's size."""
    path = tmp_path_factory.mktemp("hybrid") / "model.gguf"
    synthetic_gguf.write_qwen35moe(path, nextn=True, vocab=300)
    front = read_front(path)
    return path.read_bytes()[: front.data_start_bytes], front.size_bytes


def write_sparse(path: Path, front: bytes, size_bytes: int) -> None:
    path.write_bytes(front)
    os.truncate(path, max(size_bytes, len(front)))


def test_it_reads_the_header_of_smollm2(pulled_smollm2: PulledModel) -> None:
    header = read_header(pulled_smollm2.path)
    assert header.path == pulled_smollm2.path
    assert header.size_bytes == 98_362_432
    assert (header.architecture, header.quantization, header.tokenizer) == ("llama", "Q4_1", "gpt2")
    assert header.name == "Smollm2 135M 8k Lc100K Mix1 Ep2"
    assert header.parameter_count == 134_515_008
    assert header.context_train_tokens == 8192
    assert (header.layer_count, header.nextn_layers) == (30, 0)
    assert (header.embedding_length, header.head_count, header.head_count_kv) == (576, 9, 3)
    assert (header.key_length, header.value_length) == (64, 64)
    assert header.vocab_size == 49_152
    assert (header.bos_token_id, header.eos_token_id) == (1, 2)
    assert header.chat_template is not None
    assert "<|im_start|>" in header.chat_template
    assert not header.is_hybrid
    assert header.kv_bytes_per_token() == 30 * 2 * 3 * 64 * 2
    assert header.kv_bytes_per_token("q8_0", "Q8_0") == 30 * 2 * (3 * 64 // 32) * 34


def test_a_description_shows_what_a_person_asks_first(pulled_smollm2: PulledModel) -> None:
    rows = dict(describe(read_header(pulled_smollm2.path)))
    assert rows["Parameters"] == "134.5 M"
    assert rows["Context"] == "8,192 tokens"
    assert rows["File"] == "93.8 MiB"
    assert rows["KV cache"] == "23,040 bytes per token (f16)"
    assert "Experts" not in rows


@pytest.mark.parametrize(
    "write",
    [
        synthetic_gguf.write_llama,
        synthetic_gguf.write_qwen3,
        synthetic_gguf.write_gemma3,
        synthetic_gguf.write_qwen35,
        synthetic_gguf.write_qwen35moe,
    ],
)
def test_it_reads_the_header_of_every_synthetic_model(write: Callable[..., SyntheticModel], tmp_path: Path) -> None:
    written = write(tmp_path / "model.gguf", seed=1, vocab=300)
    header = read_header(written.path)
    assert header.architecture == written.architecture
    assert header.vocab_size == 300
    assert header.quantization == "F32"
    assert (header.key_length, header.value_length, header.head_count, header.head_count_kv) == (64, 64, 4, 2)
    assert (header.bos_token_id, header.eos_token_id) == (END_OF_TEXT, IM_END)
    assert header.chat_template == synthetic_gguf.CHAT_TEMPLATE
    assert header.context_train_tokens == synthetic_gguf.CONTEXT_TOKENS
    reader = gguf.GGUFReader(written.path)
    assert header.parameter_count == sum(tensor.n_elements for tensor in reader.tensors)


def test_it_tells_attention_layers_of_a_hybrid_from_recurrent_ones(tmp_path: Path) -> None:
    header = read_header(synthetic_gguf.write_qwen35moe(tmp_path / "model.gguf", nextn=True).path)
    assert (header.layer_count, header.nextn_layers, header.full_attention_interval) == (8, 1, 4)
    assert header.head_count_kv_per_layer == (0, 0, 0, 2, 0, 0, 0, 2)
    assert header.kv_bytes_per_token() == 2 * 2 * 2 * 64 * 2
    assert (header.expert_count, header.expert_used_count) == (8, 2)
    rows = dict(describe(header))
    assert rows["Layers"] == "8 (2 attention, 6 recurrent) + 1 draft"
    assert rows["Experts"] == "8, 2 used per token"
    assert "Recurrent state" in rows


def test_it_computes_the_known_memory_of_qwen_36_35b(header_of: Callable[[bytes], GgufHeader]) -> None:
    geometry = {
        "block_count": 41,
        "nextn_predict_layers": 1,
        "embedding_length": 2048,
        "attention.head_count": 16,
        "attention.head_count_kv": 2,
        "attention.key_length": 256,
        "attention.value_length": 256,
        "full_attention_interval": 4,
        "ssm.conv_kernel": 4,
        "ssm.inner_size": 4096,
        "ssm.state_size": 128,
        "ssm.group_count": 16,
        "ssm.time_step_rank": 32,
    }
    values = [("general.architecture", text("qwen35moe"))]
    values += [(f"qwen35moe.{key}", number(value)) for key, value in geometry.items()]
    header = header_of(gguf_file(values))
    assert header.layer_count == 40
    assert header.kv_bytes_per_token("q8_0", "q8_0") == 10_880
    assert round(header.recurrent_state_bytes / 2**20, 1) == 62.8


def test_it_takes_heads_from_a_list_per_layer(header_of: Callable[[bytes], GgufHeader]) -> None:
    header = header_of(gguf_file([*LLAMA, ("llama.attention.head_count_kv", array(U32, [8, 0, 2, 4]))]))
    assert header.head_count_kv_per_layer == (8, 0, 2, 4)
    assert header.head_count_kv == 8
    assert header.kv_bytes_per_token("f16", "f32") == 14 * 64 * (2 + 4)


def test_it_takes_recurrent_layers_from_a_list(header_of: Callable[[bytes], GgufHeader]) -> None:
    recurrent = ("llama.attention.recurrent_layers", array(BOOL, [True, False, True, False]))
    assert header_of(gguf_file([*LLAMA, recurrent])).head_count_kv_per_layer == (0, 8, 0, 8)


def test_latent_attention_keeps_no_values(header_of: Callable[[bytes], GgufHeader]) -> None:
    header = header_of(gguf_file([*LLAMA, ("llama.attention.key_length_mla", number(192))]))
    assert header.kv_bytes_per_token() == 4 * 8 * 64 * 2


@pytest.mark.parametrize(("stated", "pooling"), [(0, ""), (1, "mean"), (2, "cls"), (3, "last"), (4, "rank"), (9, "")])
def test_it_tells_what_an_embedding_model_makes_of_its_tokens(
    header_of: Callable[[bytes], GgufHeader], stated: int, pooling: str
) -> None:
    header = header_of(gguf_file([*LLAMA, ("llama.pooling_type", number(stated))]))
    assert header.pooling == pooling
    assert ("Pooling", pooling) in describe(header) or not pooling


def test_without_a_stated_file_type_the_commonest_tensor_type_counts(header_of: Callable[[bytes], GgufHeader]) -> None:
    tensors = [tensor("a", [64, 4], type_id=8), tensor("b", [32], type_id=0, offset=288)]
    header = header_of(gguf_file(LLAMA, tensors, data_bytes=288 + 128))
    assert header.quantization == "Q8_0"
    assert header.parameter_count == 288
    newer = [*LLAMA, ("general.file_type", number(999))]
    assert header_of(gguf_file(newer, tensors, data_bytes=288 + 128)).quantization == "Q8_0"


def test_a_file_that_says_little_still_has_a_header(header_of: Callable[[bytes], GgufHeader]) -> None:
    header = header_of(gguf_file([("general.architecture", text("unheard-of"))], version=2))
    assert header.name == "made"
    assert header.quantization == ""
    assert header.kv_bytes_per_token() == 0
    assert header.chat_template is None
    assert header.eos_token_id is None
    assert dict(describe(header))["Architecture"] == "unheard-of"


def test_an_unknown_cache_type_is_refused(pulled_smollm2: PulledModel) -> None:
    with pytest.raises(ValueError, match="q99"):
        read_header(pulled_smollm2.path).kv_bytes_per_token("q99", "f16")


def test_it_steps_over_a_vocabulary_larger_than_its_window(header_of: Callable[[bytes], GgufHeader]) -> None:
    rng = random.Random(1)
    tokens = ["x" * rng.randrange(40) for _ in range(200_000)]
    tokens[100_000] = "y" * (2 * WINDOW_BYTES)
    values = [*LLAMA, ("tokenizer.ggml.tokens", array(STRING, tokens)), ("llama.context_length", number(77))]
    header = header_of(gguf_file(values))
    assert header.vocab_size == 200_000
    assert header.context_train_tokens == 77


INVALID = {
    "empty": b"",
    "one letter": b"G",
    "text": b"this is a letter to a friend, not a model" * 10,
    "zeros": bytes(4096),
    "only magic": b"GGUF",
    "old version": gguf_file(LLAMA, version=1),
    "future version": gguf_file(LLAMA, version=4),
    "version zero": gguf_file(LLAMA, version=0),
    "big endian": gguf_file(LLAMA, version=3 << 24),
    "huge key count": gguf_file(LLAMA, key_count=HUGE),
    "huge tensor count": gguf_file(LLAMA, tensor_count=2**64 - 1),
    "one key too many": gguf_file(LLAMA, key_count=5)[:-10],
    "one tensor too many": gguf_file(LLAMA, tensor_count=1),
    "no architecture": gguf_file([("general.name", text("x"))]),
    "numeric architecture": gguf_file([("general.architecture", number(1))]),
    "empty key": gguf_file([*LLAMA, ("", number(1))]),
    "duplicate key": gguf_file([*LLAMA, LLAMA[0]]),
    "unknown value type": gguf_file([*LLAMA, ("k", struct.pack("<IQ", 99, 0))]),
    "string beyond the file": gguf_file([*LLAMA, ("k", struct.pack("<IQ", STRING, HUGE))]),
    "string just beyond the file": gguf_file([*LLAMA, ("k", struct.pack("<IQ", STRING, 4096))]),
    "not UTF-8": gguf_file([*LLAMA, ("k", text(b"\xff\xfe"))]),
    "array beyond the file": gguf_file([*LLAMA, ("k", array(U8, [1], count=2**62))]),
    "array that overflows": gguf_file([*LLAMA, ("k", array(U64, [1], count=2**61 + 1))]),
    "strings beyond the file": gguf_file([*LLAMA, ("k", array(STRING, ["a"], count=2**61))]),
    "last string beyond the file": gguf_file([*LLAMA, ("k", array(STRING, ["a"] * 9, count=10))]),
    "nested arrays": gguf_file([*LLAMA, ("k", struct.pack("<IIQ", ARRAY, ARRAY, 2**20) * 1000)]),
    "zero alignment": gguf_file([*LLAMA, ("general.alignment", number(0))]),
    "odd alignment": gguf_file([*LLAMA, ("general.alignment", number(24))]),
    "textual alignment": gguf_file([*LLAMA, ("general.alignment", text("32"))]),
    "many dimensions": gguf_file(LLAMA, [tensor("t", [1], dimensions=2**32 - 1)], data_bytes=64),
    "huge shape": gguf_file(LLAMA, [tensor("t", [2**40, 2**40])], data_bytes=64),
    "huge and empty shape": gguf_file(LLAMA, [tensor("t", [HUGE, 0])], data_bytes=64),
    "rows of broken blocks": gguf_file(LLAMA, [tensor("t", [33], type_id=8)], data_bytes=64),
    "tensor beyond the file": gguf_file(LLAMA, [tensor("t", [1024])], data_bytes=64),
    "tensor offset beyond the file": gguf_file(LLAMA, [tensor("t", [4], offset=HUGE)], data_bytes=64),
    "duplicate tensor": gguf_file(LLAMA, [tensor("t", [4]), tensor("t", [4])], data_bytes=64),
    "absurd layer count": gguf_file([LLAMA[0], ("llama.block_count", number(2**32 - 1))]),
    "many layers": gguf_file([LLAMA[0], ("llama.block_count", number(2**30))]),
    "more draft layers than layers": gguf_file([*LLAMA, ("llama.nextn_predict_layers", number(5))]),
    "textual layer count": gguf_file([LLAMA[0], ("llama.block_count", text("four"))]),
    "fractional layer count": gguf_file([LLAMA[0], ("llama.block_count", number(4, F32))]),
    "too few heads listed": gguf_file([*LLAMA, ("llama.attention.head_count_kv", array(U32, [8, 8]))]),
    "named heads": gguf_file([*LLAMA, ("llama.attention.head_count_kv", array(STRING, ["a"] * 4))]),
    "template is a number": gguf_file([*LLAMA, ("tokenizer.chat_template", number(1))]),
    "zero interval": gguf_file(
        [("general.architecture", text("qwen35")), ("qwen35.full_attention_interval", number(0))]
    ),
}


@pytest.mark.parametrize("content", INVALID.values(), ids=INVALID.keys())
def test_it_refuses_what_is_no_gguf_of_a_model(content: bytes, header_of: Callable[[bytes], GgufHeader]) -> None:
    with pytest.raises(GgufInvalid) as refused:
        header_of(content)
    assert "made.gguf: " in refused.value.message


def test_it_refuses_one_part_of_a_split_model_and_says_so(header_of: Callable[[bytes], GgufHeader]) -> None:
    split = [*LLAMA, ("split.no", number(0)), ("split.count", number(3))]
    with pytest.raises(GgufInvalid, match="part 1 of 3"):
        header_of(gguf_file(split))


def test_it_refuses_a_front_part_larger_than_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "wide.gguf"
    values = [*LLAMA, ("k", array(U8, [], count=FRONT_LIMIT_BYTES))]
    write_sparse(path, gguf_file(values), 4 * FRONT_LIMIT_BYTES)
    with pytest.raises(GgufInvalid):
        read_header(path)


def test_a_sparse_file_of_empty_strings_ends_in_a_refusal(tmp_path: Path) -> None:
    path = tmp_path / "hollow.gguf"
    write_sparse(path, gguf_file([*LLAMA, ("k", array(STRING, [], count=2**24))]), 2**40)
    with pytest.raises(GgufInvalid):
        read_header(path)


def test_a_file_truncated_anywhere_is_refused(hybrid_front: tuple[bytes, int], tmp_path: Path) -> None:
    front, size_bytes = hybrid_front
    path = tmp_path / "short.gguf"
    for length in [*range(200), *range(200, len(front), 97)]:
        path.write_bytes(front[:length])
        with pytest.raises(GgufInvalid):
            read_header(path)
    for length in range(len(front), size_bytes - 32, size_bytes // 20):
        write_sparse(path, front, length)
        with pytest.raises(GgufInvalid, match="truncated"):
            read_header(path)
    write_sparse(path, front, size_bytes)
    assert read_header(path).architecture == "qwen35moe"


@settings(max_examples=300, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.floats(0, 0.9999), st.integers(0, 255)), min_size=1, max_size=8))
def test_flipped_bytes_give_a_header_or_a_refusal(
    changes: list[tuple[float, int]], hybrid_front: tuple[bytes, int], tmp_path: Path
) -> None:
    front, size_bytes = hybrid_front
    damaged = bytearray(front)
    for place, value in changes:
        damaged[int(place * len(damaged))] = value
    path = tmp_path / "damaged.gguf"
    write_sparse(path, bytes(damaged), size_bytes)
    header_or_refusal(path)


@settings(max_examples=200, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 0.9999), number=st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**40, HUGE, 2**64 - 1]))
def test_absurd_numbers_in_any_place_give_a_header_or_a_refusal(
    place: float, number: int, hybrid_front: tuple[bytes, int], tmp_path: Path
) -> None:
    front, size_bytes = hybrid_front
    start = int(place * (len(front) - 8))
    path = tmp_path / "absurd.gguf"
    write_sparse(path, front[:start] + struct.pack("<Q", number) + front[start + 8 :], size_bytes)
    header_or_refusal(path)


@settings(max_examples=100, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=400))
def test_any_bytes_behind_the_magic_give_a_header_or_a_refusal(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "random.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", 3) + content)
    header_or_refusal(path)


def header_or_refusal(path: Path) -> None:
    try:
        header = read_header(path)
    except GgufInvalid:
        return
    assert describe(header)
    assert header.kv_bytes_per_token() >= 0
    assert header.recurrent_state_bytes >= 0


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    pipe, loop = tmp_path / "pipe", tmp_path / "loop"
    os.mkfifo(pipe)
    loop.symlink_to(loop)
    for path in (tmp_path, pipe, loop, tmp_path / "absent", Path("/dev/zero"), tmp_path / "nul\0byte"):
        with pytest.raises(ModelFileUnreadable):
            read_header(path)
