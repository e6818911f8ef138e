"""A request that goes on where another engine was lost: its generations as they stood at the journal's end.

What a generation is follows from its request and its tokens: text and what is held back of it, the constraint's place, the
penalties' window, the numbers drawn from the seed, the thinking budget. So all of it is found again by going through the tokens
once more; only KV is computed anew, or found in a slot or a store, as for any prompt. How long it may get was settled where it
began.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from engines.errors import ContextTooShort, InvalidRequest
from engines.runtime.generation import Generation, Piece, Stats
from engines.runtime.journal import Entry, Journal
from engines.runtime.llama import Vocabulary
from engines.runtime.sampler import SEED_MASK
from engines.runtime.text import NOTHING_SAID, TextAssembler
from engines.runtime.thinking_budget import spend_budget


@dataclass(frozen=True)
class Replayed:
    """`pieces` are those that were written elsewhere already, in their order (None: a ping); `ended` the last one of each choice
    that has nothing more to say; `is_closed` that the stream's end was written too."""

    pieces: tuple[Piece | None, ...]
    ended: dict[int, Piece]
    is_closed: bool = False


@dataclass(frozen=True)
class Room:
    """What the context holds; with `may_cut` a longer answer ends where that is full."""

    context_tokens: int
    may_cut: bool = False


@dataclass
class _Choice:
    """What the journal says of one choice."""

    tokens: list[int] = field(default_factory=list)
    times: tuple[int, float, float] | None = None
    waits: tuple[float, float] = (0.0, 0.0)
    drafts: tuple[int, int, int] = (0, 0, 0)
    end: Entry | None = None
    characters: int = 0
    logprobs: int = 0
    text: str = ""
    at: int = 0

    def take(self, entry: Entry) -> None:
        """Raises InvalidRequest where tokens are missing between this entry and those before."""
        ids = entry.token_ids
        if entry.total_tokens is not None:
            missing = entry.total_tokens - len(self.tokens)
            if not 0 <= missing <= len(ids):
                raise InvalidRequest("The journal has a gap.")
            ids = ids[len(ids) - missing :]
        self.tokens += ids
        self.times = entry.times or self.times
        self.waits = entry.waits or self.waits
        self.drafts = entry.drafts or self.drafts
        self.characters += entry.characters
        self.logprobs += len(entry.logprobs)
        if entry.reason is not None:
            self.end = entry


def replay(
    journal: Journal, generations: Sequence[Generation], vocabulary: Vocabulary, elapsed_s: float, room: Room
) -> Replayed:
    """Brings the request's fresh generations to where the journal ends; their mailbox has what was drawn and not written.

    `elapsed_s`: so long ago the request came to the first engine. Any thread, before the generations are submitted. Those that
    have no room to go on have their `outcome`. Raises InvalidRequest for a journal that is not this request's, ConstraintFailed
    for tokens that its form does not allow, ContextTooShort for an answer that would be cut.
    """
    choices = [_Choice() for _ in generations]
    for entry in journal.entries:
        if entry.choice >= len(choices):
            raise InvalidRequest("The journal has more choices than the request.")
        choices[entry.choice].take(entry)
    now = time.monotonic()
    for index, (generation, choice) in enumerate(zip(generations, choices, strict=True)):
        if any(token >= vocabulary.size for token in choice.tokens):
            raise InvalidRequest("The journal names tokens beyond the vocabulary.")
        seed = (journal.head.seed + index) & SEED_MASK
        generation.params = replace(generation.params, seed=seed)
        _bound(generation, choice, journal.most[index : index + 1], room)
        rest = _bring(generation, choice, vocabulary)
        _time(generation, choice, now - elapsed_s)
        if choice.end is None:
            _go_on(generation, rest, room, now)
    return _written(journal, generations, choices)


def _bound(generation: Generation, choice: _Choice, most: Sequence[int], room: Room) -> None:
    """As long as the answer may get where it began; of one whose engine did not say (`most` is empty) as a new one here."""
    prompt_tokens = len(generation.prompt)
    longest = most[0] if most else prompt_tokens + len(choice.tokens)
    if choice.end is None and longest > room.context_tokens and not room.may_cut:
        raise ContextTooShort(
            f"The answer may take {longest} tokens, its prompt included; this engine's context holds {room.context_tokens}."
        )
    if most:
        generation.max_new_tokens = max(1, most[0] - prompt_tokens)


