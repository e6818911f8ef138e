"""Which engine computed which beginning of a prompt, as far as this process has seen. Hints: engines look themselves."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence

from sessions.key_chain import Link

MAX_KEYS = 50_000
# Longer ago than this an engine has most likely used the memory for something else.
FRESH_S = 900.0


class PrefixHints:
    """Bounded, the longest unused first to go. Keys hold their owner: nobody learns of another's beginnings."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str], dict[int, tuple[int, float]]] = OrderedDict()

    def note(self, scope: str, chain: Sequence[Link], engine_id: int, prompt_tokens: int) -> None:
        """The engine has computed the prompt of this chain, which had so many tokens in all."""
        if not chain:
            return
        now, whole_bytes = time.monotonic(), max(1, chain[-1].size_bytes)
        for link in chain:
            place = (scope, link.key)
            self._known.setdefault(place, {})[engine_id] = (prompt_tokens * link.size_bytes // whole_bytes, now)
            self._known.move_to_end(place)
        while len(self._known) > MAX_KEYS:
            self._known.popitem(last=False)

    def tokens(self, scope: str, chain: Sequence[Link]) -> dict[int, int]:
        """By engine, how many tokens of this chain it has computed lately."""
        found: dict[int, int] = {}
        oldest = time.monotonic() - FRESH_S
        for link in reversed(chain):
            for engine_id, (tokens, noted_s) in self._known.get((scope, link.key), {}).items():
                if noted_s >= oldest:
                    found.setdefault(engine_id, tokens)
        return found

    def longest(self, scope: str, chain: Sequence[Link]) -> tuple[int, int]:
        """Tokens and bytes of the longest beginning of the chain that any engine has computed; (0, 0) of an unknown one."""
        for link in reversed(chain):
            known = self._known.get((scope, link.key))
            if known:
                return next(iter(known.values()))[0], link.size_bytes
        return 0, 0

    def forget(self, engine_id: int) -> None:
        """The engine was lost, and its memory with it."""
        for engines in self._known.values():
            engines.pop(engine_id, None)
