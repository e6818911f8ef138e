"""A pool of engines in simulated time: prompts in chunks between others' steps, slots, KV memory and stores.

The engine's own rules are kept: whoever is nearest to a first token computes first, every fourth chunk whoever came first;
while some decode, a chunk of a prompt stands between two of their steps. Speeds are those of real cards (see `cards`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.router_traces import BLOCK_TOKENS, TraceRequest
from pools.router_views import DecodeRates, PrefillFit

CHUNK_S = 0.4
OLDEST_SHARE = 0.25
# q8_0 K/V of Qwen 3.6 35B-A3B: 357 MB for 32,768 tokens.
BYTES_PER_TOKEN = 10_900
MEMORY_BYTES_PER_S = 5e9
LINK_BYTES_PER_S = 1e9
RESTORE_FIXED_S = 0.01
STORE_TOKENS = 2_000_000


@dataclass(frozen=True)
class Card:
    """What one engine's device can do."""

    name: str
    prefill: PrefillFit
    decode: DecodeRates
    slots: int
    cells: int


def card(name: str, compute: float, bandwidth: float, slots: int, cells: int) -> Card:
    """A card by its share of an H200's fp16 rate and memory bandwidth; the H200 was measured with Qwen 3.6 35B-A3B in Q4_0.

    Its prefill: 2,048 tokens at 9,569 a second, 65,536 in 7.56 s. Its steps: 3.7, 8.7 and 19 ms for 1, 8 and 32 streams, and
    1.0 ms more when eight streams hold 61,440 tokens more.
    """
    return Card(
        name,
        PrefillFit(1.0414e-4 / compute, 1.712e-10 / compute),
        DecodeRates(
            tuple((streams, step_s / bandwidth) for streams, step_s in ((1, 0.0037), (8, 0.0087), (32, 0.019))),
            1.63e-8 / bandwidth,
        ),
        slots,
        cells,
    )


def cards() -> list[Card]:
    """An RTX 5060 Ti (sm_120), an RTX 3060 (sm_86) and a Tesla P100 (sm_60), scaled by their makers' peak figures."""
    return [
        card("sm_120", 95 / 989, 448 / 4800, slots=8, cells=262_144),
        card("sm_86", 51 / 989, 360 / 4800, slots=8, cells=196_608),
        card("sm_60", 18.7 / 989, 732 / 4800, slots=8, cells=262_144),
    ]


@dataclass(eq=False)
class Job:
    """A request on its way. `todo_s` is what computing its prompt takes alone, `left_tokens` what is still to be said."""

    request: TraceRequest
    remote: bool = False
    todo_s: float = 0.0
    todo_tokens: float = 0.0
    restore_s: float = 0.0
    left_tokens: float = 0.0
    cached_tokens: int = 0
    began_at_s: float = 0.0
    first_at_s: float = 0.0
    ended_at_s: float = 0.0
    predicted_s: float = 0.0


