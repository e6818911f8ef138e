"""Tiny random models that embed or rank: a BERT, with or without a classifier head, and a Qwen 3 that judges yes or no.

The BERT's words are `w0`, `w1`, …: one token each, so that a text's tokens are known. Everything else is unknown to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

from tests.synthetic_gguf import Shape, SyntheticModel, Weights, _ModelFile

PAD, UNKNOWN, CLASS, SEPARATOR = 0, 1, 2, 3
FIRST_WORD = 4
ENCODER_CONTEXT_TOKENS = 256
RERANK_TEMPLATE = "<|im_start|>\nQuery: {query}\nDocument: {document}<|im_end|>\n"


@dataclass(frozen=True)
class Classifier:
    """The head of a ranking BERT: score = output · tanh(dense · h + dense_bias) + output_bias."""

    dense: np.ndarray
    dense_bias: np.ndarray
    output: np.ndarray
    output_bias: np.ndarray

    def score(self, hidden: np.ndarray) -> float:
        """`hidden` is the first token's last state, shape (embedding,)."""
        return float((self.output @ np.tanh(self.dense @ hidden + self.dense_bias) + self.output_bias)[0])


def write_bert(
    path: Path, *, seed: int = 0, layers: int = 2, vocab: int = 512, pooling: gguf.PoolingType = gguf.PoolingType.MEAN
) -> SyntheticModel:
    """Writes an encoder without a head."""
    return _encoder(path, seed, layers, vocab, pooling).finish()


def write_bert_ranker(path: Path, *, seed: int = 0, layers: int = 2, vocab: int = 512) -> Classifier:
    """Writes an encoder with a classifier of one output."""
    model = _encoder(path, seed, layers, vocab, gguf.PoolingType.RANK)
    width = model.shape.embedding
    head = Classifier(
        model.rng.standard_normal((width, width)) / np.sqrt(width),
        model.rng.standard_normal(width) * 0.1,
        model.rng.standard_normal((1, width)) / np.sqrt(width),
        model.rng.standard_normal(1) * 0.1,
    )
    for name, values in (
        ("cls.weight", head.dense),
        ("cls.bias", head.dense_bias),
        ("cls.output.weight", head.output),
        ("cls.output.bias", head.output_bias),
    ):
        model._tensor(name, values)
    model.finish()
    return head


def write_qwen3_ranker(path: Path, *, seed: int = 0, layers: int = 2, vocab: int = 512) -> SyntheticModel:
    """Writes a decoder that judges query and document by two outputs, yes and no, and brings the prompt for it."""
    shape = Shape(vocab, layers, embedding=256, feed_forward=256, heads=4, kv_heads=2)
    model = _ModelFile(path, "qwen3", shape, Weights(seed, False, 0.05, False))
    model.file.add_pooling_type(gguf.PoolingType.RANK)
    model.file.add_classifier_output_labels(["yes", "no"])
    model.file.add_string("tokenizer.chat_template.rerank", RERANK_TEMPLATE)
    for il in range(layers):
        model.norms(il, "attn_norm", "ffn_norm")
        model.head_norms(il)
        model.attention(il)
        model.feed_forward(il)
    model._matrix("cls.output.weight", 2, shape.embedding)
    return model.finish()


def _encoder(path: Path, seed: int, layers: int, vocab: int, pooling: gguf.PoolingType) -> _EncoderFile:
    shape = Shape(vocab, layers, embedding=128, feed_forward=256, heads=2, kv_heads=2)
    model = _EncoderFile(path, "bert", shape, Weights(seed, False, 0.05, False))
    model.file.add_pooling_type(pooling)
    for il in range(layers):
        model.encoder_layer(il)
    return model


class _EncoderFile(_ModelFile):
    """A BERT: word pieces, learned positions, biases everywhere, norms behind the sums."""

    def encoder_layer(self, il: int) -> None:
        width, inner = self.shape.embedding, self.shape.feed_forward
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            self._matrix(f"blk.{il}.{name}.weight", width, width)
            self._tensor(f"blk.{il}.{name}.bias", self.rng.standard_normal(width) * 0.1)
        self._matrix(f"blk.{il}.ffn_up.weight", inner, width)
        self._tensor(f"blk.{il}.ffn_up.bias", self.rng.standard_normal(inner) * 0.1)
        self._matrix(f"blk.{il}.ffn_down.weight", width, inner)
        self._tensor(f"blk.{il}.ffn_down.bias", self.rng.standard_normal(width) * 0.1)
        for name in ("attn_output_norm", "layer_output_norm"):
            self._norm(f"blk.{il}.{name}")

    def _norm(self, name: str) -> None:
        self._ones(f"{name}.weight", self.shape.embedding)
        self._tensor(f"{name}.bias", np.zeros(self.shape.embedding))

    def _geometry(self) -> None:
        file, shape = self.file, self.shape
        file.add_type("model")
        file.add_file_type(gguf.LlamaFileType.ALL_F32)
        file.add_vocab_size(shape.vocab)
        file.add_context_length(ENCODER_CONTEXT_TOKENS)
        file.add_block_count(shape.layers)
        file.add_embedding_length(shape.embedding)
        file.add_feed_forward_length(shape.feed_forward)
        file.add_head_count(shape.heads)
        file.add_layer_norm_eps(1e-6)
        file.add_causal_attention(False)

    def _tokenizer(self) -> None:
        words = [f"▁w{number}" for number in range(self.shape.vocab - FIRST_WORD)]
        special = [gguf.TokenType.CONTROL] * FIRST_WORD
        self.file.add_tokenizer_model("bert")
        self.file.add_tokenizer_pre("default")
        self.file.add_token_list(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words])
        self.file.add_token_types([*special, *[gguf.TokenType.NORMAL] * len(words)])
        self.file.add_token_type_count(2)
        self.file.add_pad_token_id(PAD)
        self.file.add_unk_token_id(UNKNOWN)
        self.file.add_bos_token_id(CLASS)
        self.file.add_sep_token_id(SEPARATOR)

    def _embeddings(self) -> None:
        vocab, width = self.shape.vocab, self.shape.embedding
        self._tensor("token_embd.weight", self.rng.standard_normal((vocab, width)))
        self._tensor("token_types.weight", self.rng.standard_normal((2, width)) * 0.1)
        self._tensor("position_embd.weight", self.rng.standard_normal((ENCODER_CONTEXT_TOKENS, width)) * 0.5)
        self._norm("token_embd_norm")
