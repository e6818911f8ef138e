"""One request on its way to an answer, and the mailbox that carries its pieces from the core's thread to the event loop."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engines.errors import EngineError
from engines.runtime.constraint import Constraint
from engines.runtime.draft_length import Acceptance
from engines.runtime.media_span import NO_SPANS, SpanMap
from engines.runtime.origin import Origin
from engines.runtime.sampler import Sampler, SamplingParams, TokenLogprob
from engines.runtime.text import TextAssembler
from engines.runtime.thinking_budget import ThinkingBudget

if TYPE_CHECKING:
    from engines.runtime.handoff_marks import Marks
    from engines.runtime.landing import Incoming


@dataclass(frozen=True)
class Stats:
    """What an answer cost. Durations in seconds; `cached_tokens` of the prompt were not computed again.

    Of `queue_s` the prefix was brought in from a store for `restore_s`, of `prompt_s` only others' prompts were computed for
    `prompt_wait_s`.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queue_s: float
    prompt_s: float
    decode_s: float
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    restore_s: float = 0.0
    prompt_wait_s: float = 0.0


@dataclass(frozen=True)
class Piece:
    """One step's news of a generation. The last piece has `finish_reason` or `error`, and always `stats`.

    `token_ids` were drawn since the piece before; the text of the last ones may still be held back. A piece with `moving` or
    `stays` (a handoff's id) has nothing else: the generation is about to move, and `told` is set once all before it was sent; or
    that move came to nothing.
    """

    choice: int = 0
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_done_tokens: int | None = None
    finish_reason: str | None = None
    error: EngineError | None = None
    stats: Stats | None = None
    token_ids: tuple[int, ...] = ()
    moving: str = ""
    stays: str = ""
    told: asyncio.Event | None = None

    @property
    def is_last(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @property
    def tells_of_move(self) -> bool:
        """Whether it is no part of the answer."""
        return bool(self.moving or self.stays)


class Mailbox:
    """Pieces of one request's generations, put and taken on the event loop, by one reader. Bounded by the answers' length.

    Every token passes here, so waiting costs one future and no timer: a single timer per mailbox looks after silence.
    """

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._reader: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0
        self._silent_since = 0.0

    def put(self, piece: Piece) -> None:
        self._pieces.append(piece)
        self._wake()

    async def take(self, timeout_s: float) -> list[Piece]:
        """All pieces that are there, waiting for the first; an empty list after about `timeout_s` of silence."""
        if not self._pieces:
            loop = asyncio.get_running_loop()
            self._silent_since = loop.time()
            if self._timer is not None and timeout_s < self._timer_s:
                self._timer.cancel()
                self._timer = None
            if self._timer is None:
                self._timer_s = timeout_s
                self._timer = loop.call_later(timeout_s, self._look, loop, timeout_s)
            self._reader = loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        pieces, self._pieces = self._pieces, []
        return pieces

    def _look(self, loop: asyncio.AbstractEventLoop, timeout_s: float) -> None:
        """The timer: wakes the reader after silence, else sets itself again for the rest of it; gone with the reader."""
        self._timer = None
        left_s = self._silent_since + timeout_s - loop.time()
        if self._reader is None:
            return
        if left_s > 0:
            self._timer = loop.call_later(left_s, self._look, loop, timeout_s)
        else:
            self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def deliver(outbox: Iterable[tuple[Mailbox, Piece]]) -> None:
    """Runs on the event loop once a step, for all streams together: one wake-up instead of one a token."""
    for mailbox, piece in outbox:
        mailbox.put(piece)


@dataclass(eq=False)
class Generation:
    """Owned by the core's thread after submission, except `cancelled`, which anybody may set.

    `cuts` are positions of the prompt, ascending, where a later request is likely to branch off. A lower `priority` is served
    earlier; `owner` groups requests that share one fair part. `forced` are tokens that come next instead of drawn ones.
    `spans` are the prompt's images; their ids stand in it too, an entry for each cell. Prefixes are shared within a `tenant`;
    `followed` says that whoever reads its stream goes along when it moves, together with its `siblings`, all choices of the
    request; of one that came, `continued` are the pieces that were sent elsewhere, and `arrived_tokens` of its answer were drawn
    there. `outcome` is how it ended. `draws` random numbers were used up by an engine that
    was lost. `tokenizer` names the vocabulary of its tokens. `system_cut` tokens of the prompt are its system prompt and tools.
    Whoever reads one that `counts_pieces` numbers what is made of them, so that they go along when it moves.
    `incoming` is what the host's store has of the prompt; bringing it in took `restore_s`. Steps with chunks of prompts
    had taken `prompts_before_s` in all when it got its slot; since then `computed_s` for its own, `prompt_wait_s` for others'.
    Of one that came and has not said anything here, `marks` are its move's.
    """

    request_id: str
    prompt: list[int]
    params: SamplingParams
    stops: tuple[str, ...]
    max_new_tokens: int
    mailbox: Mailbox
    deadline_at: float
    choice: int = 0
    reuse_prefix: bool = True
    wants_progress: bool = False
    cuts: list[int] = field(default_factory=list)
    owner: str = ""
    priority: int = 0
    cancelled: bool = False
    queued_at: float = field(default_factory=time.monotonic)
    started_at: float | None = None
    first_token_at: float | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    draft_min: int = 0
    draft_max: int | None = None
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    thinking_budget: ThinkingBudget | None = None
    constraint: Constraint | None = None
    spans: SpanMap = NO_SPANS
    tenant: str = ""
    session: str = ""
    system_cut: int = 0
    incoming: Incoming | None = None
    followed: bool = False
    continued: tuple[Piece, ...] | None = None
    arrived_tokens: int | None = None
    draws: int = 0
    tokenizer: str = ""
    counts_pieces: bool = False
    handoff: str = ""
    siblings: tuple[Generation, ...] = field(default=(), repr=False)
    outcome: tuple[str, Stats] | None = None
    restore_s: float = 0.0
    prompts_before_s: float | None = None
    computed_s: float = 0.0
    prompt_wait_s: float = 0.0
    marks: Marks | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.tokens: list[int] = list(self.prompt)
        self._posted = len(self.tokens)
        self.text = TextAssembler(self.stops)
        self.sampler: Sampler | None = None
        self.acceptance = Acceptance()
        self.needs_whole_rows = False
        self.forced: deque[int] = deque()

    @property
    def keeps_pieces(self) -> bool:
        """Whether it takes more than the text so far to go on with its answer elsewhere."""
        return self.counts_pieces or self.params.top_logprobs is not None

    @property
    def origin(self) -> Origin:
        return Origin(self.tenant, self.session, self.system_cut)

    @property
    def longest_draft(self) -> int:
        """As many tokens may be drafted: behind them one more is drawn, which still belongs to the answer."""
        wanted = self.max_new_tokens - self.new_tokens - 1
        return wanted if self.draft_max is None else min(wanted, self.draft_max)

    def unposted(self) -> tuple[int, ...]:
        """Tokens drawn since this was asked before: what the next piece carries."""
        begin, self._posted = self._posted, len(self.tokens)
        return tuple(self.tokens[begin:])

    def add_cut(self, position: int) -> None:
        """Asks for a checkpoint after `position` tokens of the prompt."""
        if position not in self.cuts and 0 < position < len(self.tokens):
            self.cuts = sorted([*self.cuts, position])

    def needs_raw_logits(self, device_candidates: int) -> bool:
        """Whether a device chain that hands out `device_candidates` of a row is not enough, or has proved not to be."""
        return self.needs_whole_rows or self.params.needs_whole_vocabulary(device_candidates)

    @property
    def prompt_text_tokens(self) -> list[int]:
        """The prompt without images: all that is a token of the vocabulary."""
        return [token for token in self.prompt if token >= 0] if self.spans else self.prompt

    @property
    def seen_by_penalties(self) -> list[int]:
        """All tokens of the vocabulary so far, in order."""
        return [*self.prompt_text_tokens, *self.tokens[len(self.prompt) :]]

    @property
    def new_tokens(self) -> int:
        return len(self.tokens) - len(self.prompt)

    def stats(self, now: float) -> Stats:
        started = self.started_at if self.started_at is not None else now
        first = self.first_token_at if self.first_token_at is not None else now
        return Stats(
            prompt_tokens=len(self.prompt),
            cached_tokens=self.cached_tokens,
            completion_tokens=self.new_tokens,
            queue_s=started - self.queued_at,
            prompt_s=first - started,
            decode_s=now - first,
            drafts=self.drafts,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
            restore_s=self.restore_s,
            prompt_wait_s=self.prompt_wait_s,
        )
