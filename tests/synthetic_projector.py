"""Tiny random projectors (mmproj files) that libmtmd loads, for tests that need an image's embeddings and not its meaning.

`write_qwen_projector` goes with the Qwen 3.5 models: a span's tokens stand on a grid and share positions. With
`write_gemma_projector` they stand in a row and see each other.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

TEXT_EMBEDDING = 128
PATCH_PIXELS = 16
WIDTH, HEADS, FEED_FORWARD = 64, 2, 96


def write_qwen_projector(path: Path, *, seed: int = 0, layers: int = 1) -> None:
    """An image of w × h pixels makes about (w / 32) · (h / 32) tokens, at least 8."""
    file = _Projector(path, "qwen3vl_merger", seed, layers, image_size=64)
    file.writer.add_uint32("clip.vision.spatial_merge_size", 2)
    file.tensor("v.patch_embd.weight.1", WIDTH, 3, PATCH_PIXELS, PATCH_PIXELS)
    file.tensor("v.patch_embd.bias", WIDTH)
    for il in range(layers):
        file.pair(f"v.blk.{il}.attn_qkv", 3 * WIDTH, WIDTH)
    file.pair("mm.0", 4 * WIDTH, 4 * WIDTH)
    file.pair("mm.2", TEXT_EMBEDDING, 4 * WIDTH)
    file.close()


def write_gemma_projector(path: Path, *, seed: int = 0, layers: int = 1) -> None:
    """Every image makes 16 tokens."""
    file = _Projector(path, "gemma3", seed, layers, image_size=128)
    file.writer.add_uint32("clip.vision.projector.scale_factor", 2)
    file.tensor("v.patch_embd.bias", WIDTH)
    for il in range(layers):
        for name in ("attn_q", "attn_k", "attn_v"):
            file.pair(f"v.blk.{il}.{name}", WIDTH, WIDTH)
    file.tensor("mm.input_projection.weight", WIDTH, TEXT_EMBEDDING)
    file.values("mm.soft_emb_norm.weight", np.ones(WIDTH))
    file.close()


class _Projector:
    """A vision transformer's file in the making; what all types have is written first."""

    def __init__(self, path: Path, kind: str, seed: int, layers: int, image_size: int) -> None:
        self._rng = np.random.default_rng(seed)
        writer = self.writer = gguf.GGUFWriter(path, "clip")
        writer.add_bool("clip.has_vision_encoder", True)
        writer.add_string("clip.projector_type", kind)
        writer.add_bool("clip.use_gelu", True)
        for key, value in (
            ("embedding_length", WIDTH),
            ("feed_forward_length", FEED_FORWARD),
            ("block_count", layers),
            ("projection_dim", TEXT_EMBEDDING),
            ("attention.head_count", HEADS),
            ("image_size", image_size),
            ("patch_size", PATCH_PIXELS),
        ):
            writer.add_uint32(f"clip.vision.{key}", value)
        writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
        writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
        writer.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])
        self.tensor("v.patch_embd.weight", WIDTH, 3, PATCH_PIXELS, PATCH_PIXELS)
        self.values("v.position_embd.weight", self._rng.standard_normal(((image_size // PATCH_PIXELS) ** 2, WIDTH)))
        self._norm("v.post_ln")
        for il in range(layers):
            self._norm(f"v.blk.{il}.ln1")
            self._norm(f"v.blk.{il}.ln2")
            self.pair(f"v.blk.{il}.attn_out", WIDTH, WIDTH)
            self.pair(f"v.blk.{il}.ffn_up", FEED_FORWARD, WIDTH)
            self.pair(f"v.blk.{il}.ffn_down", WIDTH, FEED_FORWARD)

    def pair(self, name: str, rows: int, columns: int) -> None:
        self.tensor(f"{name}.weight", rows, columns)
        self.tensor(f"{name}.bias", rows)

    def tensor(self, name: str, *extents: int) -> None:
        self.values(name, self._rng.standard_normal(extents) / np.sqrt(np.prod(extents[1:]) or 1))

    def values(self, name: str, values: np.ndarray) -> None:
        self.writer.add_tensor(name, values.astype(np.float32))

    def _norm(self, name: str) -> None:
        self.values(f"{name}.weight", np.ones(WIDTH))
        self.values(f"{name}.bias", np.zeros(WIDTH))

    def close(self) -> None:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()
