"""What the router is told: one request and the pool, as frozen values. Times in seconds, sizes in bytes and tokens.

Whoever fills these in measures: a rate that nobody measured is not made up here but left at a default that says so.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Mode = Literal["solo", "pd", "combined"]
# auto: by all that a choice costs; fast: by what this request waits, whatever the others lose; concurrency: each request stays
# on one engine, so that the others have theirs.
RunMode = Literal["auto", "fast", "concurrency"]
RUN_MODES: tuple[RunMode, ...] = ("auto", "fast", "concurrency")


@dataclass(frozen=True, slots=True)
class PrefillFit:
    """Seconds of computing prompt tokens: so many for each, for each pair of tokens that see each other, and for each pair of one
    of them and one of others' tokens in the cache."""

    token_s: float
    pair_s: float = 0.0
    beside_s: float = 0.0

    def seconds(self, cached_tokens: int, prompt_tokens: int, other_tokens: int = 0) -> float:
        """Of a prompt of which the first `cached_tokens` are there already, while the cache holds `other_tokens` of others."""
        missing = prompt_tokens - cached_tokens
        if missing <= 0:
            return 0.0
        return missing * (self.token_s + self.pair_s * (prompt_tokens + cached_tokens) + self.beside_s * other_tokens)


@dataclass(frozen=True, slots=True)
class DecodeRates:
    """Seconds of one step: by how many streams share it (ascending, at least one entry), for each token in the cache, and on top
    for each of the streams' own."""

    steps: tuple[tuple[int, float], ...]
    resident_token_s: float = 0.0
    own_token_s: float = 0.0

    def step_s(self, streams: int, resident_tokens: int, own_tokens: int = 0) -> float:
        """Linear between measured batch sizes, flat below the first, by the last slope beyond the last."""
        return self._batch_s(streams) + self.resident_token_s * resident_tokens + self.own_token_s * own_tokens

    def _batch_s(self, streams: int) -> float:
        steps = self.steps
        place = bisect_left(steps, (streams, 0.0))
        if place == 0:
            return steps[0][1]
        if place == len(steps):
            if place == 1:
                return steps[0][1]
            place -= 1
        (low, low_s), (high, high_s) = steps[place - 1], steps[place]
        return low_s + (high_s - low_s) * (streams - low) / (high - low)


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine that serves, as last measured. Of its `resident_tokens` those who decode hold `own_tokens`; `pending_tokens` are
    what each prompt before its first token still has to compute.

    `kv_group` names the engines that may share KV ("" none). `idle_tokens` and `idle_s` tell of the conversation that a new
    request would push out of its slot (0: an empty slot is left). `request_s` is how long a request holds a slot on average,
    `chunk_s` a piece of a prompt between two steps of the others. `variant` names its weights; `kv_token_bytes` and
    `kv_part_bytes` are a token's KV and a recurrent state as they travel (0: unknown); `streams_kv`: a request may come to it, or
    leave it, while it runs. First tokens took `fixed_s` beside all that, `drift` times what these rates say, and `wake_s` more
    because the engine is idle (0: it is not); `crowd` times more for each of the `neighbours`, which are engines at work on the
    same device. Requests that need whole rows of logits have `whole_row_slots` of the slots at once (0: unknown).
    """

    engine_id: int
    name: str
    host: str
    model: str
    prefill: PrefillFit
    decode: DecodeRates
    slots: int
    context_tokens: int
    cells: int
    free_slots: int = 0
    decoding: int = 0
    resident_tokens: int = 0
    own_tokens: int = 0
    pending_tokens: tuple[int, ...] = ()
    queue_length: int = 0
    queue_limit: int = 64
    request_s: float = 0.0
    chunk_s: float = 0.0
    idle_tokens: int = 0
    idle_s: float = 0.0
    features: frozenset[str] = frozenset({"text"})
    kv_group: str = ""
    resumes: bool = False
    streams_kv: bool = False
    variant: int = 0
    kv_token_bytes: float = 0.0
    kv_part_bytes: float = 0.0
    fixed_s: float = 0.0
    wake_s: float = 0.0
    drift: float = 1.0
    neighbours: int = 0
    crowd: float = 0.0
    whole_row_slots: int = 0
    free_whole_row_slots: int = 0

    def places(self, request: RequestView) -> tuple[int, int]:
        """Slots that a request may have, and how many of them are free."""
        if request.whole_rows and self.whole_row_slots:
            return self.whole_row_slots, min(self.free_slots, self.free_whole_row_slots)
        return self.slots, self.free_slots


@dataclass(frozen=True, slots=True)
class CombinedView:
    """Two engines' devices as one, where that form is loaded or can be: an engine of its own, and what it takes away."""

    engine: EngineView
    peer_engine_id: int
    peer_reachable: bool = True


@dataclass(frozen=True, slots=True)
class LinkView:
    """Speed between two hosts, or of a host's own memory where both are the same. It is `doubted` where it is a guess and whoever
    relied on it lately measured nothing: only who must goes that way."""

    bytes_per_s: float
    latency_s: float = 0.0
    doubted: bool = False

    def seconds(self, size_bytes: float) -> float:
        return self.latency_s + size_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class SnapshotView:
    """A session's state in a host's store."""

    host: str
    kv_group: str
    tokens: int
    size_bytes: int
    address: str = ""


@dataclass(frozen=True, slots=True)
class Sent:
    """What was sent to an engine since it was last measured: of each prompt the tokens that it has to compute."""

    prompts: tuple[int, ...] = ()

    @property
    def requests(self) -> int:
        return len(self.prompts)


@dataclass(frozen=True, slots=True)
class PoolView:
    """The pool at one moment.

    `held` tells by session which engines hold how many of its tokens, `prefixes` the same by key of a beginning that several
    sessions may share; `snapshots` what stores hold of a session. `links` are by pair of hosts. `kv_losses` are measured KL
    divergences (nats) by variants of who prefills and who decodes; a pair of unlike variants above `most_kv_loss` is not used.
    """

    engines: tuple[EngineView, ...]
    combined: tuple[CombinedView, ...] = ()
    held: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    prefixes: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    snapshots: Mapping[str, tuple[SnapshotView, ...]] = field(default_factory=dict)
    links: Mapping[tuple[str, str], LinkView] = field(default_factory=dict)
    sent: Mapping[int, Sent] = field(default_factory=dict)
    kv_losses: Mapping[tuple[int, int], float] = field(default_factory=dict)
    most_kv_loss: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestView:
    """One request. `session` is opaque; `prefix_keys` name its beginnings, the longest first.

    `prompt_tokens` and `output_tokens` are what is expected, `sure_prompt_tokens` what the prompt has at least where that is a
    guess (0: it is none), `most_output_tokens` what was asked for. `home` is the engine that answered the session last.
    A `background` request is one nobody will go on with; one that is not `movable` ends where it began; `whole_rows`: its tokens
    are drawn from whole rows of logits.
    """

    model: str
    prompt_tokens: int
    output_tokens: int
    most_output_tokens: int = 0
    sure_prompt_tokens: int = 0
    session: str = ""
    prefix_keys: tuple[str, ...] = ()
    home: int | None = None
    needs: frozenset[str] = frozenset()
    background: bool = False
    force_mode: Mode | None = None
    force_engine: int | None = None
    run_mode: RunMode = "auto"
    movable: bool = True
    whole_rows: bool = False
