"""The journal of a streamed answer: what another engine needs to write the same stream on, told between its events.

Each group of events is followed by a mark that site and engine keep between them: which tokens the events were made of, how
many characters each piece of text had. A site shows its client what a mark stands behind, and keeps the marks; should the
engine be lost, the request's body and these lines are enough to go on exactly there, with the same tokens for the same seed. Of
an answer that moved here the first mark says how much was written elsewhere, so that a site that was told less notices.

A journal is lines of JSON. The first is the head, an object; the others are lists of entries [choice, characters, token ids]
or [choice, characters, token ids, more]. Pure: knows no HTTP and no core.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from engines.errors import InvalidRequest
from engines.runtime.generation import Generation, Piece, Stats
from engines.runtime.sampler import TokenLogprob

VERSION = 1
JOURNAL_HEADER = "X-Hydra-Journal"
BEGUN, MARK, FAILED = b"event: hydra.begun\ndata: ", b"event: hydra.mark\ndata: ", b"event: hydra.failed\ndata: "
MOST_ENTRIES = 1 << 21
MOST_CHOICES = 1 << 12
# Of an answer that came here by a handoff: its last tokens, more than any reader can have missed.
TAIL_TOKENS = 512


@dataclass(frozen=True)
class Head:
    """`seed` is the first choice's, given or drawn; `created` seconds since 1970; `tokenizer` a digest of the vocabulary."""

    seed: int
    created: int
    tokenizer: str
    version: int = VERSION


@dataclass(frozen=True)
class Entry:
    """One piece of one choice. `total_tokens`: its ids end with the choice's so many-th token, and may be known already.

    `times` (cached tokens, seconds of queue and of prompt) and `waits` (seconds of restoring, and of others' prompts) come with a
    choice's first tokens, `drafts` (how many, their tokens, those accepted; so far) where something was drafted. `is_ping` and
    `is_closing` stand for the stream's own events: all of it is written behind the latter. `most`, in the first one, is how many
    tokens each choice may have, its prompt included.
    """

    choice: int
    characters: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_done_tokens: int | None = None
    times: tuple[int, float, float] | None = None
    total_tokens: int | None = None
    reason: str | None = None
    stats: Stats | None = None
    is_ping: bool = False
    is_closing: bool = False
    waits: tuple[float, float] | None = None
    drafts: tuple[int, int, int] | None = None
    most: tuple[int, ...] = ()


@dataclass(frozen=True)
class Journal:
    head: Head
    entries: tuple[Entry, ...]

    @property
    def most(self) -> tuple[int, ...]:
        """How many tokens each choice may have, its prompt included; () where the engine that began it did not say."""
        return next((entry.most for entry in self.entries if entry.most), ())


