"""Which tokens the next call of llama_decode computes."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from engines.config import EngineConfig
from engines.runtime.llama import Batch, Llama
from engines.runtime.media_batch import SpanBatch
from engines.runtime.media_span import PlacedSpan
from engines.runtime.prefix import PrefixCache
from engines.runtime.slots import Slot
from engines.runtime.speculation import Speculation

# How long one chunk of a prompt may take: a cancel waits for its end, and so does everybody's next token.
CHUNK_ALONE_S = 2.0
CHUNK_SHARED_S = 0.4
MIN_CHUNK_TOKENS = 32
OLDEST_EVERY_CHUNKS = 4
# Computing this much again is cheaper than stopping a prompt for a checkpoint, which costs a call of llama_decode.
CHECKPOINT_WORTH_S = 0.15
MAX_CHECKPOINT_MIN_TOKENS = 512
# Sizes of the prompts that a warm-up runs, until one takes long enough to tell the speed of a chunk.
WARM_UP_TOKENS = (16, 64, 256, 1024, 4096)
WARM_UP_ENOUGH_S = 0.1
WARM_UP_SLOW_S = 1.0
# Rests of prompts that are shorter than this, and of more lengths than that, go in powers of two: so they share few shapes.
REST_TOKENS = 32
REST_SHAPES = 5
# What any call costs, in tokens: several small ones between two steps of the others must not add up unseen.
CALL_TOKENS = 32

log = logging.getLogger("hydra.engine.planner")


@dataclass(frozen=True)
class Row:
    """A slot's part of a batch: `count` tokens, the last of them in batch row `last`, drawing a token if `draws`.

    The last ones are the `draft`, if there is one; the row before it and each of its rows then draw. If they are embeddings of a
    `span`, the row is its step's only one, in the planner's `span_batch`, and draws nothing.
    """

    slot: Slot
    count: int
    last: int
    draws: bool
    draft: tuple[int, ...] = ()
    span: PlacedSpan | None = None

    @property
    def first(self) -> int:
        """The batch row of its first token."""
        return self.last - self.count + 1


class StepPlanner:
    """Fills one reusable batch per step. On a card dense models take everybody's next token and chunks of prompts together, so
    that the weights are read once; models with recurrent state alternate, since llama.cpp splits unequal sequences into several
    graphs there; and so does a processor, whose attention computes the few rows that decode by tiles as large as the prompt's. A
    stretch of an image is a step of its own, at most every other one if there is anything else to do."""

    def __init__(self, llama: Llama, cache: PrefixCache, config: EngineConfig) -> None:
        self.batch = Batch(llama.batch_tokens)
        self._cache = cache
        self._llama = llama
        self._takes_equal_pieces = llama.has_recurrent_state
        self.alternates = llama.has_recurrent_state or config.gpu_layers == 0
        self._decoded_last = False
        self._room = 0
        self._chunks = 0
        self.alone_tokens = self.shared_tokens = self.batch.capacity
        # Seconds of a prompt's token, and of a step with one stream; None until a warm-up measured them.
        self.prompt_token_s: float | None = None
        self.step_s: float | None = None
        # Set once the model has loaded, where the engine drafts.
        self.speculation: Speculation | None = None
        # Set once the model has loaded, where it has a projector.
        self.span_batch: SpanBatch | None = None
        self._span_last = False
        self.checkpoint_min_tokens = max(config.checkpoint_min_tokens, 1)
        self._measures_checkpoints = config.checkpoint_min_tokens < 0

    def warm_up(self) -> None:
        """Runs a few prompts, which reads the weights in, and sets the chunks' sizes from the last one's speed.

        Powers of two, so that the sizes (and with them the low bits of answers) do not change from start to start. Small prompts
        tell nothing of a card's speed: there 16 tokens of a mixture of experts take half as long as 512.
        """
        rate = 0.0
        for tokens in (min(tokens, self.batch.capacity) for tokens in WARM_UP_TOKENS):
            elapsed_s = self._time_prompt(tokens)
            if elapsed_s is not None and elapsed_s < WARM_UP_SLOW_S:
                elapsed_s = self._time_prompt(tokens)  # the first of a size prepared kernels and buffers
            if elapsed_s is None:
                return
            rate = tokens / max(elapsed_s, 1e-6)
            if elapsed_s > WARM_UP_ENOUGH_S and tokens > WARM_UP_TOKENS[0]:
                break
        self._time_prompt(1)
        self.prompt_token_s, self.step_s = 1 / rate, self._time_prompt(1)
        self.alone_tokens = _chunk(rate * CHUNK_ALONE_S, self.batch.capacity)
        self.shared_tokens = _chunk(rate * CHUNK_SHARED_S, self.batch.capacity)
        if self._measures_checkpoints:
            self.checkpoint_min_tokens = _chunk(rate * CHECKPOINT_WORTH_S, MAX_CHECKPOINT_MIN_TOKENS)
        log.info("prompts run at %.0f tokens/s: chunks of %d, shared %d", rate, self.alone_tokens, self.shared_tokens)

    def _time_prompt(self, tokens: int) -> float | None:
        """Seconds that a prompt of so many tokens takes; None when llama.cpp refuses it."""
        self.batch.clear()
        self.batch.add(0, 0, [0] * tokens, outputs=1)
        started = time.monotonic()
        status = self._llama.decode(self.batch)
        # The result is asked for, since a GPU's decode returns before it has computed.
        self._llama.synchronize()
        elapsed_s = time.monotonic() - started
        self._llama.clear(0)
        if status != 0:
            log.warning("the warm-up was refused (llama_decode: %d)", status)
            return None
        return elapsed_s

    def plan(self) -> list[Row]:
        """The rows of the next step; none when no slot has work. There must be a free cell per decoding slot."""
        busy = self._cache.busy
        decoding: list[Slot] = []
        filling: list[Slot] = []
        for slot in busy:
            if slot.waits_at_cut and not self._cache.goes_on(slot):
                continue
            (decoding if slot.decoding else filling).append(slot)
        filling = self._in_order(filling)
        self.batch.clear()
        if self.span_batch is not None:
            rows, filling = self._plan_span(self.span_batch, decoding, filling)
            if rows:
                return rows
        if self._takes_equal_pieces:
            return self._plan_apart(decoding, filling)
        if self.alternates and decoding and filling:
            return self._plan_in_turn(decoding, filling)
        return self._plan_together(decoding, filling)

    def _plan_span(self, batch: SpanBatch, decoding: list[Slot], filling: list[Slot]) -> tuple[list[Row], list[Slot]]:
        """The first image's next stretch as a step, if it is its turn; and the slots that do not stand at one."""
        others = [slot for slot in filling if slot.span is None]
        first = next((slot for slot in filling if slot.span is not None), None)
        if first is None or (self._span_last and (decoding or others)):
            self._span_last = False
            return [], others
        room = self.shared_tokens if decoding else self.alone_tokens
        rows = self._span_row(batch, first, min(room, batch.capacity))
        self._span_last = bool(rows)
        return rows, others

    def _span_row(self, batch: SpanBatch, slot: Slot, room: int) -> list[Row]:
        entry, done = slot.span, len(slot.sequence)
        assert entry is not None
        assert slot.generation is not None
        # Tokens that see each other go in one call; the projector has made sure that they can.
        count = len(entry.span) if entry.span.sees_itself else min(room, entry.end - done)
        if not self._cache.make_room(count):
            return []
        position = slot.generation.spans.position(entry.start)
        batch.fill(slot.sequence.index, position, entry.span, done - entry.start, count)
        slot.used_at = time.monotonic()
        return [Row(slot, count, -1, draws=False, span=entry)]

    def _plan_together(self, decoding: list[Slot], filling: list[Slot]) -> list[Row]:
        rows = self._add_decoding(decoding)
        room = self.shared_tokens if decoding or self._decoded_last else self.alone_tokens
        for slot in filling:
            room -= self._add_chunk(rows, slot, slot.next_chunk(min(room, self.batch.room)))
        self._decoded_last = bool(decoding)
        return rows

    def _plan_in_turn(self, decoding: list[Slot], filling: list[Slot]) -> list[Row]:
        """Chunks of prompts of any lengths, then everybody's next token, for which a cell each stays free. A prompt's last token
        is like one of these."""
        rows: list[Row] = []
        if self._decoded_last:
            room = self.shared_tokens
            for slot in filling:
                if slot.todo_tokens > 1:
                    room -= self._add_chunk(rows, slot, slot.next_chunk(min(room, self.batch.room)), len(decoding))
        self._decoded_last = not rows
        if not rows:
            rows = self._add_decoding(decoding)
            for slot in filling:
                if slot.todo_tokens == 1:
                    self._add_chunk(rows, slot, 1)
        return rows

    def _plan_apart(self, decoding: list[Slot], filling: list[Slot]) -> list[Row]:
        """Either everybody's next token, or equally long pieces of prompts: of unequal ones llama.cpp makes a graph for each
        length that occurs. Between two steps of the decoding ones prompts get `shared_tokens`, in as many calls as it takes."""
        if not decoding:
            self._room = self.shared_tokens if self._decoded_last else self.alone_tokens
        self._decoded_last = bool(decoding)
        last_tokens = [slot for slot in filling if slot.todo_tokens == 1]
        longer = [slot for slot in filling if slot.todo_tokens > 1]
        rows: list[Row] = []
        if longer and self._room > 0:
            for slot, count in self._equal_pieces(longer):
                self._add_chunk(rows, slot, count)
            self._room -= self.batch.count + CALL_TOKENS
        if not rows:
            self._room = self.shared_tokens
            # A prompt's last token has the shape of a decoding one's next, as long as none has a draft behind it: it would
            # wait until nobody drafts any more.
            rows = self._add_decoding(decoding, drafting=not last_tokens)
            for slot in last_tokens:
                self._add_chunk(rows, slot, slot.next_chunk(1))
        return rows

    def _equal_pieces(self, filling: list[Slot]) -> list[tuple[Slot, int]]:
        """Slots and equally long pieces of their prompts, led by the first slot; of short rests the longest piece leads, so that
        it leaves rests that meet others."""
        room = min(self._room, self.batch.room)
        pieces = [(slot, slot.next_chunk(room)) for slot in filling]
        lead = pieces[0][1]
        if lead < REST_TOKENS:
            rests = [(slot, piece) for slot, piece in pieces if piece < REST_TOKENS]
            if len({piece for _, piece in rests}) > REST_SHAPES:
                rests = [(slot, _power_of_two(piece)) for slot, piece in rests]
            lead = max(piece for _, piece in rests)
            return [(slot, piece) for slot, piece in rests if piece == lead][: max(1, room // lead)]
        alike = [(slot, piece) for slot, piece in pieces if lead <= piece < 2 * lead or piece % lead == 0]
        alike = alike[: max(1, room // lead)]
        length = min(piece for _, piece in alike)
        return [(slot, length) for slot, _ in alike]

    def _add_chunk(self, rows: list[Row], slot: Slot, count: int, spared_cells: int = 0) -> int:
        """Adds a prompt's next `count` tokens if there are cells for them and for others; returns how many it added."""
        if not count or not self._cache.make_room(self.batch.count + count + spared_cells):
            return 0
        rows.append(self._add(slot, count))
        slot.used_at = time.monotonic()
        return count

    def _in_order(self, filling: list[Slot]) -> list[Slot]:
        """Who is nearest to a first token comes first, so that a short prompt passes a long one and equal ones end one after
        another; every few chunks the one that came first, so that nobody waits for ever."""
        self._chunks += bool(filling)
        if self._chunks % OLDEST_EVERY_CHUNKS == 0:
            return sorted(filling, key=lambda slot: slot.generation.queued_at if slot.generation else 0.0)
        return sorted(filling, key=lambda slot: slot.todo_tokens)

    def _add_decoding(self, decoding: list[Slot], *, drafting: bool = True) -> list[Row]:
        """Everybody's last token, and a draft behind it where one pays."""
        drafts = self.speculation.propose(decoding) if self.speculation and decoding and drafting else {}
        return [self._add(slot, 1, drafts.get(slot, ())) for slot in decoding]

    def plan_alone(self, slot: Slot) -> list[Row]:
        """The slot's part as a batch of its own."""
        self.batch.clear()
        return [self._add(slot, slot.next_chunk(self.shared_tokens))]

    def _add(self, slot: Slot, count: int, draft: tuple[int, ...] = ()) -> Row:
        generation, sequence = slot.generation, slot.sequence
        assert generation is not None
        start = len(sequence.tokens)
        draws = count == len(generation.tokens) - start
        tokens = generation.tokens[start : start + count]
        tokens += draft
        position = generation.spans.position(start) if generation.spans else start
        last = self.batch.add(sequence.index, position, tokens, outputs=(1 + len(draft)) * draws)
        return Row(slot, len(tokens), last, draws, draft)


def _power_of_two(count: int) -> int:
    """The largest within `count`, which is at least 1."""
    return 1 << (count.bit_length() - 1)


def _chunk(tokens: float, most: int) -> int:
    """The largest power of two within `tokens`, but no less than MIN_CHUNK_TOKENS and no more than the batch holds."""
    size = MIN_CHUNK_TOKENS
    while size * 2 <= tokens:
        size *= 2
    return min(size, most)
