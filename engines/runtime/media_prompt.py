"""A prompt with images in it: the rendered text, cut at its markers, as token ids and spans."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engines.errors import InvalidRequest
from engines.runtime.llama import Vocabulary
from engines.runtime.media_projector import Part
from engines.runtime.media_span import MediaSpan, PlacedSpan, SpanMap


@dataclass(frozen=True)
class MediaPrompt:
    """`tokens` holds the spans' ids too. `ends` are the tokens' ends in the rendered text's bytes; an image ends where its marker
    does, and all of it but its last id where the text before it does."""

    tokens: list[int]
    spans: SpanMap
    ends: NDArray[np.int64]


def new_marker() -> str:
    """What stands for an image while the template is rendered; drawn anew each time, so that no user can write it."""
    return f"<|image-{secrets.token_hex(12)}|>"


def assemble(
    text: str, marker: str, images: Sequence[Sequence[Part]], vocabulary: Vocabulary, *, add_special: bool
) -> MediaPrompt:
    """`text` with the images in the places of its markers. Raises InvalidRequest where the template dropped or doubled one."""
    pieces = text.split(marker)
    if len(pieces) != len(images) + 1:
        raise InvalidRequest(
            f"The model's chat template shows {len(pieces) - 1} of {len(images)} images.",
            param="messages",
            hint="Send images in user messages.",
        )
    tokens: list[int] = []
    lengths: list[NDArray[np.int64]] = []
    placed: list[PlacedSpan] = []
    for index, piece in enumerate(pieces):
        if piece or (add_special and index == 0):
            begins = add_special and index == 0
            read = vocabulary.tokenize(piece, add_special=begins, parse_special=True)
            tokens += read
            written = vocabulary.written_bytes[read].astype(np.int64)
            if begins and vocabulary.adds_bos and read[0] == vocabulary.bos:
                written[0] = 0  # the vocabulary put it there; the text does not have it
            lengths.append(written)
        if index < len(images):
            begin = len(tokens)
            for part in images[index]:
                if isinstance(part, MediaSpan):
                    placed.append(PlacedSpan(len(tokens), part))
                    tokens += part.ids
                else:
                    tokens += part
            image = np.zeros(len(tokens) - begin, dtype=np.int64)
            image[-1:] = len(marker.encode())
            lengths.append(image)
    return MediaPrompt(tokens, SpanMap(placed), np.cumsum(np.concatenate(lengths)))
