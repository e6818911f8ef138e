"""Keeps a generation inside a grammar: which tokens may come next, as a mask over the vocabulary (llguidance).

A constraint is a position in a compiled grammar. Its position follows from the tokens alone, so it can be found again by
replaying them. The grammar sees exactly the bytes that the client receives; control tokens have none and are never allowed,
except end tokens where the text may end.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence

import llama_cpp
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from engines.api_constraint import ConstraintSpec
from engines.errors import ConstraintFailed, InvalidRequest, Unavailable
from engines.runtime.constraint_gbnf import lark_rules
from engines.runtime.constraint_place import place_of
from engines.runtime.llama import Vocabulary

log = logging.getLogger("hydra.engine.constraint")

MAX_CACHED_GRAMMARS = 64
# A compiled grammar takes about a hundred bytes for each character of its text.
MAX_CACHED_CHARS = 1 << 20
MAX_MESSAGE_CHARS = 300
COMPILE_WAIT_S = 10.0
# Work on one answer's masks, in seconds of the core's thread: as much at once, and as much a token.
MASK_ALLOWANCE_S = 1.0
MASK_TOKEN_S = 0.003
# At most so many allowed tokens are looked at one by one; more of them are told apart by the whole row.
FEW_TOKENS = 1024
# Bounds one mask to some ten ms and one grammar to some tens of MB (measured with hostile grammars; see the tests).
_LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    step_max_items=10_000,
    max_items_in_row=3_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
_BITS_TO_PENALTY = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") == 1, 0.0, -np.inf
).astype(np.float32)


class _Tokens:
    """The vocabulary as llguidance asks for it. Text is never tokenised: masks do not force one way to write it."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = min(vocabulary.end_tokens)
        self.tokens = [piece or vocabulary.text_of(token).encode() for token, piece in enumerate(vocabulary.pieces)]
        self.special_token_ids = [token for token, piece in enumerate(vocabulary.pieces) if not piece]

    def __call__(self, text: bytes | str) -> list[int]:
        raw = text.encode() if isinstance(text, str) else text
        raise ValueError(f"the grammar asks for the tokens of {raw[:40]!r}")


