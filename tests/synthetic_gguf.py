"""Writes tiny random GGUF models that llama.cpp loads and decodes, for tests that need an engine and not a mind.

Five architectures: `write_llama`, `write_qwen3` (dense), `write_gemma3` (sliding windows), `write_qwen35` and
`write_qwen35moe` (hybrid, with or without a NextN draft block). Each writes a few MB in a fraction of a second and
returns a `SyntheticModel`.

With `tie_free=True` the next token is a fixed function of the last one, by a wide margin: row next(t) of the output
matrix is the embedding of t, and what layers add to the residual stream is scaled down by `residual_scale`. The text
then runs through a cycle (tests/synthetic_vocabulary.py). With `tie_free=False` weights are plain random, so that
logits depend on all of the context.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from tests.synthetic_vocabulary import (
    END_OF_TEXT,
    FIRST_FILLER,
    FIRST_SPECIAL,
    IM_END,
    MERGES,
    NEWLINE,
    SPECIAL_TEXTS,
    successors,
    token_texts,
)

CONTEXT_TOKENS = 8192
HEAD_LENGTH = 64
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class SyntheticModel:
    """A written model; `successors[t]` is the greedy next token after t, empty for a model that is not tie-free."""

    path: Path
    architecture: str
    vocab: int
    successors: tuple[int, ...]
    eos_token_id: int = IM_END

    def next_token(self, token: int) -> int:
        return self.successors[token]

    def follow(self, token: int, count: int) -> list[int]:
        """The `count` tokens that greedy decoding gives after `token`."""
        followed = []
        for _ in range(count):
            token = self.successors[token]
            followed.append(token)
        return followed

    def answer_bytes(self, count: int) -> bytes:
        """The text of the first `count` tokens of a greedy answer to any chat prompt (it ends with a newline)."""
        return bytes(self.follow(NEWLINE, count))  # tokens of the cycle are bytes


@dataclass(frozen=True)
class Shape:
    """The sizes that all architectures share; head length is HEAD_LENGTH."""

    vocab: int
    layers: int
    embedding: int
    feed_forward: int
    heads: int
    kv_heads: int


@dataclass(frozen=True)
class Weights:
    """How weights are drawn; see the module's text for `tie_free`."""

    seed: int
    tie_free: bool
    residual_scale: float
    utf8_cycle: bool
    wrong_drafts: float = 0.0


def write_llama(
    path: Path,
    *,
    seed: int = 0,
    layers: int = 2,
    vocab: int = 512,
    tie_free: bool = False,
    residual_scale: float = 0.05,
    utf8_cycle: bool = False,
) -> SyntheticModel:
    """Writes a plain Llama."""
    shape = Shape(vocab, layers, embedding=128, feed_forward=256, heads=4, kv_heads=2)
    model = _ModelFile(path, "llama", shape, Weights(seed, tie_free, residual_scale, utf8_cycle))
    for il in range(layers):
        model.norms(il, "attn_norm", "ffn_norm")
        model.attention(il)
        model.feed_forward(il)
    return model.finish()


def write_qwen3(
    path: Path,
    *,
    seed: int = 0,
    layers: int = 2,
    vocab: int = 512,
    tie_free: bool = False,
    residual_scale: float = 0.05,
    utf8_cycle: bool = False,
) -> SyntheticModel:
    """Writes a dense Qwen 3 (per-head query and key norms)."""
    shape = Shape(vocab, layers, embedding=128, feed_forward=256, heads=4, kv_heads=2)
    model = _ModelFile(path, "qwen3", shape, Weights(seed, tie_free, residual_scale, utf8_cycle))
    for il in range(layers):
        model.norms(il, "attn_norm", "ffn_norm")
        model.head_norms(il)
        model.attention(il)
        model.feed_forward(il)
    return model.finish()


