"""A request's sampling: its parameters, and the llama.cpp chain that draws its tokens.

The defaults are llama.cpp's, because its users' expectations of a local model come from there.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from engines.api_schema import ChatRequest
from engines.errors import InvalidRequest
from engines.runtime.llama import Llama

SEED_MASK = 0xFFFF_FFFF
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
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int | None = None

    @classmethod
    def of(cls, request: ChatRequest, vocabulary_size: int, end_tokens: frozenset[int]) -> SamplingParams:
        """Raises InvalidRequest for a biased token id beyond the vocabulary, which would abort llama.cpp."""
        bias = {int(token): value for token, value in (request.logit_bias or {}).items()}
        for token in bias:
            if token >= vocabulary_size:
                raise InvalidRequest(
                    f"logit_bias: token {token} is beyond the vocabulary of {vocabulary_size}", param="logit_bias"
                )
        if request.ignore_eos:
            bias.update(dict.fromkeys(end_tokens, float("-inf")))
        given = {name: value for name in _FIELDS if (value := getattr(request, name)) is not None}
        seed = request.seed if request.seed is not None and request.seed >= 0 else secrets.randbits(31)
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


@dataclass(frozen=True)
class TokenLogprob:
    """A drawn token's log probability under the model (before any sampler), and those of the likeliest tokens."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Sampler:
    """Owns one llama.cpp chain. Lives with its generation across preemption; closed by the thread that owns the context."""

    def __init__(self, params: SamplingParams, llama: Llama) -> None:
        self.params = params
        self._llama = llama
        self._chain: Any = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        for part in self._parts():
            llama_cpp.llama_sampler_chain_add(self._chain, part)

    def _parts(self) -> list[Any]:
        params, size = self.params, self._llama.vocabulary.size
        parts = []
        if params.logit_bias:
            entries = (llama_cpp.llama_logit_bias * len(params.logit_bias))(*params.logit_bias)
            parts.append(llama_cpp.llama_sampler_init_logit_bias(size, len(params.logit_bias), entries))
        if params.penalises:
            parts.append(
                llama_cpp.llama_sampler_init_penalties(
                    size,
                    params.repeat_last_n,
                    params.repeat_penalty,
                    params.frequency_penalty,
                    params.presence_penalty,
                )
            )
        if params.temperature == 0:
            return [*parts, llama_cpp.llama_sampler_init_greedy()]
        if params.top_k > 0:
            parts.append(llama_cpp.llama_sampler_init_top_k(params.top_k))
        if params.typical_p < 1:
            parts.append(llama_cpp.llama_sampler_init_typical(params.typical_p, 1))
        if params.top_p < 1:
            parts.append(llama_cpp.llama_sampler_init_top_p(params.top_p, 1))
        if params.min_p > 0:
            parts.append(llama_cpp.llama_sampler_init_min_p(params.min_p, 1))
        parts.append(llama_cpp.llama_sampler_init_temp(params.temperature))
        return [*parts, llama_cpp.llama_sampler_init_dist(params.seed)]

    def see_prompt(self, tokens: list[int]) -> None:
        """Lets penalties see the prompt's end, as llama-server does; costs nothing without penalties."""
        if self.params.penalises:
            for token in tokens[-self.params.repeat_last_n :]:
                llama_cpp.llama_sampler_accept(self._chain, token)

    def draw(self, row: int) -> tuple[int, TokenLogprob | None]:
        """The next token from the batch row's logits, with its log probability where the request asked for it."""
        logits = self._llama.logits(row).copy() if self.params.top_logprobs is not None else None
        token = int(llama_cpp.llama_sampler_sample(self._chain, self._llama.context, row))
        if logits is None:
            return token, None
        return token, _logprob(logits, token, self.params.top_logprobs or 0)

    def close(self) -> None:
        if self._chain:
            llama_cpp.llama_sampler_free(self._chain)
            self._chain = None


def _logprob(logits: NDArray[np.float32], token: int, top: int) -> TokenLogprob:
    wide = logits.astype(np.float64)
    peak = wide.max()
    logprobs = wide - (peak + np.log(np.exp(wide - peak).sum()))
    likeliest = np.argpartition(-logprobs, top - 1)[:top] if top else np.empty(0, dtype=np.int64)
    ordered = likeliest[np.argsort(-logprobs[likeliest], kind="stable")]
    return TokenLogprob(token, float(logprobs[token]), tuple((int(t), float(logprobs[t])) for t in ordered))