class Constraint:
    """One choice's position in its grammar. For one thread at a time; raises ConstraintFailed once the grammar cannot go on.

    Its `spec`, compiled elsewhere, and a replay of the tokens so far give the same position.
    """

    def __init__(
        self, spec: ConstraintSpec, matcher: LLMatcher, vocabulary: Vocabulary, usable: NDArray[np.int32]
    ) -> None:
        self.spec = spec
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._usable = usable
        self._words = np.zeros_like(usable)
        self._penalties: NDArray[np.float32] | None = None
        self._spent_s = 0.0
        self._accepted = 0
        self._is_computed = False
        self.done = False

    def copy(self) -> Constraint:
        """The same position, to be moved on its own."""
        return Constraint(self.spec, self._matcher.deep_copy(), self._vocabulary, self._usable)

    def replay(self, tokens: Sequence[int]) -> None:
        """Takes the position that `tokens` lead to from the grammar's beginning."""
        self._matcher.reset()
        self.done, self._is_computed, self._accepted, self._spent_s = False, False, 0, 0.0
        for token in tokens:
            self.accept(token)

    def allowed(self) -> NDArray[np.int32] | None:
        """Ids of the tokens that may come next, ascending; None if there are more than FEW_TOKENS."""
        self._compute()
        if int(np.bitwise_count(self._words.view(np.uint32)).sum()) > FEW_TOKENS:
            return None
        return np.flatnonzero(self._bits()).astype(np.int32)

    def allows(self, ids: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Which of these tokens may come next; shape as given."""
        self._compute()
        words = self._words.view(np.uint32)[ids >> 5]
        allowed: NDArray[np.bool_] = (words >> (ids & 31).astype(np.uint32)) & 1 == 1
        return allowed

    def mask(self, logits: NDArray[np.float32]) -> None:
        """Sets the logits of all tokens that may not come next to minus infinity, in place; shape (vocabulary,)."""
        self._compute()
        if self._penalties is None:
            self._penalties = np.empty((self._words.size * 4, 8), dtype=np.float32)
        np.take(_BITS_TO_PENALTY, self._words.view(np.uint8), axis=0, out=self._penalties, mode="clip")
        logits += self._penalties.reshape(-1)[: logits.shape[0]]

    def accept(self, token: int) -> None:
        """Moves on by a token. Raises ConstraintFailed for one that the grammar does not allow."""
        if token in self._vocabulary.end_tokens and self._matcher.is_accepting():
            self.done = True
            return
        self._is_computed = False
        started = time.thread_time()
        if not self._matcher.consume_token(token):
            raise ConstraintFailed(f"The answer left its form: {_first_line(self._matcher.get_error())}")
        self._accepted += 1
        self._spend(started)

    def only_end(self, logits: NDArray[np.float32]) -> int:
        """The likeliest end token, where a bias forbids all that may come. Raises ConstraintFailed where the text cannot end."""
        if not self._matcher.is_accepting():
            raise ConstraintFailed("The request's logit_bias forbids every token that the answer's form allows.")
        return max(self._vocabulary.end_tokens, key=lambda token: (logits[token], -token))

    def _compute(self) -> None:
        if self._is_computed:
            return
        started = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        if self._matcher.is_error():
            raise ConstraintFailed(f"The answer's form cannot be followed: {_first_line(self._matcher.get_error())}")
        self._words &= self._usable
        self._is_computed = True
        self._spend(started)

    def _spend(self, started: float) -> None:
        """An expensive grammar would take the steps' time from everybody."""
        self._spent_s += time.thread_time() - started
        if self._spent_s > MASK_ALLOWANCE_S + MASK_TOKEN_S * self._accepted:
            raise ConstraintFailed("The answer's form is too expensive to follow.")

    def _bits(self) -> NDArray[np.uint8]:
        return np.unpackbits(self._words.view(np.uint8), bitorder="little", count=self._vocabulary.size)


class ConstraintCompiler:
    """Compiles what requests ask for, on any thread, one at a time; keeps what was compiled lately."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._compiling = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._marks = _marks(vocabulary)
        self._cached: OrderedDict[ConstraintSpec, Constraint] = OrderedDict()

    def compile(self, spec: ConstraintSpec) -> Constraint:
        """A constraint at the beginning of `spec`.

        Raises InvalidRequest with the field and the place for what does not compile or allows no text at all, and Unavailable
        when other requests' grammars keep the compiler busy.
        """
        if not self._compiling.acquire(timeout=COMPILE_WAIT_S):
            raise Unavailable("Other requests' grammars are being compiled; try again shortly.")
        try:
            if spec in self._cached:
                self._cached.move_to_end(spec)
            else:
                self._keep(spec, self._compiled(spec))
            return self._cached[spec].copy()
        finally:
            self._compiling.release()

    def _keep(self, spec: ConstraintSpec, constraint: Constraint) -> None:
        self._cached[spec] = constraint
        while len(self._cached) > 1 and (
            len(self._cached) > MAX_CACHED_GRAMMARS or sum(len(kept.text) for kept in self._cached) > MAX_CACHED_CHARS
        ):
            self._cached.popitem(last=False)

    def _compiled(self, spec: ConstraintSpec) -> Constraint:
        rules = lark_rules(spec.parts[0].rules, spec.parts[0].param) if spec.kind == "gbnf" else spec.rules()
        matcher = self._matcher(spec.lark(rules, knows_thinking=self._knows(spec.may_begin_with)))
        if matcher.is_error():
            raise self._refusal(spec, matcher.get_error())
        constraint = Constraint(spec, matcher, self._vocabulary, self._usable(spec))
        self._try(spec, constraint.copy())
        return constraint

    def _matcher(self, lark: str) -> LLMatcher:
        if self._tokenizer is None:
            if not self._vocabulary.end_tokens:
                raise InvalidRequest("This model has no end token, so an answer of a given form could not end.")
            started = time.monotonic()
            self._tokenizer = LLTokenizer(
                TokenizerWrapper(_Tokens(self._vocabulary)),
                n_vocab=self._vocabulary.size,
                eos_token=sorted(self._vocabulary.end_tokens),
            )
            log.info("the tokens for constrained output took %.2f s", time.monotonic() - started)
        return LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(lark), log_level=0, limits=_LIMITS)

    def _refusal(self, spec: ConstraintSpec, message: str) -> InvalidRequest:
        """Names the part of the request that does not compile alone."""
        for part in spec.parts if spec.kind != "gbnf" else ():
            if alone := self._complaint(f"{part.name}\n{part.rules}"):
                place = place_of(part.schema, self._complaint) if part.schema else ""
                return InvalidRequest(f"{part.param}: {place + ': ' if place else ''}{alone}", param=part.param)
        param = spec.parts[0].param
        return InvalidRequest(f"{param}: {_first_line(message)}", param=param)

    def _complaint(self, start: str) -> str | None:
        """What is wrong with a grammar that begins with the expression `start`, if anything is."""
        alone = self._matcher(f'%llguidance {{"no_forcing": true}}\nstart: {start}')
        return _first_line(alone.get_error()) if alone.is_error() else None

    def _try(self, spec: ConstraintSpec, constraint: Constraint) -> None:
        """Takes the first steps, where a grammar that nothing satisfies, or that explodes, shows it."""
        param = spec.parts[0].param
        try:
            for _ in range(2):
                row = np.zeros(self._vocabulary.size, dtype=np.float32)
                constraint.mask(row)
                allowed = np.flatnonzero(row == 0)
                if not allowed.size:
                    raise InvalidRequest(f"{param} allows no text.", param=param)
                if int(allowed[0]) in self._vocabulary.end_tokens:
                    return
                constraint.accept(int(allowed[0]))
        except ConstraintFailed as error:
            reason = "allows no text" if "NoExtension" in error.message else f"is too complex: {error.message}"
            raise InvalidRequest(f"{param} {reason}.", param=param) from error

    def _knows(self, mark: str | None) -> bool:
        """Whether the mark is a token of its own, as it is for models that were trained with it."""
        return mark is not None and len(self._vocabulary.tokenize(mark, add_special=False, parse_special=True)) == 1

    def _usable(self, spec: ConstraintSpec) -> NDArray[np.int32]:
        """A bit for each token that may be used at all: marks, which look like control tokens, only if the grammar names them."""
        text = spec.text
        bits = np.zeros((self._vocabulary.size + 31) // 32 * 32, dtype=np.uint8)
        bits[: self._vocabulary.size] = 1
        for token, mark in self._marks:
            if mark not in text:
                bits[token] = 0
        return np.packbits(bits, bitorder="little").view(np.int32)


def _marks(vocabulary: Vocabulary) -> list[tuple[int, str]]:
    """Tokens that a model's makers added for a meaning of their own, and that are text to llama.cpp: `<tool_call>`, `[PAD1]`."""
    marks = []
    for token, piece in enumerate(vocabulary.pieces):
        if len(piece) > 2 and (piece[:1] + piece[-1:]) in (b"<>", b"[]"):
            kind = llama_cpp.llama_vocab_get_attr(vocabulary.native, token)
            if kind & (llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED | llama_cpp.LLAMA_TOKEN_ATTR_UNUSED):
                marks.append((token, piece.decode("utf-8", "replace")))
    return marks


def _first_line(message: str) -> str:
    """llguidance's message without the listing of the grammar around the place."""
    text = re.split(r"<non-verbose/>|\n +\d+ \|", message)[0]
    text = re.sub(r"^(at )?\d+\(\d+\): (failed to compile JSON schema: )?", "", text)
    text = text.split(" Enable 'coerce_one_of'")[0]
    return " ".join(text.removeprefix("panic: ").split())[:MAX_MESSAGE_CHARS] or "the grammar cannot be used"
