"""One request for embeddings or scores: its inputs as token ids, and the future of what they pool to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engines.errors import EngineError

Tokens = NDArray[np.int32]
Values = NDArray[np.float32]


@dataclass(eq=False)
class EmbeddingJob:
    """Owned by the core's thread after submission, except `cancelled`, which anybody may set, and `result`, the loop's.

    `result` is set on the event loop: the pooled values of all inputs, in their order, each of shape (width,).
    """

    request_id: str
    inputs: Sequence[Tokens]
    deadline_at: float
    result: asyncio.Future[list[Values]]
    cancelled: bool = False
    ended: bool = False
    queued_at: float = field(default_factory=time.monotonic)
    started_at: float | None = None
    computed_tokens: int = 0

    def __post_init__(self) -> None:
        self.next_input = 0
        self._left = len(self.inputs)
        self._values: list[Values | None] = [None] * len(self.inputs)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(tokens) for tokens in self.inputs)

    @property
    def has_more(self) -> bool:
        """Whether an input is left that no step has taken yet."""
        return self.next_input < len(self.inputs)

    def fill(self, index: int, values: Values) -> bool:
        """Notes what an input pooled to. True when it was the last one missing."""
        self._left -= self._values[index] is None
        self._values[index] = values
        return self._left == 0

    @property
    def values(self) -> list[Values]:
        return [values for values in self._values if values is not None]


def settle(ended: Sequence[tuple[EmbeddingJob, EngineError | None]]) -> None:
    """Runs on the event loop: answers whoever still waits."""
    for job, error in ended:
        if job.result.done():
            continue
        if error is None:
            job.result.set_result(job.values)
        else:
            job.result.set_exception(error)
