"""What a model takes of a device's memory in one form: predicted from its GGUF header alone, no file, no driver.

For previews, and for choosing where a model goes; the engine plans the same by llama.cpp's own simulation before it loads
(`python -m engines.runtime.memory --plan`), and that has the last word. Weights, KV and recurrent state are exact for the
architectures of the catalogue; compute buffers follow llama.cpp's graphs (pools/ledger_compute.py) within a few percent.
The arithmetic is in pools/ledger_predict.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import Any

import gguf

from pools.gguf_weights import WeightSizes

SCRATCH_SEQUENCES, MOST_SEQUENCES, MOST_CHECKPOINTS, DEVICE_CANDIDATES = 2, 256, 128, 128  # engines.config's
CELL_BLOCK = 256  # llama.cpp rounds contexts up to this
ALL_LAYERS = -1
ALL_SLOTS = 64  # the most that there are
USUAL_MICRO_BATCH_TOKENS = 512  # engines.config's
_STATE_VALUE_BYTES = 4


@dataclass(frozen=True)
class Ledger:
    """Bytes that one engine takes of one device, by purpose.

    `expert_bytes` are weights too: on the host those that a card could not hold. `mapped_bytes` is the part of both that the
    host's page cache holds and can drop. `cache_bytes` is the budget for parked states, reached in use and not at load.
    """

    weights_bytes: int = 0
    expert_bytes: int = 0
    kv_bytes: int = 0
    recurrent_bytes: int = 0
    compute_bytes: int = 0
    output_bytes: int = 0
    draft_bytes: int = 0
    projector_bytes: int = 0
    cache_bytes: int = 0
    mapped_bytes: int = 0

    @property
    def loaded_bytes(self) -> int:
        """All that is taken once the model is loaded."""
        return self.total_bytes - self.cache_bytes

    @property
    def total_bytes(self) -> int:
        return sum(getattr(self, name) for name in _TAKEN)

    @property
    def kept_bytes(self) -> int:
        """What is taken for good: not mapped from the file."""
        return self.total_bytes - self.mapped_bytes

    def by_kind(self) -> dict[str, int]:
        """Bytes by purpose; what is 0 is left out."""
        return {name.removesuffix("_bytes"): size for name in _TAKEN if (size := getattr(self, name))}

    def __add__(self, other: Ledger) -> Ledger:
        return Ledger(*(getattr(self, name) + getattr(other, name) for name in _LEDGER_FIELDS))


_LEDGER_FIELDS = tuple(field.name for field in dataclasses.fields(Ledger))
_TAKEN = tuple(name for name in _LEDGER_FIELDS if name != "mapped_bytes")


@dataclass(frozen=True)
class Prediction:
    """Both sides of a placement; `device` is empty without a card. `estimated`: the header did not tell sizes by layer."""

    device: Ledger
    host: Ledger
    estimated: bool = False


@dataclass(frozen=True)
class Form:
    """How a model is to be loaded, in the words of EngineConfig, as far as memory depends on it.

    `draft_tokens` 0: nobody drafts; `uses_draft_head`: the drafts come from the model's own head, if it has one.
    `copies_weights`: the card works as CUDA does: it computes large batches of layers left to the host, and needs room for their
    weights; and it unpacks keys and values that are kept in less than 16 bits. `sampling` is host where the model's defaults ask
    for whole rows of logits anyway. `micro_batch_tokens` 0: as many as its card allows (pools.micro_batch); counted as 512, the
    fewest.
    """

    gpu_layers: int = ALL_LAYERS
    cpu_moe_layers: int = 0
    slots: int = 4
    context_tokens: int = 4096
    kv_type_k: str = "f16"
    kv_type_v: str = "f16"
    checkpoints: int = -1
    draft_tokens: int = 0
    uses_draft_head: bool = False
    batch_tokens: int = 512
    micro_batch_tokens: int = USUAL_MICRO_BATCH_TOKENS
    whole_vocabulary_slots: int = -1
    cache_tokens: int = 0
    sampling: str = "auto"
    host_cache_bytes: int = 1 << 30
    projector_bytes: int = 0
    pooling: str = ""
    mmap: bool = True
    copies_weights: bool = True

    @property
    def cells(self) -> int:
        tokens = self.context_tokens + self.micro_batch if self.pooling else self.context_tokens * self.slots
        return _whole_blocks(self.cache_tokens or tokens)

    @property
    def draft_cells(self) -> int:
        """Of the draft head's context: guessed rows come on top of the target's."""
        return _whole_blocks(self.cells + self.decoding_sequences * self.draft_tokens)

    @property
    def micro_batch(self) -> int:
        return min(self.micro_batch_tokens or USUAL_MICRO_BATCH_TOKENS, self.batch_tokens)

    @property
    def samples_on_device(self) -> bool:
        wanted = self.gpu_layers != 0 if self.sampling == "auto" else self.sampling == "backend"
        return wanted and not self.pooling

    @property
    def kept_checkpoints(self) -> int:
        """One for each slot, and two, or as many as is said."""
        return min(self.slots + 2, MOST_CHECKPOINTS) if self.checkpoints < 0 else self.checkpoints

    @property
    def decoding_sequences(self) -> int:
        return self.slots + self.whole_row_sequences

    @property
    def whole_row_sequences(self) -> int:
        """Beside the slots, for requests that need whole rows of logits: a quarter of them, or as many as is said."""
        if not self.samples_on_device:
            return 0
        wanted = max(1, self.slots // 4) if self.whole_vocabulary_slots < 0 else self.whole_vocabulary_slots
        return min(wanted, self.slots, max(1, MOST_SEQUENCES - SCRATCH_SEQUENCES - self.slots - self.kept_checkpoints))

    @property
    def sequences(self) -> int:
        return 1 if self.pooling else self.decoding_sequences + self.kept_checkpoints + SCRATCH_SEQUENCES

    @property
    def outputs(self) -> int:
        """Rows of logits that a step may ask for."""
        if self.pooling:
            return self.micro_batch
        return max(self.sequences, self.slots * (1 + self.draft_tokens))


@dataclass(frozen=True)
class ModelFacts:
    """Of a GGUF header, what memory depends on. `kv_heads` has one entry per trunk layer, 0 for recurrent ones."""

    embedding_length: int
    feed_forward_length: int
    head_count: int
    key_length: int
    value_length: int
    kv_heads: tuple[int, ...]
    draft_layers: int
    vocab_size: int
    experts: int
    experts_used: int
    recurrent_state_bytes: int
    convolution_length: int
    inner_length: int
    context_train_tokens: int
    weights: WeightSizes
    size_bytes: int
    estimated: bool = False

    @classmethod
    def from_header(cls, header: Mapping[str, Any], size_bytes: int) -> ModelFacts:
        """Of a header as `pools.services` keeps it (JSON). What an older release did not write down is estimated."""
        ssm = header.get("ssm") or {}
        kv_heads = tuple(header.get("head_count_kv_per_layer") or ())
        inner, state = ssm.get("inner_size", 0), ssm.get("state_size", 0)
        convolution = inner + 2 * ssm.get("group_count", 0) * state if inner else 0
        per_layer = (max(ssm.get("conv_kernel", 0) - 1, 0) * convolution + inner * state) * _STATE_VALUE_BYTES
        has_values = header.get("caches_values", True)
        stored, drafts = header.get("weights"), header.get("nextn_layers", 0)
        return cls(
            embedding_length=header.get("embedding_length", 0),
            feed_forward_length=header.get("feed_forward_length") or 3 * header.get("embedding_length", 0),
            head_count=header.get("head_count", 0),
            key_length=header.get("key_length", 0),
            value_length=header.get("value_length", 0) if has_values else 0,
            kv_heads=kv_heads,
            draft_layers=drafts,
            vocab_size=header.get("vocab_size", 0),
            experts=header.get("expert_count", 0),
            experts_used=header.get("expert_used_count", 0),
            recurrent_state_bytes=per_layer if inner else 0,
            convolution_length=convolution,
            inner_length=inner,
            context_train_tokens=header.get("context_train_tokens", 0),
            weights=_stored(stored)
            if stored
            else _spread(size_bytes, len(kv_heads) + drafts, bool(header.get("expert_count"))),
            size_bytes=size_bytes,
            estimated=not stored,
        )

    @property
    def layers(self) -> int:
        """Of the trunk."""
        return len(self.kv_heads)

    @property
    def whole_row_slots(self) -> int:
        """How many slots may serve requests that need whole rows of logits, unless somebody says it: a sequence of its own costs
        hardly any memory but for a recurrent state, so there a quarter (-1), else all."""
        return -1 if self.recurrent_state_bytes else ALL_SLOTS

    @property
    def placed_layers(self) -> int:
        """How many layers `gpu_layers` counts: trunk, draft heads (loaded or not) and the output."""
        return self.layers + self.draft_layers + 1

    @cached_property
    def is_hybrid(self) -> bool:
        return self.recurrent_state_bytes > 0 and 0 in self.kv_heads

    @cached_property
    def layer_tails(self) -> tuple[int, ...]:
        """Bytes of the trunk's layers from each on, experts left out; one entry more than layers, 0 for the last."""
        return _tails(self.weights.layer_bytes[: self.layers])

    @cached_property
    def expert_tails(self) -> tuple[int, ...]:
        """The same for their experts."""
        return _tails(self.weights.expert_bytes[: self.layers])

    @cached_property
    def attention_tails(self) -> dict[int, tuple[int, ...]]:
        """For each number of key/value heads, how many of the trunk's layers from each on have so many; 0: recurrent ones."""
        return {count: _tails([int(heads == count) for heads in self.kv_heads]) for count in set(self.kv_heads)}

    def kv_row_bytes(self, heads: int, type_k: str, type_v: str) -> int:
        """One layer's K and V of one token."""
        return row_bytes(heads * self.key_length, type_k) + row_bytes(heads * self.value_length, type_v)


