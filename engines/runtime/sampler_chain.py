"""A request's own llama.cpp samplers in llama.cpp's default order, and what they need beyond standing in a row.

A DRY penalty goes through the whole vocabulary for its sequence breakers (23 ms for four of them and 152k tokens), so it is made
once for all requests that ask for the same, beside the core's thread where that is known before, and copied from then on.
"""

from __future__ import annotations

import ctypes
import weakref
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import llama_cpp

if TYPE_CHECKING:
    from engines.runtime.llama import Vocabulary
    from engines.runtime.sampler import SamplingParams

# llama.cpp takes this one for "any", so that a request with it would never repeat; it gets another one.
ANY_SEED, STAND_IN_SEED = 0xFFFF_FFFF, 0x9E37_79B9
# Divided by less, logits are infinite and have no order any more.
COLDEST = 1e-30
# A candidate whose probability is 0 has an entropy of NaN, with which typical sampling picks at random; what is so far below the
# likeliest is lost in its sum anyhow.
TYPICAL_LEAST_SHARE = 1e-12
MOST_DRY_KEPT = 16
_UINT64 = (1 << 64) - 1


class Chain:
    """Owns the native samplers. Used by the thread that owns the context."""

    def __init__(self, params: SamplingParams, vocabulary: Vocabulary) -> None:
        seed = STAND_IN_SEED if params.seed == ANY_SEED else params.seed
        self._seed = seed
        self._xtc_probability = params.xtc_probability
        self._is_greedy = params.temperature == 0
        filters = _penalties(params, vocabulary) if self._is_greedy else _filters(params, vocabulary)
        if self._is_greedy:
            self._chains = [_row([*filters, llama_cpp.llama_sampler_init_greedy()])] if filters else []
            return
        end = [llama_cpp.llama_sampler_init_temp(max(params.temperature, COLDEST))]
        end.append(llama_cpp.llama_sampler_init_dist(seed))
        if params.xtc_probability > 0:
            # It decides itself only whether anything is cut, so that whether it is asked depends on the place alone.
            xtc = llama_cpp.llama_sampler_init_xtc(1.0, params.xtc_threshold, 1, seed)
            self._chains = [_row(filters), xtc, _row(end)]
        else:
            self._chains = [_row([*filters, *end])]

    @property
    def is_empty(self) -> bool:
        """Whether the likeliest token is the one: greedy, without penalties."""
        return not self._chains

    def apply(self, candidates: Any, place: int) -> None:
        """Chooses one of a llama_token_data_array, for which `place` choices were made before."""
        reference = ctypes.byref(candidates)
        if len(self._chains) == 1:
            llama_cpp.llama_sampler_apply(self._chains[0], reference)
            return
        filters, xtc, end = self._chains
        llama_cpp.llama_sampler_apply(filters, reference)
        if _uniform(self._seed, place) < self._xtc_probability:
            llama_cpp.llama_sampler_apply(xtc, reference)
        llama_cpp.llama_sampler_apply(end, reference)

    def accept(self, token: int) -> None:
        """Lets penalties see a token."""
        llama_cpp.llama_sampler_accept(self._chains[0], token)

    def skip(self, choices: int) -> None:
        """Uses up as many random numbers as `choices` do, since llama.cpp's generator cannot be set to a place."""
        if self._is_greedy:
            return
        end = self._chains[-1]
        last = llama_cpp.llama_sampler_chain_get(end, llama_cpp.llama_sampler_chain_n(end) - 1)
        single = llama_cpp.llama_token_data()
        candidates = llama_cpp.llama_token_data_array()
        candidates.data = ctypes.pointer(single)
        for _ in range(choices):
            candidates.size, candidates.selected, candidates.sorted = 1, -1, True
            llama_cpp.llama_sampler_apply(last, ctypes.byref(candidates))

    def close(self) -> None:
        """Frees the samplers. Calling it twice is harmless."""
        while self._chains:
            llama_cpp.llama_sampler_free(self._chains.pop())


def prepare(params: SamplingParams, vocabulary: Vocabulary) -> None:
    """Makes what takes long and is kept; for any thread."""
    if params.has_dry:
        _dry(params, vocabulary)


def _row(parts: list[Any]) -> Any:
    chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    for part in parts:
        llama_cpp.llama_sampler_chain_add(chain, part)
    return chain


def _penalties(params: SamplingParams, vocabulary: Vocabulary) -> list[Any]:
    parts = []
    if params.penalises:
        parts.append(
            llama_cpp.llama_sampler_init_penalties(
                vocabulary.size,
                params.repeat_last_n,
                params.repeat_penalty,
                params.frequency_penalty,
                params.presence_penalty,
            )
        )
    if params.has_dry:
        parts.append(llama_cpp.llama_sampler_clone(_dry(params, vocabulary).native))
    return parts


def _filters(params: SamplingParams, vocabulary: Vocabulary) -> list[Any]:
    parts = _penalties(params, vocabulary)
    if params.top_k > 0:
        parts.append(llama_cpp.llama_sampler_init_top_k(params.top_k))
    if params.typical_p < 1:
        parts.append(llama_cpp.llama_sampler_init_min_p(TYPICAL_LEAST_SHARE, 1))
        parts.append(llama_cpp.llama_sampler_init_typical(params.typical_p, 1))
    if params.top_p < 1:
        parts.append(llama_cpp.llama_sampler_init_top_p(params.top_p, 1))
    if params.min_p > 0:
        parts.append(llama_cpp.llama_sampler_init_min_p(params.min_p, 1))
    return parts


class _Dry:
    """A DRY penalty that has seen nothing, to be copied."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        multiplier: float,
        base: float,
        allowed_length: int,
        last_n: int,
        breakers: tuple[str, ...],
    ) -> None:
        texts = [breaker.encode() for breaker in breakers]
        self.native = llama_cpp.llama_sampler_init_dry(
            vocabulary.native,
            multiplier,
            base,
            allowed_length,
            last_n,
            (ctypes.c_char_p * len(texts))(*texts),
            len(texts),
        )
        weakref.finalize(self, llama_cpp.llama_sampler_free, self.native).atexit = False


_kept_dry = lru_cache(maxsize=MOST_DRY_KEPT)(_Dry)


def _dry(params: SamplingParams, vocabulary: Vocabulary) -> _Dry:
    return _kept_dry(
        vocabulary,
        params.dry_multiplier,
        params.dry_base,
        params.dry_allowed_length,
        params.dry_penalty_last_n,
        params.dry_sequence_breakers,
    )


def _uniform(seed: int, place: int) -> float:
    """A number in [0, 1) that follows from both alone (SplitMix64's)."""
    bits = ((seed << 32) + (place + 1) * 0x9E37_79B9_7F4A_7C15) & _UINT64
    bits = ((bits ^ (bits >> 30)) * 0xBF58_476D_1CE4_E5B9) & _UINT64
    bits = ((bits ^ (bits >> 27)) * 0x94D0_49BB_1331_11EB) & _UINT64
    return ((bits ^ (bits >> 31)) >> 11) / (1 << 53)
