"""The JSON of the binary protocol's operations: a frozen dataclass per request body and per answer's meta.

Unknown keys are ignored, so that a newer peer can be read; missing ones and wrong types raise. Names that end in `_bytes`,
`_ms`, `_tokens` say their units; the older names (`state_size`, `bytes`, `size`, `total_size`) count bytes.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from engines.errors import InvalidRequest

T = TypeVar("T")


def write_json(message: Any) -> bytes:
    """A message as compact UTF-8 JSON. Values that are None are left out; reading them back gives the defaults."""
    values = {key: value for key, value in asdict(message).items() if value is not None}
    return json.dumps(values, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def read_json(kind: type[T], raw: bytes, what: str) -> T:
    """`raw` as a message. Raises InvalidRequest that names `what` and the first key that is wrong; nesting is bounded."""
    adapter = _ADAPTERS.get(kind)
    if adapter is None:
        adapter = _ADAPTERS[kind] = TypeAdapter(kind)
    try:
        message: T = adapter.validate_json(raw or b"{}", strict=True)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
        key = ".".join(str(step) for step in problem["loc"])
        raise InvalidRequest(f"{what}: {key + ': ' if key else ''}{problem['msg']}", param=key or None) from error
    return message


# Filled on first use, one entry a class.
_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {}


# --- any operation --------------------------------------------------------------------------------


@dataclass(frozen=True)
class ErrorMeta:
    """Meta of every answer that is neither OK nor PARTIAL. `code` is one of the engine's error codes."""

    error: str
    code: str = ""
    hint: str | None = None
    param: str | None = None
    retry_after_s: int | None = None


@dataclass(frozen=True)
class Empty:
    """Meta of an answer that says all in its payload."""


# --- HELLO (0x70) ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class HelloRequest:
    """The client's first message. `nonce`: 32 random bytes as hex; `client`: a name for logs."""

    version: int
    nonce: str
    client: str = ""


@dataclass(frozen=True)
class HelloChallenge:
    """The server's first answer. `auth` is "none" (status OK, done) or "hmac-sha256" (status PARTIAL: an answer must follow)."""

    version: int
    auth: str
    challenge: str
    server: str = ""


@dataclass(frozen=True)
class HelloAnswer:
    """The client's second message: its proof as hex."""

    answer: str


@dataclass(frozen=True)
class HelloDone:
    """The server's second answer: its own proof as hex."""

    version: int
    proof: str


# --- state operations of an engine (0x30 to 0x32) -------------------------------------------------


@dataclass(frozen=True)
class StateMetaAnswer:
    """What a slot holds. `state_size` is the length that STATE_GET of the same key would send, 0 for an empty slot."""

    slot_id: int
    n_past: int
    state_size: int
    is_processing: bool
    is_transferring: bool
    operation: str
    model_alias: str
    model_hash: str
    fingerprint: str
    form: str


@dataclass(frozen=True)
class StatePutAnswer:
    """What a slot holds after STATE_PUT. `model_match` is exact or family."""

    restored: bool
    slot_id: int
    bytes: int
    n_past: int
    form: str
    model_match: str


# --- control operations of an engine (0x40 to 0x46) -----------------------------------------------


@dataclass(frozen=True)
class ConfigureAnswer:
    """What became of each key. `params` are the defaults now in force, `rejected` says why a known key was not taken.

    `tier` is the highest tier that a key asked for; `deferred_keys` is empty in this version, which defers nothing.
    """

    applied: bool
    tier: int
    params: dict[str, Any]
    params_applied: tuple[str, ...]
    deferred_keys: tuple[str, ...]
    rejected: dict[str, str]
    unrecognised: tuple[str, ...]
    state_chunk_size_applied: int


@dataclass(frozen=True)
class InfoAnswer:
    """What an engine is and can do now. `state` is loading, ready, stopping or failed; `mode` solo or combined."""

    engine: str
    version: str
    protocol: int
    state: str
    capabilities: tuple[str, ...]
    model_alias: str
    slots: int
    context_tokens: int
    mode: str
    split_mode: str
    solo_active: bool
    rpc_backend_active: bool
    combined_head_attached: bool
    pipeline_capable: bool
    peer_reachable: bool
    max_body_bytes: int
    max_state_bytes: int
    state_chunk_size: int
    preset_aliases: tuple[str, ...] = ()
    peer_addr: str | None = None
    layer_split: str | None = None
    params: dict[str, Any] | None = None


@dataclass(frozen=True)
class PrefillAnswer:
    """A computed prompt. `n_past` of its `prompt_tokens` stand in slot `id_slot`: all but the last, which is left to decode.

    `tokens_processed` were computed now, `cached_tokens` were there before. `state_size` is the payload's length, 0 without.
    """

    id_slot: int
    n_past: int
    prompt_tokens: int
    tokens_processed: int
    cached_tokens: int
    prefill_ms: float
    queue_ms: float
    state_size: int
    logits_size: int
    model_alias: str
    model_fallback: bool
    model_hash: str | None = None
    fingerprint: str | None = None
    form: str | None = None


@dataclass(frozen=True)
class DecodeAnswer:
    """Meta of a streamed answer, before its frames. `choices` is how many answers run side by side."""

    request_id: str
    model_alias: str
    choices: int