def _tails(values: Sequence[int]) -> tuple[int, ...]:
    return (*accumulate(reversed(values), initial=0),)[::-1]


def _whole_blocks(tokens: int) -> int:
    return -(-tokens // CELL_BLOCK) * CELL_BLOCK


@cache
def row_bytes(elements: int, cache_type: str) -> int:
    """Bytes of `elements` values of a cache type named as in GGUF. Raises ValueError for an unknown one."""
    try:
        block_elements, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[cache_type.upper()]]
    except KeyError:
        raise ValueError(f"unknown cache type {cache_type!r}") from None
    return int(-(-elements // block_elements) * block_bytes)


def _stored(values: Mapping[str, Any]) -> WeightSizes:
    return WeightSizes(
        values["input_bytes"],
        values["output_bytes"],
        tuple(values["layer_bytes"]),
        tuple(values["expert_bytes"]),
        values["is_tied"],
    )


def _spread(size_bytes: int, blocks: int, has_experts: bool) -> WeightSizes:
    """Sizes of a file whose header was kept before sizes by layer were: most of a model of experts is experts."""
    layer_bytes = size_bytes * 9 // 10 // max(blocks, 1)
    experts = layer_bytes * 9 // 10 if has_experts else 0
    side_bytes = size_bytes // 20
    return WeightSizes(side_bytes, side_bytes, (layer_bytes - experts,) * blocks, (experts,) * blocks, is_tied=False)