def write_gemma3(
    path: Path,
    *,
    seed: int = 0,
    layers: int = 6,
    vocab: int = 512,
    tie_free: bool = False,
    residual_scale: float = 0.05,
    utf8_cycle: bool = False,
    window_tokens: int = 64,
) -> SyntheticModel:
    """Writes a Gemma 3: every sixth layer attends to all of the context, the others to a sliding window."""
    shape = Shape(vocab, layers, embedding=128, feed_forward=256, heads=4, kv_heads=2)
    weights = Weights(seed, tie_free, residual_scale, utf8_cycle)
    model = _ModelFile(path, "gemma3", shape, weights)
    model.file.add_sliding_window(window_tokens)
    for il in range(layers):
        model.norms(il, "attn_norm", "ffn_norm")
        # these norms stand behind the residual writers and would undo their scale, so they carry it
        model.norms(il, "post_attention_norm", "post_ffw_norm", scale=residual_scale if tie_free else 1.0)
        model.head_norms(il)
        model.attention(il)
        model.feed_forward(il)
    return model.finish()


def write_qwen35(
    path: Path,
    *,
    seed: int = 0,
    layers: int = 8,
    vocab: int = 512,
    tie_free: bool = False,
    residual_scale: float = 0.05,
    utf8_cycle: bool = False,
    nextn: bool = False,
    wrong_drafts: float = 0.0,
) -> SyntheticModel:
    """Writes a hybrid Qwen 3.5: every fourth layer is full attention, the others keep recurrent state.

    `nextn` adds a draft block behind the trunk; in a tie-free model its drafts are right but behind a share `wrong_drafts` of
    the tokens.
    """
    shape = Shape(vocab, layers, embedding=128, feed_forward=192, heads=4, kv_heads=2)
    weights = Weights(seed, tie_free, residual_scale, utf8_cycle, wrong_drafts)
    return _write_hybrid(path, "qwen35", shape, weights, nextn, lambda model, il: model.feed_forward(il))


def write_qwen35moe(
    path: Path,
    *,
    seed: int = 0,
    layers: int = 8,
    vocab: int = 512,
    tie_free: bool = False,
    residual_scale: float = 0.05,
    utf8_cycle: bool = False,
    nextn: bool = False,
    wrong_drafts: float = 0.0,
) -> SyntheticModel:
    """Writes a hybrid Qwen 3.5 mixture of 8 experts, 2 used per token, and a shared one; else like `write_qwen35`."""
    shape = Shape(vocab, layers, embedding=128, feed_forward=192, heads=4, kv_heads=2)
    weights = Weights(seed, tie_free, residual_scale, utf8_cycle, wrong_drafts)
    return _write_hybrid(path, "qwen35moe", shape, weights, nextn, lambda model, il: model.experts(il))


def _write_hybrid(
    path: Path,
    architecture: str,
    shape: Shape,
    weights: Weights,
    nextn: bool,
    feed_forward: Callable[["_ModelFile", int], None],
) -> SyntheticModel:
    model = _ModelFile(path, architecture, shape, weights, nextn_layers=1 if nextn else 0)
    model.hybrid_keys()
    for il in range(shape.layers + model.nextn_layers):
        model.norms(il, "attn_norm", "post_attention_norm")
        if il >= shape.layers or (il + 1) % model.attention_interval == 0:
            model.head_norms(il)
            model.attention(il, gated=True)
        else:
            model.linear_attention(il)
        feed_forward(model, il)
    if nextn:
        model.draft_head(shape.layers)
    return model.finish()


