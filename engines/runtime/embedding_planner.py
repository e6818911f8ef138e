"""Which inputs of which requests the next step of a pooling engine computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from engines.config import EngineConfig
from engines.runtime.embedding_job import EmbeddingJob, Tokens
from engines.runtime.embedding_llama import InputBatch, PoolingLlama

# A step's aim: a new request waits for the end of the running one. An input that cannot be split may take longer.
STEP_S = 0.5
MIN_STEP_TOKENS = 32
OLDEST_EVERY_STEPS = 4


@dataclass(frozen=True)
class Part:
    """`count` tokens of one input from `start` on, in sequence `seq`; the values can be read after it if it `ends`."""

    job: EmbeddingJob
    index: int
    seq: int
    start: int
    count: int

    @property
    def tokens(self) -> Tokens:
        return self.job.inputs[self.index]

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def ends(self) -> bool:
        return self.end == len(self.tokens)


class PoolingPlanner:
    """Fills one reusable batch per step with inputs of all requests. At most one input is left unfinished at a time."""

    def __init__(self, llama: PoolingLlama, config: EngineConfig) -> None:
        self.batch = InputBatch(config.pooled_step_tokens)
        self.tokens_per_s = 0.0
        self._llama = llama
        self._sequences = config.sequences
        self._cells = config.cells
        self._unfinished: Part | None = None
        self._alone: deque[tuple[EmbeddingJob, int]] = deque()
        self._steps = 0

    def plan(self, jobs: Sequence[EmbeddingJob]) -> list[Part]:
        """The next step's parts, also in `batch`; none when there is no work."""
        self.batch.clear()
        parts = self._first()
        # What has been refused in company is tried by itself, so that only the faulty input's request ends.
        alone = parts and self._alone and (parts[0].job, parts[0].index) == self._alone[0]
        if not alone:
            self._fill(parts, jobs)
        for part in parts:
            self.batch.add_input(part.seq, part.start, part.tokens[part.start : part.end])
        self._unfinished = next((part for part in parts if not part.ends), None)
        return parts

    def _first(self) -> list[Part]:
        """What comes before all others: the input that is under way, else one that was refused in company."""
        held = self._unfinished
        if held is not None:
            count = min(len(held.tokens) - held.end, self._aim())
            return [Part(held.job, held.index, held.seq, held.end, count)]
        if self._alone:
            job, index = self._alone[0]
            return [self._begin(job, index, 0, self._aim() if self._llama.splits_inputs else self.batch.capacity)]
        return []

    def _fill(self, parts: list[Part], jobs: Sequence[EmbeddingJob]) -> None:
        taken = {part.seq for part in parts}
        free = [seq for seq in range(self._sequences) if seq not in taken]
        # The unfinished input's earlier tokens stay in their cells.
        room = min(self._aim() - sum(p.count for p in parts), self._cells - sum(p.end for p in parts))
        for job in self._in_order(jobs):
            while job.has_more and free and room > 0:
                length = len(job.inputs[job.next_input])
                fits = length <= room or self._llama.splits_inputs
                # An input that is longer than the aim still has to be computed one day; then it starts a step.
                if not fits and parts:
                    return
                part = self._begin(job, job.next_input, free.pop(0), room if self._llama.splits_inputs else length)
                job.next_input += 1
                room -= part.count
                parts.append(part)
                if not part.ends:
                    return

    def _begin(self, job: EmbeddingJob, index: int, seq: int, room: int) -> Part:
        return Part(job, index, seq, 0, min(len(job.inputs[index]), room))

    def _in_order(self, jobs: Sequence[EmbeddingJob]) -> Sequence[EmbeddingJob]:
        """Who has had least comes first, so that a single text passes a book; every few steps whoever came first."""
        self._steps += 1
        if self._steps % OLDEST_EVERY_STEPS == 0:
            return jobs
        return sorted(jobs, key=lambda job: (job.computed_tokens, job.queued_at))

    def _aim(self) -> int:
        """Tokens of a step that takes about STEP_S."""
        if not self.tokens_per_s:
            return self.batch.capacity
        return min(self.batch.capacity, max(MIN_STEP_TOKENS, int(self.tokens_per_s * STEP_S)))

    def done(self, part: Part) -> None:
        """An input's values were read, or it will not be computed any more."""
        if self._alone and (part.job, part.index) == self._alone[0]:
            self._alone.popleft()

    def refused(self, parts: Sequence[Part]) -> None:
        """Plans each input of a refused step again, alone and from its beginning."""
        self._unfinished = None
        self._alone.extend((part.job, part.index) for part in parts)

    def forget(self, job: EmbeddingJob) -> None:
        """Drops what is under way for a request that has ended."""
        if self._unfinished is not None and self._unfinished.job is job:
            self._llama.clear(self._unfinished.seq)
            self._unfinished = None
        self._alone = deque(entry for entry in self._alone if entry[0] is not job)

    def reset(self) -> None:
        """Empties the context; nothing is under way afterwards."""
        self._unfinished = None
        self._alone.clear()
        for seq in range(self._sequences):
            self._llama.clear(seq)
