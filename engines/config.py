"""What crosses the boundary of an engine's process, as frozen dataclasses with one section per receiver.

Knows nothing of Django, Celery or llama.cpp. Both sides import these classes; nobody passes loose dicts.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engines.browser_guard import is_loopback
from engines.config_fields import ConfigInvalid, check_bounds, read_fields
from engines.cuda_images import capability

__all__ = ["ConfigInvalid", "EngineConfig", "SlotView"]

# --- received by the engine: its configuration ---------------------------------------------------

SPLIT_MODES = ("none", "layer", "row")
SPECULATIONS = ("none", "mtp", "lookup", "auto")
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
POOLINGS = ("", "mean", "cls", "last", "rank")
SAMPLING_PATHS = ("auto", "host", "backend")
# Ranges of state leave and enter a context through these.
SCRATCH_SEQUENCES = 2
MOST_CHECKPOINTS = 128
# llama.cpp's LLAMA_MAX_SEQ.
MOST_SEQUENCES = 256
MIN_SECRET_BYTES = 16
KV_TYPES = ("f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "f32", "bf16")


_BOUNDS: Mapping[str, tuple[float, float]] = {
    "port": (0, 65535),
    "rpc_port": (0, 65535),
    "rpc_connections": (1, 4096),
    "rpc_idle_s": (1, 86400),
    "rpc_stall_s": (0.1, 3600),
    "max_state_bytes": (1024, 1 << 36),
    "store_port": (0, 65535),
    "store_wait_s": (0.05, 60),
    "park_idle_s": (0, 86400),
    "park_stop_s": (0, 60),
    "slots": (1, 64),
    "context_tokens": (16, 1 << 22),
    "cache_tokens": (0, 1 << 24),
    "batch_tokens": (16, 1 << 16),
    "micro_batch_tokens": (16, 1 << 16),
    "threads": (0, 1024),
    "gpu_layers": (-1, 4096),
    "main_gpu": (0, 255),
    "cpu_moe_layers": (0, 4096),
    "device_candidates": (8, 4096),
    "whole_vocabulary_slots": (-1, 64),
    "checkpoints": (-1, MOST_CHECKPOINTS),
    "checkpoint_spacing_tokens": (0, 1 << 20),
    "checkpoint_min_tokens": (-1, 1 << 20),
    "host_cache_bytes": (0, 1 << 44),
    "draft_tokens": (1, 16),
    "embedding_inputs": (1, 256),
    "image_max_tokens": (0, 1 << 16),
    "kv_block_tokens": (0, 1 << 14),
    "default_max_tokens": (0, 1 << 22),
    "default_temperature": (0, 5),
    "default_top_p": (0, 1),
    "default_top_k": (0, 1_000_000),
    "default_min_p": (0, 1),
    "queue_limit": (0, 65536),
    "request_deadline_s": (1, 86400),
    "max_body_bytes": (1024, 1 << 32),
}


@dataclass(frozen=True)
class EngineConfig:
    """All an engine process needs to start alone. Written by the head as JSON, read by `python -m engines.runtime`.

    `context_tokens` bounds one request (prompt + answer); `cache_tokens` is the number of KV cells that all slots share
    (0: context_tokens × slots). `threads` 0 means all cores but one. `checkpoints` states of earlier cuts are kept inside the
    context (for models that cannot drop a suffix; -1: one for each slot, and two), where one that is nearer than
    `checkpoint_spacing_tokens` to its conversation's next goes first, and none in a prompt's first `checkpoint_min_tokens`
    (-1: as many as take 0.15 s); `host_cache_bytes` bounds what is kept in host memory behind them, where on a CPU
    `put_away_idle` moves idle conversations between requests. `full_window` keeps all of a sliding-window layer's past, so
    that prefixes can be shared and cut anywhere; without it such layers take less memory, and only whole states are reused.
    `sampling` says where candidates come from (auto: on the device if layers are there,
    unless the defaults ask for whole rows of logits anyway). Where it is the device, at most `whole_vocabulary_slots` requests
    at once may need whole rows (log probabilities, top_k 0 or above `device_candidates`, a bias that lifts): each takes a
    sequence beside those of the `slots`, of which still no more run at once (-1: a quarter of the slots, at least one).
    `devices` names the accelerators to use (empty: all), `tensor_split` their shares, `cpu_moe_layers` how many layers from
    the first keep their experts in host memory, `tensor_overrides` are regex=DEVICE entries of which the first match counts.
    `card_arch` is the architecture of the card (sm_86) that it is meant for: with a llama.cpp that has no code for it, it refuses
    to start (empty: it asks the driver which cards there are).
    `slot_save_path` is the folder for slots that clients save by name (empty: they cannot).
    `speculation` drafts up to `draft_tokens` tokens that one step then verifies: by the model's own head (mtp), out of the text
    so far (lookup), or by the head if there is one, else by lookup (auto); how many is chosen by what pays. Models with
    recurrent state take its memory once more for each token of a draft.
    `pooling` makes it an engine of embeddings (mean, cls, last) or of relevance scores (rank), which generates nothing: up to
    `embedding_inputs` inputs share a step of at most `batch_tokens` and `micro_batch_tokens`.
    `projector_path` names the projector (mmproj) through which the model sees images (empty: it takes text only);
    `image_max_tokens` bounds what one image becomes (0: as the projector says).
    Whoever has `http_secret` may use the engine over HTTP (`Authorization: Bearer`; /health is open to all); without one it is
    served on loopback and nowhere else.
    `rpc_port` 0 turns the binary protocol off; whoever has `rpc_secret` may use it, and without one it is open on loopback and
    nowhere else. A connection is closed after `rpc_idle_s` without a request, or when a peer is silent for `rpc_stall_s` in the
    middle of one; a state beyond `max_state_bytes` is refused.
    KV state travels between engines of the same model file, or of the same `kv_family` (quants that the Model declares to be
    near enough), in blocks of `kv_block_tokens` (a power of two; 0: as many as make some megabytes). `digest_folder` is where
    the digests of model files are remembered (empty: beside the model).
    With `store_port` set the engine saves its conversations to the host's store and takes them from there again: each turn's
    end, and a slot that was idle for `park_idle_s` is then freed (0: only when its cells are needed). A request waits at most
    `store_wait_s` for the store before it is computed without; `park_stop_s` is what a stop may take for saving.
    `chat_template` is Jinja text to be used instead of the model's own template.
    The `default_…` values are for requests that do not say; `default_max_tokens` 0 means until the context is full. Times in
    seconds, sizes as named.
    """

    model_path: str
    model_name: str
    host: str = "127.0.0.1"
    port: int = 8080
    http_secret: str = dataclasses.field(default="", repr=False)
    rpc_port: int = 0
    rpc_secret: str = dataclasses.field(default="", repr=False)
    rpc_connections: int = 64
    rpc_idle_s: float = 600.0
    rpc_stall_s: float = 30.0
    max_state_bytes: int = 1 << 34
    store_host: str = "127.0.0.1"
    store_port: int = 0
    store_secret: str = dataclasses.field(default="", repr=False)
    store_wait_s: float = 2.0
    park_idle_s: float = 300.0
    park_stop_s: float = 3.0
    slots: int = 4
    context_tokens: int = 4096
    cache_tokens: int = 0
    batch_tokens: int = 512
    micro_batch_tokens: int = 512
    threads: int = 0
    gpu_layers: int = 0
    main_gpu: int = 0
    kv_type_k: str = "f16"
    kv_type_v: str = "f16"
    mmap: bool = True
    card_arch: str = ""
    devices: tuple[str, ...] = ()
    split_mode: str = "layer"
    tensor_split: tuple[float, ...] = ()
    cpu_moe_layers: int = 0
    tensor_overrides: tuple[str, ...] = ()
    full_window: bool = True
    sampling: str = "auto"
    device_candidates: int = 128
    whole_vocabulary_slots: int = -1
    checkpoints: int = -1
    checkpoint_spacing_tokens: int = 2048
    checkpoint_min_tokens: int = -1
    host_cache_bytes: int = 1 << 30
    put_away_idle: bool = True
    slot_save_path: str = ""
    kv_family: str = ""
    kv_block_tokens: int = 0
    digest_folder: str = ""
    speculation: str = "none"
    draft_tokens: int = 2
    pooling: str = ""
    embedding_inputs: int = 32
    projector_path: str = ""
    image_max_tokens: int = 0
    chat_template: str = ""
    default_max_tokens: int = 0
    default_temperature: float = 0.8
    default_top_p: float = 0.95
    default_top_k: int = 40
    default_min_p: float = 0.05
    queue_limit: int = 64
    request_deadline_s: float = 1800.0
    max_body_bytes: int = 32 * 1024 * 1024
    engine_id: int = 0
    log_level: str = "INFO"

    def __post_init__(self) -> None:
        check_bounds(self, _BOUNDS)
        if self.sampling not in SAMPLING_PATHS:
            raise ConfigInvalid(f"sampling is {self.sampling!r}; it must be one of {', '.join(SAMPLING_PATHS)}")
        if self.speculation not in SPECULATIONS:
            raise ConfigInvalid(f"speculation is {self.speculation!r}; it must be one of {', '.join(SPECULATIONS)}")
        if self.pooling not in POOLINGS:
            raise ConfigInvalid(f"pooling is {self.pooling!r}; it must be one of {', '.join(POOLINGS[1:])}, or empty")
        if self.log_level not in LOG_LEVELS:
            raise ConfigInvalid(f"log_level is {self.log_level!r}; it must be one of {', '.join(LOG_LEVELS)}")
        for key in ("kv_type_k", "kv_type_v"):
            if getattr(self, key) not in KV_TYPES:
                raise ConfigInvalid(f"{key} is {getattr(self, key)!r}; it must be one of {', '.join(KV_TYPES)}")
        if 0 < len(self.rpc_secret.encode()) < MIN_SECRET_BYTES:
            raise ConfigInvalid(f"rpc_secret has fewer than {MIN_SECRET_BYTES} bytes; make one of random bytes")
        if 0 < len(self.http_secret.encode()) < MIN_SECRET_BYTES:
            raise ConfigInvalid(f"http_secret has fewer than {MIN_SECRET_BYTES} bytes; make one of random bytes")
        if 0 < len(self.store_secret.encode()) < MIN_SECRET_BYTES:
            raise ConfigInvalid(f"store_secret has fewer than {MIN_SECRET_BYTES} bytes; make one of random bytes")
        if self.kv_block_tokens & (self.kv_block_tokens - 1):
            raise ConfigInvalid(f"kv_block_tokens is {self.kv_block_tokens}; it must be a power of two, or 0")
        if not re.fullmatch(r"[\w.-]{0,64}", self.kv_family):
            raise ConfigInvalid(
                f"kv_family is {self.kv_family!r}; it must be a short name of letters, digits, '.', '_' and '-'"
            )
        self._check_placement()
        if self.cells < self.context_tokens:
            raise ConfigInvalid(f"cache_tokens is {self.cells}; one request alone may take {self.context_tokens}")
        if not self.model_path or not self.model_name:
            raise ConfigInvalid("model_path and model_name must be given")

    def _check_placement(self) -> None:
        """What can be said of it without the machine's devices; the engine checks names and counts against those."""
        if self.card_arch and capability(self.card_arch) is None:
            raise ConfigInvalid(f"card_arch is {self.card_arch!r}; it must read like sm_86, or be empty")
        if self.split_mode not in SPLIT_MODES:
            raise ConfigInvalid(f"split_mode is {self.split_mode!r}; it must be one of {', '.join(SPLIT_MODES)}")
        if self.tensor_split and not (min(self.tensor_split) >= 0 and 0 < sum(self.tensor_split) < float("inf")):
            raise ConfigInvalid(
                f"tensor_split is {self.tensor_split}; it needs shares of 0 or more, one of them above 0"
            )
        for entry in self.tensor_overrides:
            pattern, _, device = entry.rpartition("=")
            if not pattern or not device:
                raise ConfigInvalid(f"tensor_overrides has {entry!r}; an entry reads regex=DEVICE")
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigInvalid(
                    f"tensor_overrides has {pattern!r}, which is no regular expression: {error}"
                ) from error

    def refuse_open_http(self) -> None:
        """Raises ConfigInvalid for an engine that strangers could reach and that asks them for nothing."""
        if not self.http_secret and not is_loopback(self.host):
            raise ConfigInvalid(f"host {self.host} needs http_secret: without one an engine is served on loopback only")

    def refuse_open_rpc(self) -> None:
        """Raises ConfigInvalid for a port that strangers could reach and that asks them for nothing.

        Not part of making one, since the secret may still come from the environment.
        """
        if self.rpc_port and not self.rpc_secret and not is_loopback(self.host):
            raise ConfigInvalid(
                f"rpc_port {self.rpc_port} on {self.host} needs rpc_secret: without one it is served on loopback only"
            )

    @property
    def cells(self) -> int:
        """KV cells of the context: every slot can hold a full request unless cache_tokens says otherwise.

        With pooling nothing stays: a long input is computed over several steps, and others fill up the rest of each.
        """
        if self.pooling:
            return self.cache_tokens or self.context_tokens + min(self.batch_tokens, self.micro_batch_tokens)
        return self.cache_tokens or self.context_tokens * self.slots

    @property
    def pooled_step_tokens(self) -> int:
        """Tokens that one step of a pooling engine may compute; one micro-batch, since a mean is taken within one."""
        return min(self.batch_tokens, self.micro_batch_tokens, self.cells)

    @property
    def wants_draft_head(self) -> bool:
        """Whether the model's own draft head is loaded, if it has one."""
        return self.longest_draft > 0 and self.speculation in ("mtp", "auto")

    @property
    def longest_draft(self) -> int:
        # A recurrent model's draft, the row before it and one more go into a batch, which holds no more than there are cells.
        return 0 if self.speculation == "none" or self.pooling else min(self.draft_tokens, self.cells - 2)

    @property
    def sees_images(self) -> bool:
        return bool(self.projector_path) and not self.pooling

    @property
    def samples_on_device(self) -> bool:
        """Whether a static top-k chain runs on the device; decided here alone, so that a seed repeats after a restart.

        On two CPU cores the device chain was 15 to 20 % slower than choosing from raw logits; on a GPU it saves the copy of
        every row and the search through it.
        """
        if self.pooling:
            return False
        return self.sampling == "backend" or (
            self.sampling == "auto" and self.gpu_layers != 0 and not self.usually_needs_whole_rows
        )

    @property
    def usually_needs_whole_rows(self) -> bool:
        """Whether a request that says nothing of its own would find no use for the device's candidates."""
        return self.default_temperature > 0 and not 0 < self.default_top_k <= self.device_candidates

    @property
    def whole_row_sequences(self) -> int:
        """Sequences that keep their raw logits where the others' are sampled on the device: as many requests as may need them at
        once. More than slots would never run."""
        if not self.samples_on_device:
            return 0
        wanted = max(1, self.slots // 4) if self.whole_vocabulary_slots < 0 else self.whole_vocabulary_slots
        return min(wanted, self.slots, max(1, MOST_SEQUENCES - SCRATCH_SEQUENCES - self.slots - self.kept_checkpoints))

    @property
    def kept_checkpoints(self) -> int:
        """Sequences for checkpoints: as many conversations as there are slots have one each where their next turn begins, their
        system prompt has one, and one changes over."""
        return min(self.slots + 2, MOST_CHECKPOINTS) if self.checkpoints < 0 else self.checkpoints

    @property
    def decoding_sequences(self) -> int:
        """Sequences that can run a generation: slots, and with device sampling those that keep their raw logits. No more than
        `slots` of them do at once."""
        return self.slots + self.whole_row_sequences

    @property
    def sequences(self) -> int:
        """Sequence ids of the context: decoding ones, checkpoints, scratch. Recurrent state takes memory for each."""
        if self.pooling:
            return min(self.embedding_inputs, self.pooled_step_tokens)
        return self.decoding_sequences + self.kept_checkpoints + SCRATCH_SEQUENCES

    @property
    def outputs(self) -> int:
        """Rows of logits that one step may ask for. llama.cpp's default, a row per batch token, reserves hundreds of MiB.

        A step asks for one row per running sequence and one more for each token of a draft; llama.cpp wants room for one per
        sequence id all the same. With pooling it makes a row of every token.
        """
        if self.pooling:
            return self.pooled_step_tokens
        return max(self.sequences, self.slots * (1 + self.longest_draft))

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> EngineConfig:
        """Raises ConfigInvalid for malformed JSON, unknown keys, missing keys and wrong types."""
        values = read_fields(cls, text)
        missing = {"model_path", "model_name"} - set(values)
        if missing:
            raise ConfigInvalid(f"missing keys: {', '.join(sorted(missing))}")
        return cls(**values)


# --- received by the site and the head: an engine's view of itself -------------------------------


@dataclass(frozen=True)
class SlotView:
    """One slot as `GET /slots` shows it; cached tokens of an idle slot can be reused.

    `state` is idle, prefill, decode, or while its KV state leaves or enters, export or restore.
    """

    id: int
    state: str
    is_processing: bool
    request_id: str | None
    prompt_tokens: int
    prompt_done_tokens: int
    decoded_tokens: int
    cached_tokens: int
    context_tokens: int
    tokens_per_s: float

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SlotView:
        """Reads what a possibly newer engine sent: unknown keys are ignored, missing ones raise KeyError."""
        return cls(**{f.name: values[f.name] for f in dataclasses.fields(cls)})