class _ModelFile:
    """A GGUF file in the making: draws weights in a fixed order, so that a seed means the same bytes."""

    attention_interval = 4
    state_length, key_groups, value_heads, conv_kernel = 32, 2, 4, 4
    experts_total, experts_used, expert_feed_forward = 8, 2, 32

    def __init__(self, path: Path, architecture: str, shape: Shape, weights: Weights, nextn_layers: int = 0) -> None:
        if shape.vocab < FIRST_FILLER:
            raise ValueError(f"a vocabulary of {shape.vocab} does not hold the {FIRST_FILLER} tokens of the tokenizer")
        self.path, self.architecture, self.shape, self.weights = path, architecture, shape, weights
        self.nextn_layers = nextn_layers
        self.rng = np.random.default_rng(weights.seed)
        self.file = gguf.GGUFWriter(path, architecture)
        self._successors: tuple[int, ...] = ()
        self._geometry()
        self._tokenizer()
        self._embeddings()

    def finish(self) -> SyntheticModel:
        self.file.write_header_to_file()
        self.file.write_kv_data_to_file()
        self.file.write_tensors_to_file()
        self.file.close()
        return SyntheticModel(self.path, self.architecture, self.shape.vocab, self._successors)

    def norms(self, il: int, *names: str, scale: float = 1.0) -> None:
        for name in names:
            self._ones(f"blk.{il}.{name}.weight", self.shape.embedding, scale)

    def head_norms(self, il: int) -> None:
        self._ones(f"blk.{il}.attn_q_norm.weight", HEAD_LENGTH)
        self._ones(f"blk.{il}.attn_k_norm.weight", HEAD_LENGTH)

    def attention(self, il: int, *, gated: bool = False) -> None:
        shape = self.shape
        query_rows, kv_rows = shape.heads * HEAD_LENGTH, shape.kv_heads * HEAD_LENGTH
        self._matrix(f"blk.{il}.attn_q.weight", query_rows * (2 if gated else 1), shape.embedding)
        self._matrix(f"blk.{il}.attn_k.weight", kv_rows, shape.embedding)
        self._matrix(f"blk.{il}.attn_v.weight", kv_rows, shape.embedding)
        self._residual_writer(f"blk.{il}.attn_output.weight", shape.embedding, query_rows)

    def feed_forward(self, il: int) -> None:
        shape = self.shape
        self._matrix(f"blk.{il}.ffn_gate.weight", shape.feed_forward, shape.embedding)
        self._matrix(f"blk.{il}.ffn_up.weight", shape.feed_forward, shape.embedding)
        self._residual_writer(f"blk.{il}.ffn_down.weight", shape.embedding, shape.feed_forward)

    def experts(self, il: int) -> None:
        width, inner, count = self.shape.embedding, self.expert_feed_forward, self.experts_total
        self._matrix(f"blk.{il}.ffn_gate_inp.weight", count, width)
        self._matrix(f"blk.{il}.ffn_gate_exps.weight", count, inner, width)
        self._matrix(f"blk.{il}.ffn_up_exps.weight", count, inner, width)
        self._residual_writer(f"blk.{il}.ffn_down_exps.weight", count, width, inner)
        self._matrix(f"blk.{il}.ffn_gate_inp_shexp.weight", width)
        self._matrix(f"blk.{il}.ffn_gate_shexp.weight", inner, width)
        self._matrix(f"blk.{il}.ffn_up_shexp.weight", inner, width)
        self._residual_writer(f"blk.{il}.ffn_down_shexp.weight", width, inner)

    def linear_attention(self, il: int) -> None:
        width, value_rows = self.shape.embedding, self.value_heads * self.state_length
        mixed_rows = 2 * self.key_groups * self.state_length + value_rows
        self._matrix(f"blk.{il}.attn_qkv.weight", mixed_rows, width)
        self._matrix(f"blk.{il}.attn_gate.weight", value_rows, width)
        self._matrix(f"blk.{il}.ssm_conv1d.weight", mixed_rows, self.conv_kernel)
        self._matrix(f"blk.{il}.ssm_beta.weight", self.value_heads, width)
        self._matrix(f"blk.{il}.ssm_alpha.weight", self.value_heads, width)
        self._tensor(f"blk.{il}.ssm_dt.bias", self.rng.standard_normal(self.value_heads))
        # the state decays by exp(a * softplus(...)): slow enough to remember hundreds of tokens
        self._tensor(f"blk.{il}.ssm_a", -self.rng.uniform(0.005, 0.1, self.value_heads))
        self._ones(f"blk.{il}.ssm_norm.weight", self.state_length)
        self._residual_writer(f"blk.{il}.ssm_out.weight", width, value_rows)

    def draft_head(self, il: int) -> None:
        """The NextN tensors of block `il`: the draft sees the last token's embedding and ignores the trunk's state."""
        width = self.shape.embedding
        self._tensor(f"blk.{il}.nextn.eh_proj.weight", np.eye(width, 2 * width))
        for name in ("enorm", "hnorm", "shared_head_norm"):
            self._ones(f"blk.{il}.nextn.{name}.weight", width)
        if self.weights.wrong_drafts:
            # A generator of its own, so that the other weights are those of the model with right drafts.
            rng = np.random.default_rng(self.weights.seed + 1)
            wrong = rng.random(self.shape.vocab) < self.weights.wrong_drafts
            embedding = np.where(
                wrong[:, None], rng.standard_normal(self._token_embedding.shape), self._token_embedding
            )
            self._tensor(f"blk.{il}.nextn.embed_tokens.weight", embedding)

    def hybrid_keys(self) -> None:
        file, architecture = self.file, self.architecture
        file.add_rope_dimension_count(HEAD_LENGTH // 2)
        file.add_rope_dimension_sections([6, 5, 5, 0])
        file.add_ssm_conv_kernel(self.conv_kernel)
        file.add_ssm_state_size(self.state_length)
        file.add_ssm_group_count(self.key_groups)
        file.add_ssm_time_step_rank(self.value_heads)
        file.add_ssm_inner_size(self.value_heads * self.state_length)
        file.add_uint32(f"{architecture}.full_attention_interval", self.attention_interval)
        if self.nextn_layers:
            file.add_nextn_predict_layers(self.nextn_layers)
        if architecture.endswith("moe"):
            file.add_expert_count(self.experts_total)
            file.add_expert_used_count(self.experts_used)
            file.add_expert_feed_forward_length(self.expert_feed_forward)
            file.add_expert_shared_feed_forward_length(self.expert_feed_forward)

    def _geometry(self) -> None:
        file, shape = self.file, self.shape
        file.add_type("model")
        file.add_name(f"synthetic {self.architecture} seed {self.weights.seed}")
        file.add_file_type(gguf.LlamaFileType.ALL_F32)
        file.add_vocab_size(shape.vocab)
        file.add_context_length(CONTEXT_TOKENS)
        file.add_block_count(shape.layers + self.nextn_layers)
        file.add_embedding_length(shape.embedding)
        file.add_feed_forward_length(shape.feed_forward)
        file.add_head_count(shape.heads)
        file.add_head_count_kv(shape.kv_heads)
        file.add_key_length(HEAD_LENGTH)
        file.add_value_length(HEAD_LENGTH)
        file.add_layer_norm_rms_eps(1e-6)
        file.add_rope_freq_base(10000.0)

    def _tokenizer(self) -> None:
        kinds = [gguf.TokenType.NORMAL] * self.shape.vocab
        kinds[FIRST_SPECIAL:FIRST_FILLER] = [gguf.TokenType.CONTROL] * len(SPECIAL_TEXTS)
        self.file.add_tokenizer_model("gpt2")
        self.file.add_tokenizer_pre("qwen2")
        self.file.add_token_list(token_texts(self.shape.vocab))
        self.file.add_token_types(kinds)
        self.file.add_token_merges(list(MERGES))
        self.file.add_bos_token_id(END_OF_TEXT)
        self.file.add_eos_token_id(IM_END)
        self.file.add_pad_token_id(END_OF_TEXT)
        self.file.add_add_bos_token(False)
        self.file.add_chat_template(CHAT_TEMPLATE)

    def _embeddings(self) -> None:
        vocab, width = self.shape.vocab, self.shape.embedding
        embedding = self.rng.standard_normal((vocab, width))
        output = self.rng.standard_normal((vocab, width)) / np.sqrt(width)
        if self.weights.tie_free:
            self._successors = successors(self.weights.seed, vocab, utf8_cycle=self.weights.utf8_cycle)
            output[list(self._successors)] = embedding / 16
        self._tensor("token_embd.weight", embedding)
        self._tensor("output.weight", output)
        self._ones("output_norm.weight", width)
        self._token_embedding = embedding

    def _matrix(self, name: str, *extents: int, scale: float = 1.0) -> None:
        self._tensor(name, self.rng.standard_normal(extents) * (scale / np.sqrt(extents[-1])))

    def _residual_writer(self, name: str, *extents: int) -> None:
        self._matrix(name, *extents, scale=self.weights.residual_scale if self.weights.tie_free else 1.0)

    def _ones(self, name: str, length: int, scale: float = 1.0) -> None:
        self._tensor(name, np.full(length, scale))

    def _tensor(self, name: str, values: npt.NDArray[np.float64]) -> None:
        self.file.add_tensor(name, values.astype(np.float32))
