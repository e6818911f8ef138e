"""Texts as the token ids that a pooling model reads: plain inputs, and pairs of query and document.

What users send is text: names of control tokens in it stay text. Only a template's own control tokens become tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from engines.api_embeddings import Input
from engines.errors import ContextLengthExceeded, InvalidRequest
from engines.runtime.embedding_job import Tokens
from engines.runtime.embedding_llama import PoolingLlama

# A request's tokens together; at 4 bytes each, a full waiting line of them stays small.
MAX_REQUEST_TOKENS = 1 << 20
_PLACES = re.compile(r"\{(query|document)\}")


def as_tokens(inputs: Sequence[Input], llama: PoolingLlama, param: str) -> list[Tokens]:
    """The inputs as token ids. Raises ContextLengthExceeded or InvalidRequest, which say which input is wrong."""
    found = []
    for index, item in enumerate(inputs):
        if isinstance(item, str):
            refuse_hopeless(item, index, llama, param)
            tokens = llama.vocabulary.tokenize(item, add_special=True, parse_special=False)
        else:
            tokens = item
            if max(tokens) >= llama.vocabulary.size:
                message = f"Input {index} has token {max(tokens)}; the vocabulary has {llama.vocabulary.size}."
                raise InvalidRequest(message, param=param)
        found.append(checked(tokens, index, llama, param))
    return bounded(found, param)


def refuse_hopeless(text: str, index: int, llama: PoolingLlama, param: str) -> None:
    """No token is longer than the longest piece, so a huge text can be refused before it is tokenised."""
    at_least = len(text.encode()) // llama.vocabulary.longest_piece_bytes
    if llama.is_lossless and at_least > llama.input_limit_tokens:
        raise _too_long(f"at least {at_least}", index, llama, param)


def checked(tokens: Sequence[int], index: int, llama: PoolingLlama, param: str) -> Tokens:
    """One input within the engine's limit."""
    if not tokens:
        raise InvalidRequest(f"Input {index} has no token.", param=param)
    if len(tokens) > llama.input_limit_tokens:
        raise _too_long(str(len(tokens)), index, llama, param)
    return np.array(tokens, dtype=np.int32)


def bounded(found: list[Tokens], param: str) -> list[Tokens]:
    """All of a request's inputs within its bound."""
    total = sum(len(tokens) for tokens in found)
    if total > MAX_REQUEST_TOKENS:
        message = f"The inputs have {total} tokens together; a request may have {MAX_REQUEST_TOKENS}."
        raise InvalidRequest(message, param=param, hint="Send them in several requests.")
    return found


def _too_long(count: str, index: int, llama: PoolingLlama, param: str) -> ContextLengthExceeded:
    hint = "Shorten it, or cut it into several inputs."
    if llama.input_limit_tokens < llama.context_train_tokens:
        settings = "context_tokens" if llama.splits_inputs else "context_tokens, batch_tokens and micro_batch_tokens"
        hint = f"{hint} The model itself takes {llama.context_train_tokens}: serve it with a larger {settings}."
    message = f"Input {index} has {count} tokens; this engine takes {llama.input_limit_tokens}."
    return ContextLengthExceeded(message, param=param, hint=hint)


class PairPrompt:
    """How a ranking model wants query and document: by its own template, else joined as its tokenizer joins two texts."""

    def __init__(self, llama: PoolingLlama) -> None:
        self._llama = llama
        self._vocabulary = llama.vocabulary
        self._parts = self._split(llama.rerank_template) if llama.rerank_template else None

    def tokens(self, query: str, documents: Sequence[str]) -> list[Tokens]:
        """A pair for each document. Raises ContextLengthExceeded or InvalidRequest, which say which document is wrong."""
        for index, document in enumerate(documents):
            refuse_hopeless(query, index, self._llama, "query")
            refuse_hopeless(document, index, self._llama, "documents")
        if self._parts is not None:
            pairs = [self._filled(self._parts, query, document) for document in documents]
        else:
            asked = self._plain(query)
            pairs = [self._joined(asked, self._plain(document)) for document in documents]
        return bounded([checked(pair, i, self._llama, "documents") for i, pair in enumerate(pairs)], "documents")

    def _split(self, template: str) -> list[int | str]:
        """The template as its control tokens and the texts between them; a text is never parsed for such tokens again."""
        controls = {
            text: token
            for token, piece in enumerate(self._vocabulary.pieces)
            if not piece and (text := self._vocabulary.text_of(token)) and text in template
        }
        if not controls:
            return [template]
        names = sorted(controls, key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, names))})", template)
        return [controls.get(part, part) for part in parts if part]

    def _filled(self, parts: Sequence[int | str], query: str, document: str) -> list[int]:
        values = {"query": query, "document": document}
        tokens: list[int] = []
        for part in parts:
            # One pass, so that a query that holds "{document}" stays as it is.
            tokens += [part] if isinstance(part, int) else self._plain(_PLACES.sub(lambda m: values[m[1]], part))
        return tokens

    def _joined(self, query: list[int], document: list[int]) -> list[int]:
        llama, vocabulary = self._llama, self._vocabulary
        end = vocabulary.eos if vocabulary.eos >= 0 else llama.separator
        tokens = [vocabulary.bos] if vocabulary.adds_bos else []
        tokens += query
        tokens += [end] if llama.adds_eos else []
        tokens += [llama.separator] if llama.adds_separator else []
        tokens += document
        if llama.adds_eos:
            return [*tokens, end]
        # Without an end token of its own, the separator ends a pair as it ends a single text.
        return [*tokens, llama.separator] if llama.adds_separator else tokens

    def _plain(self, text: str) -> list[int]:
        return self._vocabulary.tokenize(text, add_special=False, parse_special=False) if text else []