class Blocks:
    """The blocks of a memory, the longest unused first."""

    def __init__(self, tokens: int) -> None:
        self.limit = tokens // BLOCK_TOKENS
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def copy(self) -> Blocks:
        twin = Blocks(self.limit * BLOCK_TOKENS)
        twin._blocks = self._blocks.copy()
        return twin

    def leading(self, blocks: Sequence[int]) -> int:
        """How many blocks from the first are here."""
        return next((i for i, block in enumerate(blocks) if block not in self._blocks), len(blocks))

    def add(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self.limit:
            self._blocks.popitem(last=False)


@dataclass(eq=False)
class SimulatedEngine:
    """One engine; `advance` takes it to a later moment."""

    number: int
    card: Card
    now_s: float = 0.0
    queue: list[Job] = field(default_factory=list)
    filling: list[Job] = field(default_factory=list)
    decoding: list[Job] = field(default_factory=list)
    ended: list[Job] = field(default_factory=list)
    slot_s: float = 0.0
    others: Sequence[SimulatedEngine] = ()
    saves: bool = True

    def __post_init__(self) -> None:
        self.memory = Blocks(self.card.cells)
        self.store = Blocks(STORE_TOKENS)

    @property
    def resident_tokens(self) -> float:
        return sum(job.request.prompt_tokens + job.request.output_tokens - job.left_tokens for job in self.decoding)

    @property
    def in_flight(self) -> int:
        return len(self.queue) + len(self.filling) + len(self.decoding)

    def submit(self, job: Job) -> None:
        self.queue.append(job)
        self._admit()

    def _admit(self) -> None:
        while self.queue and len(self.filling) + len(self.decoding) < self.card.slots:
            job = self.queue.pop(0)
            request = job.request
            held = self.memory.leading(request.blocks)
            stored = self.store.leading(request.blocks)
            speed = MEMORY_BYTES_PER_S
            if job.remote:
                elsewhere = max((engine.store.leading(request.blocks) for engine in self.others), default=0)
                if elsewhere > stored:
                    stored, speed = elsewhere, LINK_BYTES_PER_S
            if stored > held:
                job.restore_s = RESTORE_FIXED_S + (stored - held) * BLOCK_TOKENS * BYTES_PER_TOKEN / speed
            cached = min(max(held, stored) * BLOCK_TOKENS, request.prompt_tokens - 1)
            job.cached_tokens = cached
            job.todo_tokens = request.prompt_tokens - cached
            job.todo_s = self.card.prefill.seconds(cached, request.prompt_tokens) + job.restore_s
            job.left_tokens = request.output_tokens
            job.began_at_s = max(self.now_s, request.at_s)
            self.memory.add(request.blocks)
            self.filling.append(job)

    def advance(self, to_s: float) -> None:
        """Simulate until `to_s`; the end of time ends all work."""
        while self.now_s < to_s and (self.filling or self.decoding):
            shares, token_rate = self._rates()
            until = [job.todo_s / share for job, share in shares]
            until += [job.left_tokens / token_rate for job in self.decoding] if token_rate else []
            step_s = min(min(until), to_s - self.now_s)
            self.now_s += step_s
            for job, share in shares:
                left = max(0.0, job.todo_s - step_s * share)
                job.todo_tokens *= left / job.todo_s if job.todo_s else 0.0
                job.todo_s = left
            for job in self.decoding:
                job.left_tokens -= step_s * token_rate
            self._settle()
        if to_s != float("inf"):
            self.now_s = max(self.now_s, to_s)

    def _rates(self) -> tuple[list[tuple[Job, float]], float]:
        """How fast each prompt is computed (share of the card), and tokens a second of each who decodes."""
        streams = len(self.decoding)
        step_s = self.card.decode.step_s(streams, int(self.resident_tokens)) if streams else 0.0
        if not self.filling:
            return [], 1 / step_s
        card_share = CHUNK_S / (CHUNK_S + step_s)
        first = min(self.filling, key=lambda job: job.todo_tokens)
        oldest = self.filling[0]
        if first is oldest:
            shares = [(first, card_share)]
        else:
            shares = [(first, card_share * (1 - OLDEST_SHARE)), (oldest, card_share * OLDEST_SHARE)]
        return shares, 1 / (CHUNK_S + step_s) if streams else 0.0

    def _settle(self) -> None:
        for job in [job for job in self.filling if job.todo_s <= 1e-9]:
            self.filling.remove(job)
            job.first_at_s = self.now_s
            self.decoding.append(job)
        for job in [job for job in self.decoding if job.left_tokens <= 1e-6]:
            self.decoding.remove(job)
            job.ended_at_s = self.now_s
            if self.saves:
                self.store.add(job.request.blocks)
            self.ended.append(job)
            held_s = self.now_s - job.began_at_s
            self.slot_s = held_s if not self.slot_s else 0.9 * self.slot_s + 0.1 * held_s
        self._admit()

    def copy(self) -> SimulatedEngine:
        """A twin that may run ahead, and saves nothing: what it would do has not happened."""
        twin = SimulatedEngine(self.number, self.card, self.now_s, slot_s=self.slot_s, others=self.others, saves=False)
        twin.memory, twin.store = self.memory.copy(), self.store
        for mine, its in ((self.queue, twin.queue), (self.filling, twin.filling), (self.decoding, twin.decoding)):
            its.extend(Job(**vars(job)) for job in mine)
        return twin


class Pool:
    """The engines of one run."""

    def __init__(self, chosen: Sequence[Card]) -> None:
        self.engines = [SimulatedEngine(number, card) for number, card in enumerate(chosen)]
        for engine in self.engines:
            engine.others = [other for other in self.engines if other is not engine]

    def advance(self, to_s: float) -> None:
        for engine in self.engines:
            engine.advance(to_s)


# Which engine takes the request, and whether it may read other hosts' stores for it.
Policy = Callable[[TraceRequest, Pool], tuple[int, bool]]


def run(requests: Sequence[TraceRequest], chosen: Sequence[Card], policy: Policy) -> list[Job]:
    """All requests in their order through a pool; the jobs as they ended, in the requests' order."""
    pool = Pool(chosen)
    jobs = []
    for request in requests:
        pool.advance(request.at_s)
        number, remote = policy(request, pool)
        job = Job(request, remote)
        jobs.append(job)
        pool.engines[number].submit(job)
    pool.advance(float("inf"))
    return jobs
