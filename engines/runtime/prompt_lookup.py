"""Drafts without a model: what followed the last time the text read like this."""

from __future__ import annotations

from itertools import takewhile
from weakref import WeakKeyDictionary

from engines.runtime.generation import Generation
from engines.runtime.slots import Slot

# Runs of tokens that are looked up, longer ones first: they promise more.
RUN_LENGTHS = (4, 2)
# How far back a text is read at all, and how much of it between two steps: a token takes two microseconds and 240 bytes.
WINDOW_TOKENS, SLICE_TOKENS = 32_768, 2048


class RunIndex:
    """Where each run of tokens of one text was last seen; grows with the text."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, ...], int] = {}
        self._done = 0

    def following(self, tokens: list[int], count: int) -> list[int]:
        """Up to `count` tokens that stood behind the latest earlier occurrence of the text's end; none as long as a long text
        has not been read to its end."""
        if not self._extend(tokens):
            return []
        for length in RUN_LENGTHS:
            behind = self._last.get(tuple(tokens[-length:])) if len(tokens) > length else None
            if behind is not None:
                return tokens[behind : behind + count]
        return []

    def _extend(self, tokens: list[int]) -> bool:
        """Takes in runs that end before the last token, so that the text's end finds only what was before it. False when more
        is left than one step has time for."""
        begin = max(self._done, len(tokens) - WINDOW_TOKENS, min(RUN_LENGTHS))
        stop = min(len(tokens), begin + SLICE_TOKENS)
        for end in range(begin, stop):
            for length in RUN_LENGTHS:
                if end >= length:
                    self._last[tuple(tokens[end - length : end])] = end
        self._done = max(self._done, stop)
        return self._done == len(tokens)


class PromptLookup:
    """Drafts for slots out of their own prompts and answers."""

    def __init__(self) -> None:
        self._indices: WeakKeyDictionary[Generation, RunIndex] = WeakKeyDictionary()

    def propose(self, slots: list[Slot], count: int) -> dict[Slot, tuple[int, ...]]:
        """Up to `count` tokens for each slot; none where its text never came this way before."""
        drafts = {}
        for slot in slots:
            if slot.generation is not None:
                index = self._indices.setdefault(slot.generation, RunIndex())
                found = index.following(slot.generation.tokens, count)
                if slot.generation.spans:  # what stands for an image is no token
                    found = list(takewhile(lambda token: token >= 0, found))
                drafts[slot] = tuple(found)
        return drafts
