"""Cuts text that llama.cpp's tokenizers cannot take in one go.

Many byte-pair vocabularies (Mistral's, DeepSeek's, gpt-oss's) are split by `std::regex`, which recurses once for every
character of a match: some 26,000 letters, or dashes, in a row overflow a stack of 8 MiB and end the process. No match goes on
from whitespace to other text, nor beyond newlines that follow other text, so only text without such a change is cut, every
few thousand characters and never inside of a special token. Other text is left as it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

# The longest match is less than twice this, and as many newlines behind it: some 8,000 characters.
BLOCK_CHARS = 2048

_ONE_KIND = re.compile(r"(?:\s+|\S+)\Z")


def cut_long_runs(text: str, specials: Sequence[str]) -> list[str]:
    """`text` in pieces that can be tokenised one after the other; a single one for nearly every text.

    Where it is cut depends on what stands before the cut and right behind it, so a longer text has the same first pieces.
    """
    cuts = []
    for start in range(0, len(text) - BLOCK_CHARS + 1, BLOCK_CHARS):
        if _ONE_KIND.match(text, start, start + BLOCK_CHARS):
            cuts += [_before_special(text, place, specials) for place in (start, start + BLOCK_CHARS)]
    places = sorted({0, *cuts, len(text)})
    return [text[begin:end] for begin, end in pairwise(places)] or [text]


def _before_special(text: str, place: int, specials: Sequence[str]) -> int:
    """`place`, or the beginning of the special token that it would cut in two."""
    longest = max(map(len, specials), default=1)
    begin = max(0, place - longest + 1)
    near = text[begin : place + longest - 1]
    for special in specials:
        found = near.find(special)
        while found >= 0:
            if begin + found < place < begin + found + len(special):
                return begin + found
            found = near.find(special, found + 1)
    return place
