"""What `GET /rates` says, on both sides: an engine's measured speeds, its free places, and the conversations it holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

MAX_PENDING = 64
MAX_SESSIONS = 512
MAX_STEPS = 256
MAX_LINKS = 64
MAX_ADDRESS_CHARS = 64


@dataclass(frozen=True)
class EngineRates:
    """Times in seconds. `prefill_token_s` for each token of a prompt, `prefill_pair_s` for what its square grows by,
    `prefill_beside_s` for each pair of one of its tokens and one of others' in the cache.

    `steps` are streams and seconds of a decode step with an empty cache, ascending; `resident_token_s` comes on top for each
    token in it, and `own_token_s` for each of those who decode, now `own_tokens`. `pending_tokens` is what each prompt without an
    answer still has to compute. `chunk_s` is a piece of a prompt between two steps of the others, which wait for it;
    `interleaves`: it has a call of its own. `kv_group` names the engines that KV may be shared with, "" none.
    `restore_bytes_per_s` is how fast states come in from the host's store, 0 unknown. `sessions` are tokens held by conversation,
    the one used last at the end; `idle_tokens` and `idle_s` tell of the one that would have to go next. `links` are bytes per
    second at which other hosts' stores ("address:port") were read. `streams_kv`: a request may come or leave while it runs; a
    token's KV then takes `kv_token_bytes`, what belongs to no token `kv_part_bytes`. Of the slots as many as `whole_row_slots` at
    once may serve requests that need whole rows of logits, of which `free_whole_row_slots` more may begin now.
    """

    model: str
    slots: int
    free_slots: int
    decoding: int
    pending_tokens: tuple[int, ...]
    queue_length: int
    queue_limit: int
    context_tokens: int
    cells: int
    resident_tokens: int
    prefill_token_s: float
    prefill_pair_s: float
    steps: tuple[tuple[int, float], ...]
    resident_token_s: float
    request_s: float
    chunk_s: float
    interleaves: bool
    kv_group: str
    restore_bytes_per_s: float
    sessions: Mapping[str, int]
    idle_tokens: int
    idle_s: float
    links: Mapping[str, float] = field(default_factory=dict)
    streams_kv: bool = False
    kv_token_bytes: float = 0.0
    kv_part_bytes: float = 0.0
    prefill_beside_s: float = 0.0
    own_token_s: float = 0.0
    own_tokens: int = 0
    whole_row_slots: int = 0
    free_whole_row_slots: int = 0

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EngineRates:
        """Reads what a possibly newer engine sent. Raises KeyError, TypeError or ValueError for what cannot be rates."""
        steps = tuple((int(streams), _seconds(step_s)) for streams, step_s in values["steps"][:MAX_STEPS])
        if not steps or any(low >= high for (low, _), (high, _) in pairwise(steps)):
            raise ValueError("steps are for ascending numbers of streams, at least one")
        sessions = {str(name): int(tokens) for name, tokens in list(values["sessions"].items())[-MAX_SESSIONS:]}
        links = {str(address): _seconds(speed) for address, speed in list(values.get("links", {}).items())[-MAX_LINKS:]}
        return cls(
            model=str(values["model"]),
            slots=int(values["slots"]),
            free_slots=int(values["free_slots"]),
            decoding=int(values["decoding"]),
            pending_tokens=tuple(int(tokens) for tokens in values["pending_tokens"][:MAX_PENDING]),
            queue_length=int(values["queue_length"]),
            queue_limit=int(values["queue_limit"]),
            context_tokens=int(values["context_tokens"]),
            cells=int(values["cells"]),
            resident_tokens=int(values["resident_tokens"]),
            prefill_token_s=_seconds(values["prefill_token_s"]),
            prefill_pair_s=_seconds(values["prefill_pair_s"]),
            steps=steps,
            resident_token_s=_seconds(values["resident_token_s"]),
            request_s=_seconds(values["request_s"]),
            chunk_s=_seconds(values["chunk_s"]),
            interleaves=bool(values["interleaves"]),
            kv_group=str(values["kv_group"])[:128],
            restore_bytes_per_s=_seconds(values["restore_bytes_per_s"]),
            sessions=sessions,
            idle_tokens=int(values["idle_tokens"]),
            idle_s=_seconds(values["idle_s"]),
            links={address: speed for address, speed in links.items() if speed and len(address) <= MAX_ADDRESS_CHARS},
            streams_kv=bool(values.get("streams_kv", False)),
            kv_token_bytes=_seconds(values.get("kv_token_bytes", 0.0)),
            kv_part_bytes=_seconds(values.get("kv_part_bytes", 0.0)),
            prefill_beside_s=_seconds(values.get("prefill_beside_s", 0.0)),
            own_token_s=_seconds(values.get("own_token_s", 0.0)),
            own_tokens=int(_seconds(values.get("own_tokens", 0))),
            whole_row_slots=int(_seconds(values.get("whole_row_slots", 0))),
            free_whole_row_slots=int(_seconds(values.get("free_whole_row_slots", 0))),
        )


def _seconds(value: Any) -> float:
    seconds = float(value)
    if not math.isfinite(seconds) or seconds < 0:
        raise ValueError(f"{value!r} is no duration")
    return seconds
