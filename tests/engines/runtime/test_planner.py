"""Which rows a step has where a processor computes, and where a card does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from engines.config import EngineConfig
from engines.runtime.generation import Generation, Mailbox
from engines.runtime.llama import Llama
from engines.runtime.planner import StepPlanner
from engines.runtime.prefix import PrefixCache
from engines.runtime.sampler import SamplingParams
from tests.synthetic_gguf import SyntheticModel

GREEDY = SamplingParams(temperature=0)


class Planned:
    """A planner and its slots; what it plans counts as computed, and every draw gives the same token."""

    def __init__(self, llama: Llama, config: EngineConfig) -> None:
        self.cache = PrefixCache(llama, config)
        self.planner = StepPlanner(llama, self.cache, config)
        self.planner.shared_tokens = 32

    def begin(self, slot: int, prompt_tokens: int) -> None:
        prompt = [(slot * 31 + i) % 250 for i in range(prompt_tokens)]
        work = Generation("r", prompt, max_new_tokens=99, mailbox=Mailbox(), params=GREEDY, stops=(),
                          deadline_at=time.monotonic() + 60)  # fmt: skip
        self.cache.slots[slot].begin(work)

    def step(self) -> list[tuple[int, int]]:
        """Slots and the tokens of each in the step."""
        rows = self.planner.plan()
        for row in rows:
            generation = row.slot.generation
            assert generation is not None
            start = len(row.slot.sequence)
            row.slot.sequence.append(generation.tokens[start : start + row.count])
            if row.draws:
                generation.tokens.append(7)
        return [(row.slot.index, row.count) for row in rows]


@pytest.fixture(scope="module")
def planned(tiny_model: Callable[..., SyntheticModel]) -> Iterator[Planned]:
    config = EngineConfig(str(tiny_model("llama").path), "tiny", slots=3, context_tokens=256, batch_tokens=64)
    llama = Llama(config, 1, lambda _share: None)
    yield Planned(llama, config)
    llama.close()


@pytest.fixture(autouse=True)
def empty(planned: Planned) -> None:
    for slot in planned.cache.slots:
        slot.release()
        slot.sequence.clear()


def test_a_processor_computes_chunks_and_next_tokens_in_turn(planned: Planned) -> None:
    planned.begin(0, 5)
    assert planned.step() == [(0, 5)]
    planned.begin(1, 70)
    planned.begin(2, 1)
    steps = [planned.step() for _ in range(7)]
    # A prompt that is one token, or has one left, goes with the others' next tokens.
    assert steps == [
        [(0, 1), (2, 1)],
        [(1, 32)],
        [(0, 1), (2, 1)],
        [(1, 32)],
        [(0, 1), (2, 1)],
        [(1, 6)],
        [(0, 1), (1, 1), (2, 1)],
    ]


def test_without_cells_for_a_chunk_the_others_go_on(planned: Planned) -> None:
    planned.begin(0, 5)
    planned.step()
    planned.begin(1, 60)
    taken = planned.cache.ledger.take(planned.cache.ledger.free - 32)
    try:
        # 32 cells are free, but the one that decodes needs one of them.
        assert [planned.step() for _ in range(3)] == [[(0, 1)]] * 3
    finally:
        planned.cache.ledger.drop(np.frombuffer(taken, dtype=np.int32))


def test_a_card_computes_them_together(planned: Planned) -> None:
    planned.planner.alternates = False
    try:
        planned.begin(0, 5)
        planned.step()
        planned.begin(1, 40)
        assert [planned.step() for _ in range(3)] == [[(0, 1), (1, 32)], [(0, 1), (1, 8)], [(0, 1), (1, 1)]]
    finally:
        planned.planner.alternates = True
