"""What a GGUF file says of its model: architecture, geometry, quantisation, context, chat template.

A `GgufHeader` holds what the file states, with the loader's own defaults filled in; the methods derive the memory that
a context of the model takes. It knows nothing of engines or devices.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import gguf

from pools.errors import GgufInvalid
from pools.gguf_reader import ArrayValue, GgufFront, read_front, type_name
from pools.gguf_weights import WeightSizes, weight_sizes

LAYER_LIMIT = 4096  # loaders stop at 512; keeps work per layer bounded for a hostile file
_INT_LIMIT = 2**31 - 1
_GUESSED_FILE_TYPE = 1024
_DELTA_NET_ARCHITECTURES = frozenset({"qwen3next", "qwen35", "qwen35moe"})
_DEFAULT_ATTENTION_INTERVAL = 4
_STATE_VALUE_BYTES = 4  # recurrent state is kept in f32
_POOLING_TYPES = {1: "mean", 2: "cls", 3: "last", 4: "rank"}


@dataclass(frozen=True)
class SsmGeometry:
    """The recurrent part of a hybrid model as the file states it; all zero for a model without one."""

    conv_kernel: int
    inner_size: int
    state_size: int
    group_count: int
    time_step_rank: int


@dataclass(frozen=True)
class GgufHeader:
    """One GGUF file's facts. Counts are 0 and texts empty where the file says nothing.

    `layer_count` is the trunk's; `nextn_layers` (draft heads) come on top. `head_count_kv` is the largest of any layer,
    `head_count_kv_per_layer` has one entry per trunk layer, 0 where it keeps no KV.
    """

    path: Path
    size_bytes: int
    architecture: str
    name: str
    quantization: str
    parameter_count: int
    context_train_tokens: int
    layer_count: int
    nextn_layers: int
    embedding_length: int
    head_count: int
    head_count_kv: int
    head_count_kv_per_layer: tuple[int, ...]
    key_length: int
    value_length: int
    vocab_size: int
    tokenizer: str
    chat_template: str | None
    bos_token_id: int | None
    eos_token_id: int | None
    expert_count: int
    expert_used_count: int
    sliding_window_tokens: int
    full_attention_interval: int
    ssm: SsmGeometry
    caches_values: bool  # False where the value cache is folded into the key cache (latent attention)
    pooling: str = ""  # mean, cls, last or rank for a model that embeds or scores; "" for one that generates
    feed_forward_length: int = 0  # of an expert where the model has experts
    weights: WeightSizes | None = None

    @property
    def is_hybrid(self) -> bool:
        """True if some layers keep recurrent state instead of, or beside, KV."""
        return self.ssm.inner_size > 0

    @property
    def recurrent_layer_count(self) -> int:
        return sum(1 for heads in self.head_count_kv_per_layer if heads == 0) if self.is_hybrid else 0

    @property
    def recurrent_state_bytes(self) -> int:
        """Recurrent state of one sequence: convolution window and state matrix of every recurrent layer, in f32.

        Exact for the Qwen hybrids and plain Mamba layers; families with other state shapes differ.
        """
        ssm = self.ssm
        window_values = max(ssm.conv_kernel - 1, 0) * (ssm.inner_size + 2 * ssm.group_count * ssm.state_size)
        layer_values = window_values + ssm.inner_size * ssm.state_size
        return self.recurrent_layer_count * layer_values * _STATE_VALUE_BYTES

    def kv_bytes_per_token(self, type_k: str = "f16", type_v: str = "f16") -> int:
        """Bytes of KV cache that one token takes in a context of the trunk, for cache types named as in GGUF.

        Counts the layers that keep KV, sliding-window layers in full (they stop growing at the window, so for such
        models this is an upper bound); draft heads keep theirs in a context of their own. Raises ValueError for an
        unknown type name.
        """
        value_length = self.value_length if self.caches_values else 0
        return sum(
            _row_bytes(heads * self.key_length, type_k) + _row_bytes(heads * value_length, type_v)
            for heads in self.head_count_kv_per_layer
        )


def read_header(path: Path) -> GgufHeader:
    """Reads the header of the GGUF file at `path` without touching its tensor data (0.1 s for a 152k vocabulary).

    Raises ModelFileUnreadable if no regular file can be read there; GgufInvalid if it is not a complete GGUF, is one
    part of a split model, or contradicts itself. Nothing else, whatever the bytes are.
    """
    front = read_front(path)
    try:
        return _header(path, front)
    except GgufInvalid as error:
        raise GgufInvalid(f"{path}: {error.message}") from None


def describe(header: GgufHeader) -> list[tuple[str, str]]:
    """Rows of (label, value) that show a header to a person, in reading order; rows without content are left out."""
    layers = str(header.layer_count)
    if header.is_hybrid:
        attention = header.layer_count - header.recurrent_layer_count
        layers += f" ({attention} attention, {header.recurrent_layer_count} recurrent)"
    if header.nextn_layers:
        layers += f" + {header.nextn_layers} draft"
    heads = f"{header.head_count} query, {header.head_count_kv} key/value of {header.key_length}"
    experts = f"{header.expert_count}, {header.expert_used_count} used per token" if header.expert_count else ""
    kv_bytes = header.kv_bytes_per_token()
    rows = [
        ("Name", header.name),
        ("Architecture", header.architecture),
        ("Parameters", _short_count(header.parameter_count)),
        ("Quantisation", header.quantization),
        ("File", f"{header.size_bytes / 2**20:,.1f} MiB"),
        ("Context", f"{header.context_train_tokens:,} tokens" if header.context_train_tokens else ""),
        ("Layers", layers),
        ("Embedding", f"{header.embedding_length:,}"),
        ("Heads", heads),
        ("Experts", experts),
        ("Vocabulary", f"{header.vocab_size:,} ({header.tokenizer})" if header.tokenizer else ""),
        ("Chat template", "yes" if header.chat_template else "no"),
        ("Pooling", header.pooling),
        ("KV cache", f"{kv_bytes:,} bytes per token (f16)" if kv_bytes else ""),
        (
            "Recurrent state",
            f"{header.recurrent_state_bytes / 2**20:,.2f} MiB per sequence" if header.is_hybrid else "",
        ),
    ]
    return [(label, value) for label, value in rows if value]


def _header(path: Path, front: GgufFront) -> GgufHeader:
    facts = _Facts(front)
    if facts.integer("split.count", default=1) > 1:
        number = facts.integer("split.no") + 1
        raise GgufInvalid(f"part {number} of {facts.integer('split.count')} of a split model; merge the parts first")
    architecture = facts.architecture
    block_count, nextn_layers = facts.of_model("block_count"), facts.of_model("nextn_predict_layers")
    if block_count > LAYER_LIMIT or nextn_layers > block_count:
        raise GgufInvalid(f"{block_count} layers with {nextn_layers} draft layers among them are not a model")
    head_count = max(facts.per_layer("attention.head_count", block_count), default=0)
    embedding_length = facts.of_model("embedding_length")
    default_head_length = embedding_length // head_count if head_count else 0
    kv_heads = _kv_heads_per_layer(facts, head_count, block_count, block_count - nextn_layers)
    tokens = front.metadata.get("tokenizer.ggml.tokens")
    return GgufHeader(
        path=path,
        size_bytes=front.size_bytes,
        architecture=architecture,
        name=facts.text("general.name") or facts.text("general.basename") or path.stem,
        quantization=_quantization(facts, front),
        parameter_count=sum(tensor.element_count for tensor in front.tensors),
        context_train_tokens=facts.of_model("context_length"),
        layer_count=block_count - nextn_layers,
        nextn_layers=nextn_layers,
        embedding_length=embedding_length,
        head_count=head_count,
        head_count_kv=max(kv_heads, default=0),
        head_count_kv_per_layer=kv_heads,
        key_length=facts.of_model("attention.key_length", default_head_length),
        value_length=facts.of_model("attention.value_length", default_head_length),
        vocab_size=tokens.count if isinstance(tokens, ArrayValue) else facts.of_model("vocab_size"),
        tokenizer=facts.text("tokenizer.ggml.model"),
        chat_template=facts.text("tokenizer.chat_template") or None,
        bos_token_id=facts.optional_integer("tokenizer.ggml.bos_token_id"),
        eos_token_id=facts.optional_integer("tokenizer.ggml.eos_token_id"),
        expert_count=facts.of_model("expert_count"),
        expert_used_count=facts.of_model("expert_used_count"),
        sliding_window_tokens=facts.of_model("attention.sliding_window"),
        full_attention_interval=_attention_interval(facts),
        ssm=_ssm_geometry(facts),
        caches_values=facts.of_model("attention.key_length_mla") == 0,
        pooling=_POOLING_TYPES.get(facts.of_model("pooling_type"), ""),
        feed_forward_length=facts.of_model("expert_feed_forward_length", facts.of_model("feed_forward_length")),
        weights=weight_sizes(front.tensors, block_count),
    )


class _Facts:
    """Typed access to a file's metadata; every wrong type or absurd number is GgufInvalid."""

    def __init__(self, front: GgufFront) -> None:
        self._metadata = front.metadata
        self.architecture = self.text("general.architecture")
        if not self.architecture:
            raise GgufInvalid("it names no architecture")

    def text(self, key: str) -> str:
        value = self._metadata.get(key, "")
        if not isinstance(value, str):
            raise GgufInvalid(f"{key} is not a text")
        return value

    def optional_integer(self, key: str) -> int | None:
        value = self._metadata.get(key)
        return None if value is None else _checked_integer(key, value)

    def integer(self, key: str, default: int = 0) -> int:
        value = self.optional_integer(key)
        return default if value is None else value

    def of_model(self, key: str, default: int = 0) -> int:
        """An integer of the model's own architecture; of an array the largest item."""
        key = f"{self.architecture}.{key}"
        if isinstance(self._metadata.get(key), ArrayValue):
            return max(self.items(key), default=default)
        return self.integer(key, default)

    def has(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self._metadata

    def per_layer(self, key: str, layer_count: int) -> tuple[int, ...]:
        """One integer per layer: the array in the file, or its single value for all; empty if the key is absent."""
        if not self.has(key):
            return ()
        key = f"{self.architecture}.{key}"
        if not isinstance(self._metadata[key], ArrayValue):
            return (self.integer(key),) * layer_count
        values = self.items(key)
        if len(values) < layer_count:
            raise GgufInvalid(f"{key} has {len(values)} items for {layer_count} layers")
        return values[:layer_count]

    def items(self, key: str) -> tuple[int, ...]:
        value = self._metadata[key]
        if not isinstance(value, ArrayValue) or len(value.items) != value.count:
            raise GgufInvalid(f"{key} is not a short array of numbers")
        return tuple(_checked_integer(key, item) for item in value.items)


def _checked_integer(key: str, value: object) -> int:
    if not isinstance(value, int) or not 0 <= value <= _INT_LIMIT:
        shown = f"an array of {value.count}" if isinstance(value, ArrayValue) else repr(value)[:40]
        raise GgufInvalid(f"{key} is {shown}, not an integer from 0 to {_INT_LIMIT}")
    return int(value)


def _ssm_geometry(facts: _Facts) -> SsmGeometry:
    return SsmGeometry(
        conv_kernel=facts.of_model("ssm.conv_kernel"),
        inner_size=facts.of_model("ssm.inner_size"),
        state_size=facts.of_model("ssm.state_size"),
        group_count=facts.of_model("ssm.group_count"),
        time_step_rank=facts.of_model("ssm.time_step_rank"),
    )


def _kv_heads_per_layer(facts: _Facts, head_count: int, block_count: int, layer_count: int) -> tuple[int, ...]:
    """Key/value heads of each trunk layer, 0 for recurrent ones; without the key all query heads have their own."""
    kv_heads = facts.per_layer("attention.head_count_kv", block_count) or (head_count,) * block_count
    recurrent = _recurrent_layers(facts, layer_count)
    return tuple(0 if il in recurrent else heads for il, heads in enumerate(kv_heads[:layer_count]))


def _attention_interval(facts: _Facts) -> int:
    """Every n-th layer has full attention; 0 where the architecture has no such rule."""
    if facts.architecture not in _DELTA_NET_ARCHITECTURES:
        return facts.of_model("full_attention_interval")
    interval = facts.of_model("full_attention_interval", _DEFAULT_ATTENTION_INTERVAL)
    if interval == 0:
        raise GgufInvalid("full_attention_interval is 0")
    return interval


def _recurrent_layers(facts: _Facts, layer_count: int) -> frozenset[int]:
    """Layers that keep recurrent state by the file's own list or by the architecture's interval.

    Other hybrids say it by a head_count_kv of 0, which needs no entry here.
    """
    listed = facts.per_layer("attention.recurrent_layers", layer_count)
    if listed:
        return frozenset(il for il, recurrent in enumerate(listed) if recurrent)
    if facts.architecture in _DELTA_NET_ARCHITECTURES:
        interval = _attention_interval(facts)
        return frozenset(il for il in range(layer_count) if (il + 1) % interval)
    return frozenset()


def _quantization(facts: _Facts, front: GgufFront) -> str:
    """The file type by its common name (Q4_K_M), or the tensor type that holds most elements where it is not stated."""
    file_type = facts.optional_integer("general.file_type")
    if file_type is not None and file_type < _GUESSED_FILE_TYPE:
        try:
            name: str = gguf.LlamaFileType(file_type).name
            return name.removeprefix("MOSTLY_").removeprefix("ALL_")
        except ValueError:
            pass  # newer than the table: what the tensors are is still known
    elements: Counter[int] = Counter()
    for tensor in front.tensors:
        elements[tensor.type_id] += tensor.element_count
    return type_name(elements.most_common(1)[0][0]) if elements else ""


def _row_bytes(elements: int, cache_type: str) -> int:
    block_elements: int
    block_bytes: int
    try:
        block_elements, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[cache_type.upper()]]
    except KeyError:
        raise ValueError(f"unknown cache type {cache_type!r}") from None
    return -(-elements // block_elements) * block_bytes


def _short_count(count: int) -> str:
    for unit, divisor in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= divisor:
            return f"{count / divisor:.1f} {unit}"
    return str(count)