def _go_on(generation: Generation, rest: str, room: Room, now: float) -> None:
    """What was drawn and not written comes first; a context that is full with it has no place for more."""
    generation.max_new_tokens = min(generation.max_new_tokens, room.context_tokens - len(generation.prompt))
    if len(generation.tokens) < room.context_tokens:
        if rest:
            generation.mailbox.put(Piece(generation.choice, rest))
        return
    stats = generation.stats(now)
    generation.outcome = "length", stats
    rest += generation.text.finish().text
    generation.mailbox.put(Piece(generation.choice, rest, finish_reason="length", stats=stats))


def _bring(generation: Generation, choice: _Choice, vocabulary: Vocabulary) -> str:
    """Returns what of its text was not written yet."""
    tokens = choice.tokens
    if choice.end is None:
        tokens = _to_go_on_from(generation, choice, vocabulary)
    text = "".join(_fed(generation.text, tokens, vocabulary))
    if choice.end is not None and not generation.text.stopped:
        text += generation.text.finish().text
    if choice.characters > len(text):
        raise InvalidRequest("The journal's tokens do not make as much text as was written.")
    generation.tokens = [*generation.prompt, *tokens]
    generation.unposted()
    choice.text = text
    if choice.end is not None:
        return ""
    generation.draws = spend_budget(generation, tokens)
    if generation.constraint is not None:
        generation.constraint.replay(tokens)
    return text[choice.characters :]


def _to_go_on_from(generation: Generation, choice: _Choice, vocabulary: Vocabulary) -> list[int]:
    """The tokens without those that are better drawn again: one that ends the answer, whose end was not told any more, and
    those whose log probabilities were not."""
    tokens = choice.tokens
    if generation.params.top_logprobs is not None:
        tokens = tokens[: choice.logprobs]
    if tokens and (tokens[-1] in vocabulary.end_tokens or len(tokens) >= generation.max_new_tokens):
        tokens = tokens[:-1]
    if generation.stops:
        text = TextAssembler(generation.stops)
        for at, token in enumerate(tokens):
            text.feed(vocabulary.pieces[token])
            if text.stopped:
                return tokens[:at]
    return tokens


def _fed(text: TextAssembler, tokens: Sequence[int], vocabulary: Vocabulary) -> list[str]:
    """The texts that the tokens release; an end token has none."""
    return [text.feed(vocabulary.pieces[token]).text for token in tokens if token not in vocabulary.end_tokens]


def _time(generation: Generation, choice: _Choice, began_at: float) -> None:
    """The client's times and counts go on, what was lost in between included."""
    generation.restore_s, generation.prompt_wait_s = choice.waits
    generation.drafts, generation.drafted_tokens, generation.accepted_tokens = choice.drafts
    if choice.times is None:
        return
    cached, queue_s, prompt_s = choice.times
    generation.cached_tokens = cached
    generation.queued_at = began_at
    generation.started_at = began_at + queue_s
    generation.first_token_at = generation.started_at + prompt_s


def _written(journal: Journal, generations: Sequence[Generation], choices: Sequence[_Choice]) -> Replayed:
    pieces: list[Piece | None] = []
    ended: dict[int, Piece] = {}
    is_closed = False
    for entry in journal.entries:
        if entry.most:
            continue
        if entry.is_ping or entry.is_closing:
            pieces += [None] if entry.is_ping else []
            is_closed |= entry.is_closing
            continue
        choice = choices[entry.choice]
        text = choice.text[choice.at : choice.at + entry.characters]
        choice.at += entry.characters
        stats: Stats | None = entry.stats
        piece = Piece(entry.choice, text, entry.logprobs, entry.prompt_done_tokens, entry.reason, stats=stats)
        pieces.append(piece)
        if entry.reason is not None:
            ended[entry.choice] = piece
            if stats is not None:
                generations[entry.choice].outcome = entry.reason, stats
    for generation, choice in zip(generations, choices, strict=True):
        if generation.keeps_pieces:
            mine = [piece for piece in pieces if piece is not None and piece.choice == generation.choice]
            rest = choice.text[choice.at :]
            said = [(len(piece.text), piece.logprobs) for piece in mine]
            generation.text.said = [NOTHING_SAID, *said, *([(len(rest), ())] if rest else [])]
    return Replayed(tuple(pieces), ended, is_closed)
