"""Writes random-weight GGUFs in Q4_0 with the real Qwen 3.5 vocabulary: speed and sizes are real, the text is not.

`dense` and `hybrid` are small enough for two CPU cores and have a vocabulary that makes sampling matter; `35b-a3b` has the
true shape of Qwen 3.6 35B-A3B (35 B parameters, 20 GB). A model is a list of tensors (`tensors`), each drawn out of one
pool of random blocks, so that writing runs at the speed of the disk. `kv` and `35b-a3b-kv` are for moving states.

Weights are centred and every block's share of the residual stream is kept, so the answer depends on all of the prompt:
streams with different prompts write different tokens and wake different experts. Only tokens that are text on their own
are ever the likeliest, so each token shows as text.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from bench.errors import BenchError
from bench.vocabulary import ROOT, Vocabulary, qwen35

FOLDER = ROOT / "build" / "models"
ATTENTION_INTERVAL, CONV_KERNEL = 4, 4
ALIGNMENT = 32  # of tensors in a GGUF
BLOCK_WEIGHTS, BLOCK_BYTES = 32, 18  # Q4_0: a half-precision scale, then 16 bytes of two weights each
POOL_BLOCKS = 1 << 21
NIBBLE_DEVIATION = math.sqrt((15**2 - 1) / 12)  # of 1 … 15, uniform; 8 stands for zero
# What they add to the residual stream is kept small where a token's embedding must stay recognisable in it.
RESIDUAL_WRITERS = ("attn_output", "ssm_out", "ffn_down", "ffn_down_exps", "ffn_down_shexp")
SMALL = 0.05
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Shape:
    """The sizes of a model; linear, state and expert sizes are 0 where the architecture has none.

    With `knows_next` one token follows another by a fixed permutation, by a wide margin, and the draft head knows it but for
    the tokens that `set_wrong_drafts` chose; nothing is left of the context in the text then.
    """

    architecture: str
    layers: int
    embedding: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_length: int
    key_groups: int = 0
    value_heads: int = 0
    state_length: int = 0
    experts: int = 0
    experts_used: int = 0
    draft_layers: int = 0
    context_tokens: int = 262144
    knows_next: bool = False

    @property
    def is_hybrid(self) -> bool:
        return self.state_length > 0


SHAPES = {
    "dense": Shape("qwen3", 8, 512, 1536, 8, 4, 64),
    "hybrid": Shape("qwen35", 8, 512, 1536, 8, 2, 64, key_groups=4, value_heads=8, state_length=64),
    "kv": Shape("qwen3", 8, 64, 128, 8, 8, 128),
    "35b-a3b": Shape("qwen35moe", 40, 2048, 512, 16, 2, 256, 16, 32, 128, experts=256, experts_used=8, draft_layers=1),
    "hybrid-drafts": Shape(
        "qwen35", 8, 512, 1536, 8, 2, 64, 4, 8, 64, draft_layers=1, context_tokens=8192, knows_next=True
    ),
    "35b-a3b-drafts": Shape(
        "qwen35moe",
        40,
        2048,
        512,
        16,
        2,
        256,
        16,
        32,
        128,
        experts=256,
        experts_used=8,
        draft_layers=1,
        knows_next=True,
    ),
    # The true shape of the state of Qwen 3.6 35B-A3B (10,880 B a token in q8_0, 62.8 MiB recurrent) under small weights.
    "35b-a3b-kv": Shape("qwen35moe", 40, 256, 64, 16, 2, 256, 16, 32, 128, experts=8, experts_used=2),
    "tiny-moe-drafts": Shape(
        *("qwen35moe", 4, 32, 32, 2, 1, 32, 1, 2, 32), experts=8, experts_used=2, draft_layers=1, knows_next=True
    ),
    # 25 parts of which a card holds 16: mostly experts, as in the large ones.
    "moe-scaled": Shape("qwen35moe", 12, 256, 256, 8, 2, 64, 2, 8, 64, experts=128, experts_used=4),
    "27b": Shape("qwen35", 64, 5120, 17408, 24, 4, 256, 16, 48, 128, draft_layers=1),
    "tiny-dense": Shape("qwen3", 1, 32, 64, 2, 1, 32, context_tokens=8192),
    "tiny-hybrid": Shape("qwen35", 4, 32, 64, 2, 1, 32, 1, 2, 32, context_tokens=8192),
    "tiny-moe": Shape("qwen35moe", 4, 32, 32, 2, 1, 32, 1, 2, 32, experts=8, experts_used=2, draft_layers=1),
}


def named_model(name: str) -> Path:
    """The file of a shape, written on first use under build/models. Raises BenchError for a name that is none."""
    if name not in SHAPES:
        raise BenchError(f"no synthetic model is called {name!r}; known are {', '.join(SHAPES)}")
    own = hashlib.sha256(f"{SHAPES[name]}{Path(__file__).read_text()}".encode()).hexdigest()[:10]
    path = FOLDER / f"{name}-{own}.gguf"
    if not path.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".part")
        write(partial, SHAPES[name], qwen35())
        partial.rename(path)
    return path


def write_empty(path: Path, shape: Shape, vocabulary: Vocabulary) -> None:
    """Writes a model's front and leaves its weights a hole in the file: enough for whoever plans without loading."""
    file, listed = _begun(path, shape, vocabulary)
    file.close()
    data_bytes = sum(-(-tensor.size_bytes // ALIGNMENT) * ALIGNMENT for tensor in listed)
    with path.open("r+b") as front:
        end = front.seek(0, 2)
        front.truncate(-(-end // ALIGNMENT) * ALIGNMENT + data_bytes)


def _begun(path: Path, shape: Shape, vocabulary: Vocabulary) -> tuple[gguf.GGUFWriter, list[Tensor]]:
    """A file with everything but tensor data, and the tensors in the order in which theirs must come."""
    file = gguf.GGUFWriter(path, shape.architecture)
    _add_sizes(file, shape, len(vocabulary.tokens))
    _add_tokenizer(file, vocabulary)
    listed = list(tensors(shape, len(vocabulary.tokens)))
    for tensor in listed:
        kind = gguf.GGMLQuantizationType.F32 if tensor.is_plain else gguf.GGMLQuantizationType.Q4_0
        file.add_tensor_info(tensor.name, tensor.extents, np.dtype(np.float32), tensor.size_bytes, raw_dtype=kind)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_ti_data_to_file()
    return file, listed


def write(path: Path, shape: Shape, vocabulary: Vocabulary, seed: int = 0) -> None:
    """Writes one model. The same shape and seed give the same bytes."""
    file, listed = _begun(path, shape, vocabulary)
    pool = BlockPool(seed)
    for tensor in listed:
        if tensor.is_plain:
            file.write_tensor_data(_plain_values(tensor, pool.rng))
        elif tensor.role == "embedding":
            embedding = pool.draw(tensor)
            file.write_tensor_data(embedding)
        elif tensor.role == "draft_embedding":
            file.write_tensor_data(embedding)
        elif tensor.role == "output":
            rows = _of_predecessors(embedding, vocabulary, seed) if shape.knows_next else pool.draw(tensor)
            file.write_tensor_data(_only_text(rows, vocabulary))
        else:
            file.write_tensor_data(pool.draw(tensor))
    file.close()


@dataclass(frozen=True)
class Tensor:
    """A tensor to write: numpy's order of extents, and what its values are for."""

    name: str
    extents: tuple[int, ...]
    role: str = "matrix"

    @property
    def weights(self) -> int:
        return math.prod(self.extents)

    @property
    def size_bytes(self) -> int:
        return self.weights * 4 if self.is_plain else self.weights // BLOCK_WEIGHTS * BLOCK_BYTES

    @property
    def is_plain(self) -> bool:
        """Kept in 32-bit floats: vectors, and what llama.cpp wants that way."""
        return self.role not in ("matrix", "small_matrix", "embedding", "draft_embedding", "output")


def tensors(shape: Shape, vocab: int) -> Iterator[Tensor]:
    """All tensors of a model, in file order."""
    width = shape.embedding
    yield Tensor("token_embd.weight", (vocab, width), "embedding")
    yield Tensor("output.weight", (vocab, width), "output")
    yield Tensor("output_norm.weight", (width,), "ones")
    for il in range(shape.layers + shape.draft_layers):
        for name, extents, role in _block(shape, is_draft=il >= shape.layers, il=il):
            is_small = shape.knows_next and name.removesuffix(".weight") in RESIDUAL_WRITERS
            yield Tensor(f"blk.{il}.{name}", extents, "small_matrix" if is_small else role)
        if shape.knows_next and il >= shape.layers:
            yield Tensor(f"blk.{il}.nextn.embed_tokens.weight", (vocab, width), "draft_embedding")


def _block(shape: Shape, *, is_draft: bool, il: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
    width = shape.embedding
    yield "attn_norm.weight", (width,), "ones"
    yield ("post_attention_norm.weight" if shape.is_hybrid else "ffn_norm.weight"), (width,), "ones"
    if shape.is_hybrid and not is_draft and (il + 1) % ATTENTION_INTERVAL:
        yield from _linear_attention(shape)
    else:
        yield from _attention(shape)
    yield from _experts(shape) if shape.experts else _feed_forward(shape)
    if is_draft:
        yield "nextn.eh_proj.weight", (width, 2 * width), "first_half" if shape.knows_next else "matrix"
        for name in ("enorm", "hnorm", "shared_head_norm"):
            yield f"nextn.{name}.weight", (width,), "ones"


def _attention(shape: Shape) -> Iterator[tuple[str, tuple[int, ...], str]]:
    query, kv = shape.heads * shape.head_length, shape.kv_heads * shape.head_length
    yield "attn_q.weight", (query * 2 if shape.is_hybrid else query, shape.embedding), "matrix"
    yield "attn_k.weight", (kv, shape.embedding), "matrix"
    yield "attn_v.weight", (kv, shape.embedding), "matrix"
    yield "attn_output.weight", (shape.embedding, query), "matrix"
    yield "attn_q_norm.weight", (shape.head_length,), "ones"
    yield "attn_k_norm.weight", (shape.head_length,), "ones"


def _linear_attention(shape: Shape) -> Iterator[tuple[str, tuple[int, ...], str]]:
    values = shape.value_heads * shape.state_length
    mixed = 2 * shape.key_groups * shape.state_length + values
    yield "attn_qkv.weight", (mixed, shape.embedding), "matrix"
    yield "attn_gate.weight", (values, shape.embedding), "matrix"
    yield "ssm_conv1d.weight", (mixed, CONV_KERNEL), "normal"
    yield "ssm_beta.weight", (shape.value_heads, shape.embedding), "normal"
    yield "ssm_alpha.weight", (shape.value_heads, shape.embedding), "normal"
    yield "ssm_dt.bias", (shape.value_heads,), "normal"
    yield "ssm_a", (shape.value_heads,), "decay"
    yield "ssm_norm.weight", (shape.state_length,), "ones"
    yield "ssm_out.weight", (shape.embedding, values), "matrix"


def _feed_forward(shape: Shape) -> Iterator[tuple[str, tuple[int, ...], str]]:
    yield "ffn_gate.weight", (shape.feed_forward, shape.embedding), "matrix"
    yield "ffn_up.weight", (shape.feed_forward, shape.embedding), "matrix"
    yield "ffn_down.weight", (shape.embedding, shape.feed_forward), "matrix"


def _experts(shape: Shape) -> Iterator[tuple[str, tuple[int, ...], str]]:
    width, inner, count = shape.embedding, shape.feed_forward, shape.experts
    yield "ffn_gate_inp.weight", (count, width), "normal"
    yield "ffn_gate_exps.weight", (count, inner, width), "matrix"
    yield "ffn_up_exps.weight", (count, inner, width), "matrix"
    yield "ffn_down_exps.weight", (count, width, inner), "matrix"
    yield "ffn_gate_inp_shexp.weight", (width,), "normal"
    yield "ffn_gate_shexp.weight", (inner, width), "matrix"
    yield "ffn_up_shexp.weight", (inner, width), "matrix"
    yield "ffn_down_shexp.weight", (width, inner), "matrix"


class BlockPool:
    """Random Q4_0 blocks; a tensor is a run of them from a random place, with the scale its width asks for."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        # never 0: weights of -8 … 7 have a mean of -0.5, and a deep model then drifts to one token
        low, high = (self.rng.integers(1, 16, (POOL_BLOCKS, 16), dtype=np.uint8) for _ in range(2))
        self._nibbles = low | (high << 4)
        self._scaled: dict[float, npt.NDArray[np.uint8]] = {}

    def draw(self, tensor: Tensor) -> npt.NDArray[np.uint8]:
        """Raw bytes of the tensor, one row per row."""
        deviation = 1.0 if tensor.role == "embedding" else 1 / math.sqrt(tensor.extents[-1])
        if tensor.role == "small_matrix":
            deviation *= SMALL
        blocks = self._blocks(deviation)
        wanted = tensor.weights // BLOCK_WEIGHTS
        parts = []
        while wanted:
            start = int(self.rng.integers(0, POOL_BLOCKS // 2))
            parts.append(blocks[start : start + min(wanted, POOL_BLOCKS // 2)])
            wanted -= len(parts[-1])
        return np.concatenate(parts).reshape(*tensor.extents[:-1], -1)

    def _blocks(self, deviation: float) -> npt.NDArray[np.uint8]:
        if deviation not in self._scaled:
            blocks = np.empty((POOL_BLOCKS, BLOCK_BYTES), np.uint8)
            blocks[:, :2] = np.frombuffer(np.float16(deviation / NIBBLE_DEVIATION).tobytes(), np.uint8)
            blocks[:, 2:] = self._nibbles
            self._scaled[deviation] = blocks
        return self._scaled[deviation]


def text_circle(vocabulary: Vocabulary, seed: int = 0) -> npt.NDArray[np.int64]:
    """The tokens of a `knows_next` model's text: each is followed by the next, the last by the first, in a random order."""
    return np.random.default_rng(seed).permutation(np.flatnonzero(vocabulary.plain))


def _of_predecessors(embedding: npt.NDArray[np.uint8], vocabulary: Vocabulary, seed: int) -> npt.NDArray[np.uint8]:
    """Output rows that like the embedding of the one token before."""
    circle = text_circle(vocabulary, seed)
    rows = embedding.copy()
    rows[np.roll(circle, -1)] = embedding[circle]
    blocks = rows.reshape(len(rows), -1, BLOCK_BYTES)
    scales = np.ascontiguousarray(blocks[:, :, :2]).view(np.float16) / np.float16(16)
    blocks[:, :, :2] = scales.view(np.uint8).reshape(*scales.shape[:2], 2)
    return rows


def set_wrong_drafts(path: Path, arcs: Sequence[tuple[npt.NDArray[np.int64], float]], seed: int = 0) -> None:
    """Makes the draft head of a `knows_next` model wrong behind a share of the tokens of each arc of its text.

    The file itself is written, which nobody may have loaded. Elsewhere drafts are right.
    """
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path, "r+").tensors}
    rows = next(tensor.data for name, tensor in tensors.items() if name.endswith("nextn.embed_tokens.weight"))
    true = np.array(tensors["token_embd.weight"].data)
    rng = np.random.default_rng(seed)
    rows[:] = true
    for tokens, share in arcs:
        wrong = tokens[rng.random(len(tokens)) < share]
        rows[wrong] = np.roll(true, 1, axis=0)[wrong]
    rows.flush()


def _only_text(rows: npt.NDArray[np.uint8], vocabulary: Vocabulary) -> npt.NDArray[np.uint8]:
    """Gives every token that is no text of its own a logit of zero, which is never the largest."""
    silent = ~np.array(vocabulary.plain)
    rows.reshape(len(rows), -1, BLOCK_BYTES)[silent, :, :2] = 0
    return rows


def _plain_values(tensor: Tensor, rng: np.random.Generator) -> Floats:
    if tensor.role == "ones":
        return np.ones(tensor.extents, np.float32)
    if tensor.role == "first_half":
        return np.eye(*tensor.extents, dtype=np.float32)
    if tensor.role == "decay":
        # the state decays by exp(a * softplus(…)): slow enough to remember hundreds of tokens
        return -rng.uniform(0.005, 0.1, tensor.extents).astype(np.float32)
    values = rng.standard_normal(tensor.extents, dtype=np.float32)
    return values / np.float32(math.sqrt(tensor.extents[-1]))


def _add_sizes(file: gguf.GGUFWriter, shape: Shape, vocab: int) -> None:
    file.add_type("model")
    file.add_name(f"synthetic {shape.architecture}")
    file.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    file.add_quantization_version(gguf.GGML_QUANT_VERSION)
    file.add_vocab_size(vocab)
    file.add_context_length(shape.context_tokens)
    file.add_block_count(shape.layers + shape.draft_layers)
    file.add_embedding_length(shape.embedding)
    file.add_feed_forward_length(shape.feed_forward)
    file.add_head_count(shape.heads)
    file.add_head_count_kv(shape.kv_heads)
    file.add_key_length(shape.head_length)
    file.add_value_length(shape.head_length)
    file.add_layer_norm_rms_eps(1e-6)
    file.add_rope_freq_base(1e7)
    if shape.is_hybrid:
        _add_hybrid_sizes(file, shape)
    if shape.experts:
        file.add_expert_count(shape.experts)
        file.add_expert_used_count(shape.experts_used)
        file.add_expert_feed_forward_length(shape.feed_forward)
        file.add_expert_shared_feed_forward_length(shape.feed_forward)
    if shape.draft_layers:
        file.add_nextn_predict_layers(shape.draft_layers)


def _add_hybrid_sizes(file: gguf.GGUFWriter, shape: Shape) -> None:
    pairs = shape.head_length // 8  # a quarter of each head is rotated
    first = (pairs + 2) // 3
    second = (pairs - first + 1) // 2
    file.add_rope_dimension_count(2 * pairs)
    file.add_rope_dimension_sections([first, second, pairs - first - second, 0])
    file.add_ssm_conv_kernel(CONV_KERNEL)
    file.add_ssm_state_size(shape.state_length)
    file.add_ssm_group_count(shape.key_groups)
    file.add_ssm_time_step_rank(shape.value_heads)
    file.add_ssm_inner_size(shape.value_heads * shape.state_length)
    file.add_uint32(f"{shape.architecture}.full_attention_interval", ATTENTION_INTERVAL)


def _add_tokenizer(file: gguf.GGUFWriter, vocabulary: Vocabulary) -> None:
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre(vocabulary.pre)
    file.add_token_list(vocabulary.tokens)
    file.add_token_types(vocabulary.types)
    file.add_token_merges(vocabulary.merges)
    file.add_eos_token_id(vocabulary.end_token)
    file.add_pad_token_id(vocabulary.end_token)
    file.add_add_bos_token(False)
    file.add_chat_template(vocabulary.template)
