"""How a generation draws its tokens: the likeliest candidates of a row, then the request's own llama.cpp chain on them.

The candidates come from one of two places, fixed for an engine's life by its configuration: from the raw logits on the host, or
from a static top-k chain that runs on the device and spares the copy of the logits. A request that needs more than the
candidates (a lifting bias, log probabilities, a constraint, sampling without top-k) runs on a sequence without a device chain.

The order on a row: log probabilities are read first, as the model gave them; then the request's bias, then the constraint's mask,
which has the last word on what may come; then the chain, on what is left.
The default parameters are llama.cpp's, because its users' expectations of a local model come from there.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from engines.api_schema import LONGEST_WINDOW_TOKENS, UNBOUNDED, ChatRequest
from engines.config import EngineConfig
from engines.errors import InvalidRequest
from engines.runtime.candidates import (
    NoLogits,
    NoneAllowed,
    all_possible,
    every_id,
    log_probabilities,
    top_candidates,
    top_of,
)
from engines.runtime.constraint import Constraint
from engines.runtime.llama import Llama
from engines.runtime.sampler_chain import Chain

SEED_MASK = 0xFFFF_FFFF
# As llama.cpp's users say it: whichever.
DRAWN_SEED = -1
# Tokens that a DRY penalty may push down, on top of those that the plain penalties know.
DRY_SPARE_CANDIDATES = 64
_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
_FROM_CONFIG = ("temperature", "top_k", "top_p", "min_p")
_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "presence_penalty",
    "frequency_penalty",
    "repeat_penalty",
    "repeat_last_n",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "xtc_probability",
    "xtc_threshold",
)


@dataclass(frozen=True)
class SamplingParams:
    """How a generation draws tokens. Temperature 0 is greedy; `seed` is always set, so that an answer can name it."""

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 1024
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int | None = None

    @classmethod
    def of(
        cls, request: ChatRequest, config: EngineConfig, vocabulary_size: int, end_tokens: frozenset[int]
    ) -> SamplingParams:
        """What the request says, and the engine's defaults where it does not.

        Raises InvalidRequest for a biased token id beyond the vocabulary, which would abort llama.cpp.
        """
        bias = {int(token): value for token, value in (request.logit_bias or {}).items()}
        for token in bias:
            if token >= vocabulary_size:
                raise InvalidRequest(
                    f"logit_bias: token {token} is beyond the vocabulary of {vocabulary_size}", param="logit_bias"
                )
        if request.ignore_eos:
            bias.update(dict.fromkeys(end_tokens, float("-inf")))
        given: dict[str, Any] = {name: getattr(config, f"default_{name}") for name in _FROM_CONFIG}
        given |= {name: value for name in _FIELDS if (value := getattr(request, name)) is not None}
        for name in ("repeat_last_n", "dry_penalty_last_n"):
            if given.get(name) == UNBOUNDED:
                given[name] = min(config.context_tokens, LONGEST_WINDOW_TOKENS)
        if request.dry_sequence_breakers is not None:
            given["dry_sequence_breakers"] = tuple(request.dry_sequence_breakers)
        seed = secrets.randbits(31) if request.seed in (None, DRAWN_SEED) else request.seed
        return cls(
            **given,
            seed=seed & SEED_MASK,
            logit_bias=tuple(sorted(bias.items())),
            top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        )

    @property
    def penalises(self) -> bool:
        off = self.repeat_penalty == 1.0 and self.presence_penalty == 0.0 and self.frequency_penalty == 0.0
        return self.repeat_last_n > 0 and not off

    @property
    def has_dry(self) -> bool:
        return self.dry_multiplier > 0 and self.dry_penalty_last_n > 0

    @property
    def lifts(self) -> bool:
        """Whether a token outside the likeliest may become the likeliest."""
        penalty_lifts = self.repeat_penalty < 1 or self.presence_penalty < 0 or self.frequency_penalty < 0
        return any(value > 0 for _, value in self.logit_bias) or (self.penalises and penalty_lifts)

    @property
    def wanted_candidates(self) -> int | None:
        """How many of the likeliest tokens decide the draw exactly; None: all of the vocabulary."""
        if self.lifts or (self.temperature > 0 and self.top_k <= 0):
            return None
        spare = (self.repeat_last_n if self.penalises else 0) + len(self.logit_bias)
        spare += DRY_SPARE_CANDIDATES if self.has_dry else 0
        return (1 if self.temperature == 0 else self.top_k) + spare

    def needs_whole_vocabulary(self, device_candidates: int) -> bool:
        """Whether a device chain that hands out `device_candidates` of a row is not enough for this request."""
        wanted = self.wanted_candidates
        # A penalty pushes down some of the candidates at most, and the rest still covers top_k in all but odd cases.
        penalised = self.repeat_last_n if self.penalises else 0
        return self.top_logprobs is not None or wanted is None or wanted - penalised > device_candidates


@dataclass(frozen=True)
class TokenLogprob:
    """A drawn token's log probability under the model (before any sampler, bias or mask), and those of the likeliest tokens."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Sampler:
    """Owns one request's samplers. Lives with its generation across preemption; closed by the thread that owns the context."""

    def __init__(self, params: SamplingParams, llama: Llama, constraint: Constraint | None = None) -> None:
        self.params = params
        self.constraint = constraint
        self._llama = llama
        self._bias_ids = np.array([token for token, _ in params.logit_bias], dtype=np.int64)
        self._bias_values = np.array([value for _, value in params.logit_bias], dtype=np.float32)
        # Random numbers used up by choices: a sampler elsewhere that skips as many goes on alike.
        self.draws = 0
        # Tokens that penalties know of.
        self._seen = 0
        self._wanted = params.wanted_candidates
        self._table = np.zeros(0, dtype=_CANDIDATE)
        self._table_pointer: Any = None
        self._array = llama_cpp.llama_token_data_array()
        chain = Chain(params, llama.vocabulary)
        self._chain = None if chain.is_empty else chain

    def see_prompt(self, tokens: list[int]) -> None:
        """Lets penalties see the prompt's end, as llama-server does; costs nothing without them."""
        params = self.params
        window = params.repeat_last_n if params.penalises else 0
        window = max(window, params.dry_penalty_last_n if params.has_dry else 0)
        for token in tokens[-window:] if window else ():
            self._accept(token)

    def _accept(self, token: int) -> None:
        if self._chain is not None:
            self._chain.accept(token)
            self._seen += 1

    def skip(self, draws: int) -> None:
        """Goes to where a sampler is that has made so many choices."""
        self.draws += draws
        if self._chain is not None:
            self._chain.skip(draws)

    def take(self, token: int) -> None:
        """Lets penalties and the constraint see a token that was not drawn. Raises ConstraintFailed if it may not come."""
        self._accept(token)
        if self.constraint is not None:
            self.constraint.accept(token)

    def draw_from_logits(self, logits: NDArray[np.float32]) -> tuple[int, TokenLogprob | None]:
        """The next token from a whole row, shape (vocabulary,), which is changed.

        Raises NoLogits for a row of NaN, and ConstraintFailed where the constraint cannot go on.
        """
        probabilities = log_probabilities(logits) if self.params.top_logprobs is not None else None
        if self._bias_ids.size:
            # In place: the row is computed anew before anybody reads it again.
            logits[self._bias_ids] += self._bias_values
        wanted = self._decisive_candidates()
        if self.constraint is not None:
            token = self._draw_allowed(self.constraint, logits, wanted)
        elif wanted is None:
            ids, values = all_possible(every_id(logits.shape[0]), logits)
            if not ids.size:
                raise NoLogits("logit_bias bans every token")
            token = self._choose(ids, values, in_order=False)
        else:
            token = self._choose(*top_candidates(logits, wanted))
        return token, None if probabilities is None else self._logprob(probabilities, token)

    def _decisive_candidates(self) -> int | None:
        """As `wanted_candidates`, by what penalties know of so far: a window that is hardly filled pushes little down."""
        if self._chain is None:
            return 1
        unfilled = max(0, self.params.repeat_last_n - self._seen) if self.params.penalises else 0
        return None if self._wanted is None else self._wanted - unfilled

    def _draw_allowed(self, constraint: Constraint, logits: NDArray[np.float32], wanted: int | None) -> int:
        allowed = constraint.allowed()
        if allowed is None:
            constraint.mask(logits)
            if wanted is None:
                ids, values = all_possible(every_id(logits.shape[0]), logits)
            else:
                ids, values = top_candidates(logits, wanted)
        elif wanted is None:
            ids, values = all_possible(allowed, logits[allowed])
        else:
            ids, values = top_of(allowed, logits[allowed], wanted)
        # What is masked or banned stands at the end; without any candidate before it the bias leaves nothing.
        possible = int(np.count_nonzero(values > -np.inf))
        if possible:
            token = self._choose(ids[:possible], values[:possible], in_order=wanted is not None)
        else:
            token = constraint.only_end(logits)
        constraint.accept(token)
        return token

    def draw_from_candidates(self, ids: NDArray[np.int32], logits: NDArray[np.float32]) -> int:
        """The next token from candidates of the device, which come in no order.

        Raises NoLogits if there is a NaN, NoneAllowed where a constraint allows none of them, ConstraintFailed as above.
        """
        if self._bias_ids.size:
            for token, value in self.params.logit_bias:
                logits[ids == token] += value
        if self.constraint is not None:
            possible = self.constraint.allows(ids) & (logits > -np.inf)
            if not possible.any():
                raise NoneAllowed("no candidate of the device is allowed")
            ids, logits = ids[possible], logits[possible]
        token = self._draw_candidate(ids, logits)
        if self.constraint is not None:
            self.constraint.accept(token)
        return token

    def _draw_candidate(self, ids: NDArray[np.int32], logits: NDArray[np.float32]) -> int:
        best = logits.argmax()  # of a NaN, if there is one
        if math.isnan(logits[best]):
            raise NoLogits("the logits hold NaN")
        if self._chain is None:
            return int(ids[best])
        return self._choose(ids, logits, in_order=False)

    def _choose(self, ids: NDArray[np.int32], logits: NDArray[np.float32], *, in_order: bool = True) -> int:
        if self._chain is None:
            return int(ids[0])
        count = ids.shape[0]
        if count > self._table.shape[0]:
            self._table = np.zeros(count, dtype=_CANDIDATE)
            self._table_pointer = self._table.ctypes.data_as(llama_cpp.llama_token_data_p)
        table = self._table[:count]
        table["id"], table["logit"], table["p"] = ids, logits, 0
        array = self._array
        array.data, array.size, array.selected, array.sorted = self._table_pointer, count, -1, in_order
        self._chain.apply(array, self.draws)
        self.draws += 1
        # A sampler may move the array elsewhere, so the token is read where the struct points now.
        token = int(array.data[array.selected].id)
        self._accept(token)
        return token

    def _logprob(self, probabilities: NDArray[np.float32], token: int) -> TokenLogprob:
        top = self.params.top_logprobs or 0
        ids, values = top_candidates(probabilities, top) if top else (np.empty(0, np.int32), np.empty(0, np.float32))
        likeliest = tuple((int(i), float(value)) for i, value in zip(ids, values, strict=True))
        return TokenLogprob(token, float(probabilities[token]), likeliest)

    def close(self) -> None:
        if self._chain is not None:
            self._chain.close()
            self._chain = None