class JournalWriter:
    """Writes the marks of one stream."""

    def __init__(self, generations: Sequence[Generation]) -> None:
        self._generations = generations
        self._timed: set[int] = set()
        self._entries: list[str] = []

    def note(self, piece: Piece) -> None:
        """A piece whose events are about to be written; a mark must follow them."""
        generation = self._generations[piece.choice]
        more: dict[str, Any] = {}
        if piece.token_ids and piece.choice not in self._timed:
            self._timed.add(piece.choice)
            if generation.started_at is not None and generation.first_token_at is not None:
                queue_s, prompt_s = (
                    generation.started_at - generation.queued_at,
                    generation.first_token_at - generation.started_at,
                )
                more["times"] = [generation.cached_tokens, round(queue_s, 6), round(prompt_s, 6)]
                if generation.restore_s or generation.prompt_wait_s:
                    more["waits"] = [round(generation.restore_s, 6), round(generation.prompt_wait_s, 6)]
        if piece.token_ids and generation.drafts:
            more["drafts"] = [generation.drafts, generation.drafted_tokens, generation.accepted_tokens]
        if piece.logprobs:
            more["logprobs"] = [[entry.token, entry.logprob, entry.top] for entry in piece.logprobs]
        if piece.prompt_done_tokens is not None:
            more["done"] = piece.prompt_done_tokens
        if piece.finish_reason is not None and piece.finish_reason != "moved" and piece.stats is not None:
            more["reason"], more["stats"] = piece.finish_reason, asdict(piece.stats)
        self._add(piece.choice, len(piece.text), list(piece.token_ids), more)

    def opened(self) -> None:
        """The answer begins here, where it was settled how long it may get."""
        self._add(0, 0, [], {"most": [len(one.prompt) + one.max_new_tokens for one in self._generations]})

    def ping(self) -> None:
        self._add(0, 0, [], {"ping": True})

    def closing(self) -> None:
        self._add(0, 0, [], {"closed": True})

    def _add(self, choice: int, characters: int, token_ids: list[int], more: dict[str, Any]) -> None:
        tail = f",{json.dumps(more)}" if more else ""
        self._entries.append(f"[{choice},{characters},{token_ids}{tail}]")

    def arrived(self) -> None:
        """The answer's beginning was written by another engine; its last tokens may not have been told. Of each choice it is said
        how many characters were written, and whether its end was."""
        written = []
        for generation in self._generations:
            pieces = generation.continued or ()
            characters = sum(len(piece.text) for piece in pieces)
            written.append((generation.choice, characters, any(piece.is_last for piece in pieces)))
        for generation in self._generations:
            if generation.arrived_tokens is not None:
                begin, end = len(generation.prompt), len(generation.prompt) + generation.arrived_tokens
                tail = generation.tokens[max(begin, end - TAIL_TOKENS) : end]
                self._add(generation.choice, 0, tail, {"total": generation.arrived_tokens, "written": written})
                self._timed.add(generation.choice)

    def mark(self) -> bytes:
        """The mark behind all that was noted since the last one."""
        entries, self._entries = self._entries, []
        return MARK + f"[{','.join(entries)}]\n\n".encode()


def begun(head: Head) -> bytes:
    return BEGUN + json.dumps(asdict(head)).encode() + b"\n\n"


def failed(code: str) -> bytes:
    """Says that the events behind it tell of a failure of the engine's, before the client's dialect does."""
    return FAILED + json.dumps({"code": code}).encode() + b"\n\n"


def read_journal(raw: bytes) -> Journal:
    """Raises InvalidRequest for anything that is no journal of this version."""
    try:
        first, *lines = raw.splitlines()
        values = json.loads(first)
        head = Head(**values)
        if head.version != VERSION:
            raise InvalidRequest(f"The journal has version {head.version}; this engine reads {VERSION}.")
        if type(head.seed) is not int or type(head.created) is not int or head.seed < 0:
            raise ValueError("head")
        entries = tuple(_entry(values) for line in lines for values in json.loads(line))
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise InvalidRequest(f"The journal cannot be read: {type(error).__name__}.") from error
    if len(entries) > MOST_ENTRIES:
        raise InvalidRequest(f"The journal has more than {MOST_ENTRIES} entries.")
    return Journal(head, entries)


def _entry(values: list[Any]) -> Entry:
    choice, characters, token_ids = values[:3]
    more: dict[str, Any] = values[3] if len(values) > 3 else {}
    if not (_counts((choice, characters, *token_ids)) and choice < MOST_CHOICES):
        raise ValueError("counts")
    times, waits, drafts = more.get("times"), more.get("waits"), more.get("drafts", ())
    most = more.get("most", ())
    if not (_counts(drafts) and _counts(most)):
        raise ValueError("drafts")
    stats = more.get("stats")
    return Entry(
        choice,
        characters,
        tuple(token_ids),
        tuple(TokenLogprob(int(token), float(value), _top(top)) for token, value, top in more.get("logprobs", ())),
        more.get("done"),
        (int(times[0]), float(times[1]), float(times[2])) if times else None,
        more.get("total"),
        more.get("reason"),
        Stats(**stats) if stats else None,
        is_ping=bool(more.get("ping")),
        is_closing=bool(more.get("closed")),
        waits=(float(waits[0]), float(waits[1])) if waits else None,
        drafts=(drafts[0], drafts[1], drafts[2]) if drafts else None,
        most=tuple(most),
    )


def _top(values: Iterable[Sequence[Any]]) -> tuple[tuple[int, float], ...]:
    return tuple((int(token), float(value)) for token, value in values)


def _counts(values: Iterable[Any]) -> bool:
    return all(type(value) is int and value >= 0 for value in values)
