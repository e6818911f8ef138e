"""The synthetic tests' tokenizer as a vocabulary for the benches' model writer, which then needs no llama.cpp source."""

from __future__ import annotations

import gguf

from bench.vocabulary import Vocabulary
from tests.synthetic_gguf import CHAT_TEMPLATE
from tests.synthetic_vocabulary import FIRST_FILLER, FIRST_SPECIAL, IM_END, MERGES, token_texts

VOCAB = 512


def small_vocabulary() -> Vocabulary:
    kinds = [gguf.TokenType.NORMAL] * VOCAB
    kinds[FIRST_SPECIAL:FIRST_FILLER] = [gguf.TokenType.CONTROL] * (FIRST_FILLER - FIRST_SPECIAL)
    return Vocabulary(token_texts(VOCAB), kinds, list(MERGES), "qwen2", IM_END, CHAT_TEMPLATE)
