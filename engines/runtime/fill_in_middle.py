"""Prompts for text between a prefix and a suffix, with the marker tokens that a code model was trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import llama_cpp

from engines.api_infill import ContextFile
from engines.errors import UnsupportedParameter
from engines.runtime.llama import Vocabulary


@dataclass(frozen=True)
class Markers:
    """A vocabulary's marker tokens; `file` and `repository` are -1 where it has none."""

    before: int
    after: int
    middle: int
    file: int
    repository: int

    @classmethod
    def of(cls, vocabulary: Vocabulary, param: str) -> Markers:
        """Raises UnsupportedParameter, with `param`, for a vocabulary without the first three."""
        native = vocabulary.native
        markers = cls(
            llama_cpp.llama_vocab_fim_pre(native),
            llama_cpp.llama_vocab_fim_suf(native),
            llama_cpp.llama_vocab_fim_mid(native),
            llama_cpp.llama_vocab_fim_sep(native),
            llama_cpp.llama_vocab_fim_rep(native),
        )
        if min(markers.before, markers.after, markers.middle) < 0:
            raise UnsupportedParameter(
                f"{param} needs a model with fill-in-the-middle tokens; this one's vocabulary has none.", param=param
            )
        return markers


def fill_in_middle(vocabulary: Vocabulary, prefix: Sequence[int], suffix: str, param: str) -> list[int]:
    """Token ids that ask for what stands between `prefix` and `suffix`. The suffix is text and makes no control tokens.

    Raises UnsupportedParameter, with `param`, for a vocabulary without markers.
    """
    markers = Markers.of(vocabulary, param)
    behind = vocabulary.tokenize(suffix, add_special=False, parse_special=False)
    return [*_start(vocabulary), markers.before, *prefix, markers.after, *behind, markers.middle]


def with_files(vocabulary: Vocabulary, prompt: list[int], files: Sequence[ContextFile], room_tokens: int) -> list[int]:
    """`prompt`, which `fill_in_middle` made, with parts of other files before it: of all their tokens the last that have room."""
    markers = Markers.of(vocabulary, "input_extra")
    before: list[int] = []
    if files and markers.repository >= 0:
        before += [markers.repository, *vocabulary.tokenize("project\n", add_special=False, parse_special=False)]
    for file in files:
        head = f"{file.filename}\n" if markers.file >= 0 else "\n\n"
        before += [markers.file] if markers.file >= 0 else []
        before += vocabulary.tokenize(f"{head}{file.text}\n", add_special=False, parse_special=False)
    start = _start(vocabulary)
    return [*start, *before[max(0, len(before) - max(0, room_tokens)) :], *prompt[len(start) :]]


def _start(vocabulary: Vocabulary) -> list[int]:
    return [vocabulary.bos] if vocabulary.adds_bos and vocabulary.bos >= 0 else []
