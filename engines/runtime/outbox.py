"""From drawn tokens to pieces in mailboxes: the way out of the core's thread.

On a GPU the text of a step is made while the card computes the next one (`write` is called once that is under way); where
llama_decode itself computes, that would keep every token back for a step, so there it is made at once.
"""

from __future__ import annotations

import asyncio
import logging
import time

from engines.errors import EngineError
from engines.runtime.generation import Generation, Mailbox, Piece, deliver
from engines.runtime.llama import Vocabulary
from engines.runtime.metrics import EngineMetrics
from engines.runtime.sampler import TokenLogprob
from engines.runtime.text import NOTHING, Released

log = logging.getLogger("hydra.engine.outbox")


class Outbox:
    """Used by the core's thread only; `send` hands everything to the event loop in one call."""

    def __init__(self, loop: asyncio.AbstractEventLoop, metrics: EngineMetrics) -> None:
        self._loop = loop
        self._metrics = metrics
        self._pieces: list[tuple[Mailbox, Piece]] = []
        self._unwritten: list[tuple[Generation, bytes, TokenLogprob | None]] = []

    def token(self, generation: Generation, token: int, vocabulary: Vocabulary, logprob: TokenLogprob | None) -> None:
        """A token that does not end its generation; its text is made by `write`."""
        self._unwritten.append((generation, vocabulary.pieces[token], logprob))

    def write(self) -> None:
        """Turns the tokens since the last call into pieces, as far as their text may be sent."""
        if self._unwritten:
            unwritten, self._unwritten = self._unwritten, []
            for generation, piece, logprob in unwritten:
                self.say(generation, generation.text.feed(piece, logprob))

    def say(self, generation: Generation, released: Released) -> None:
        if released.text or released.logprobs:
            ids = generation.unposted()
            self.post(generation, Piece(generation.choice, released.text, released.logprobs, token_ids=ids))

    def post(self, generation: Generation, piece: Piece) -> None:
        self._pieces.append((generation.mailbox, piece))

    def end(
        self,
        generation: Generation,
        released: Released = NOTHING,
        reason: str | None = None,
        *,
        error: EngineError | None = None,
        is_told: bool = False,
    ) -> None:
        """The one exit of every generation: frees its sampler, counts it, and posts its last piece unless it was cancelled, or
        its reader `is_told` of its end already."""
        self.write()
        if generation.sampler:
            generation.sampler.close()
        stats = generation.stats(time.monotonic())
        # Who was told may have left since then.
        is_cancelled = generation.cancelled and not is_told
        self._metrics.ended("cancelled" if is_cancelled else error.code if error else str(reason), stats)
        if reason is not None and reason != "moved":
            generation.outcome = reason, stats
        if not (generation.cancelled or is_told):
            text, logprobs, ids = released.text, released.logprobs, generation.unposted()
            self.post(generation, Piece(generation.choice, text, logprobs, None, reason, error, stats, ids))

    def send(self) -> None:
        if self._pieces:
            pieces, self._pieces = self._pieces, []
            self.call(deliver, pieces)

    def call(self, callback: object, *args: object) -> None:
        """Runs something on the event loop."""
        try:
            self._loop.call_soon_threadsafe(callback, *args)  # type: ignore[arg-type]
        except RuntimeError:
            # The loop has closed: the process is ending and nobody is left to hear it.
            log.debug("the event loop is closed")
