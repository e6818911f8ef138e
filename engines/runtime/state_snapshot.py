"""What travels besides the bytes of a state: the manifest of its pieces, and a running generation's own standing.

Written as JSON with a version, read with every bound checked; a manifest that was read says nothing wrong about its own
shape, but nothing about the bytes is believed before their digests are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from engines.api_constraint import ConstraintSpec
from engines.errors import GenerationStays, StateInvalid
from engines.runtime.constraint import ConstraintCompiler
from engines.runtime.generation import Generation, Mailbox, Piece, Stats
from engines.runtime.llama import Llama
from engines.runtime.sampler import Sampler, SamplingParams, TokenLogprob
from engines.runtime.text import Said
from engines.runtime.thinking_budget import BudgetTerms, ThinkingBudget, spend_budget

# Of 1 fewer things of a generation are told, and nothing else: what has none is still written so, for engines that read no more.
IDLE_VERSION, VERSION = READ_VERSIONS = 1, 2
MAX_MANIFEST_BYTES = 64 << 20
MAX_TOKENS = 1 << 22
MAX_PIECES = 1 << 17
MAX_HELD_BYTES = 1 << 16
# An answer with log probabilities takes all of them along, some 50 bytes each: so many of all choices of a request together.
MAX_SAID_LOGPROBS = 1 << 18
# The pieces of a state, in the order in which they travel: a block follows its predecessor, the last part follows the blocks,
# checkpoints (parts of earlier cuts) follow, and at the end stands what the draft head holds: its rows, then hidden rows that it
# has not been fed.
KINDS = ("block", "part", "checkpoint", "draft", "hidden")


@dataclass(frozen=True)
class StatePiece:
    """`start` and `end` are positions; a part belongs to all tokens before `end` and begins at 0."""

    kind: str
    start: int
    end: int
    size_bytes: int

    @property
    def tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class EndedChoice:
    """A choice that has ended, of a request whose others move: what its reader's end of the answer still counts."""

    choice: int
    tokens: tuple[int, ...]
    prompt_tokens: int
    sent_bytes: int
    reason: str
    stats: Stats
    said: tuple[Said, ...] = ()


@dataclass(frozen=True)
class GenerationState:
    """A generation between two of its tokens. What its prompt and tokens were stands in the manifest.

    The drawing of tokens goes on with `draws` more numbers used up from the seed's row; XTC alone takes numbers of its own at
    times, and goes on with others. `held_text` was drawn and not sent: it may begin a stop string or end inside a character.
    A constraint's place, and what is left of a thinking budget, are found again by replaying the tokens behind the prompt.
    `said` and `held_logprobs` are there where log probabilities are asked for. `moves_with` are the choices that go on together,
    this one included (none: it alone); the first of them brings those of the request that have ended.
    """

    request_id: str
    prompt_tokens: int
    max_new_tokens: int
    params: SamplingParams
    draws: int
    stops: tuple[str, ...] = ()
    held_text: bytes = b""
    sent_bytes: int = 0
    choice: int = 0
    cached_tokens: int = 0
    owner: str = ""
    priority: int = 0
    constraint: ConstraintSpec | None = None
    queue_s: float = 0.0
    prompt_s: float = 0.0
    decode_s: float = 0.0
    tenant: str = ""
    session: str = ""
    system_cut: int = 0
    draft_min: int = 0
    draft_max: int | None = None
    held_logprobs: tuple[tuple[int, TokenLogprob], ...] = ()
    said: tuple[Said, ...] = ()
    moves_with: tuple[int, ...] = ()
    ended: tuple[EndedChoice, ...] = ()
    thinking: BudgetTerms | None = None
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    restore_s: float = 0.0
    prompt_wait_s: float = 0.0


@dataclass(frozen=True)
class Manifest:
    """One state: `tokens` have state, `next_token` was drawn and not decoded yet (None: nothing is left over).

    Of a long conversation that moves both sides know the beginning: the first `before` tokens and their blocks are not told
    again, nor written down how many they are.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        strict=True, extra="forbid", ser_json_inf_nan="constants", ser_json_bytes="base64", val_json_bytes="base64"
    )

    fingerprint: str
    model_name: str
    model_sha256: str
    tokens: tuple[int, ...]
    pieces: tuple[StatePiece, ...]
    next_token: int | None = None
    generation: GenerationState | None = None
    version: int = IDLE_VERSION
    before: Annotated[int, Field(exclude=True)] = 0

    def to_json(self) -> bytes:
        """Raises GenerationStays for one that is too long."""
        raw = _ADAPTER.dump_json(self)
        if len(raw) > MAX_MANIFEST_BYTES:
            raise GenerationStays("So much has to be told of the conversation's state that it stays where it is.")
        return raw

    @classmethod
    def from_json(cls, raw: bytes, before: int = 0, told: Sequence[int] = ()) -> Manifest:
        """`before`: the reader knows so many first tokens; `told` are those behind them, where they were left out.

        Raises StateInvalid for anything but a manifest of this version whose values lie within their bounds.
        """
        if len(raw) > MAX_MANIFEST_BYTES:
            raise StateInvalid(f"The state's manifest has {len(raw)} bytes; at most {MAX_MANIFEST_BYTES} are read.")
        try:
            manifest = _ADAPTER.validate_json(raw)
        except ValidationError as error:
            _require_version(raw)
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise StateInvalid(
                f"The state's manifest is not valid at {where or 'its start'}: {first['msg']}."
            ) from error
        manifest = replace(manifest, tokens=(*manifest.tokens, *told), before=before)
        manifest._check()
        return manifest

    def _check(self) -> None:
        _require_read(self.version)
        if self.count > MAX_TOKENS or len(self.pieces) > MAX_PIECES:
            raise StateInvalid(f"The state has {self.count} tokens in {len(self.pieces)} pieces, more than is read.")
        if any(piece.kind not in KINDS or piece.size_bytes < 0 for piece in self.pieces):
            raise StateInvalid("The state's manifest names a piece of no known kind or size.")
        running = self.generation
        most_tokens = self.count + (self.next_token is not None)
        if running and not (0 < running.prompt_tokens <= most_tokens and running.draws >= 0):
            raise StateInvalid("The state's generation does not belong to its tokens.")
        if running and len(running.held_text) > MAX_HELD_BYTES:
            raise StateInvalid(f"The state's generation holds back more than {MAX_HELD_BYTES} bytes of text.")
        for ended in running.ended if running else ():
            if not (0 < ended.prompt_tokens <= len(ended.tokens) <= MAX_TOKENS and min(ended.tokens) >= 0):
                raise StateInvalid("A choice that has ended does not belong to its tokens.")

    @property
    def count(self) -> int:
        """All tokens that have state."""
        return self.before + len(self.tokens)

    @property
    def all_tokens(self) -> list[int]:
        """Where none are known before."""
        return [*self.tokens, *([] if self.next_token is None else [self.next_token])]

    @property
    def total_bytes(self) -> int:
        """Of all pieces together, without what frames them."""
        return sum(piece.size_bytes for piece in self.pieces)


_ADAPTER: TypeAdapter[Manifest] = TypeAdapter(Manifest)


@dataclass(frozen=True)
class _Versioned:
    """What a manifest of any version has."""

    version: int = VERSION


_VERSIONED: TypeAdapter[_Versioned] = TypeAdapter(_Versioned)


def _require_version(raw: bytes) -> None:
    """A manifest of another version is refused as that, not for the first of its fields that is new. Raises StateInvalid."""
    try:
        version = _VERSIONED.validate_json(raw).version
    except ValidationError:
        return  # it is no manifest of any version
    _require_read(version)


def _require_read(version: int) -> None:
    if version not in READ_VERSIONS:
        raise StateInvalid(f"The state's manifest has version {version}; this engine reads {READ_VERSIONS}.")


def captured(generation: Generation) -> GenerationState:
    """The standing of a generation that runs; on the core's thread, after the text of its last token was made."""
    stats = generation.stats(time.monotonic())
    return GenerationState(
        request_id=generation.request_id,
        prompt_tokens=len(generation.prompt),
        max_new_tokens=generation.max_new_tokens,
        params=generation.params,
        draws=generation.sampler.draws if generation.sampler else 0,
        stops=generation.stops,
        held_text=generation.text.held,
        sent_bytes=generation.text.sent_bytes,
        choice=generation.choice,
        cached_tokens=generation.cached_tokens,
        owner=generation.owner,
        priority=generation.priority,
        constraint=generation.constraint.spec if generation.constraint else None,
        queue_s=stats.queue_s,
        prompt_s=stats.prompt_s,
        decode_s=stats.decode_s,
        tenant=generation.tenant,
        session=generation.session,
        system_cut=generation.system_cut,
        draft_min=generation.draft_min,
        draft_max=generation.draft_max,
        held_logprobs=generation.text.held_logprobs,
        said=tuple(generation.text.said or ()),
        thinking=generation.thinking_budget.terms if generation.thinking_budget else None,
        drafts=generation.drafts,
        drafted_tokens=generation.drafted_tokens,
        accepted_tokens=generation.accepted_tokens,
        restore_s=generation.restore_s,
        prompt_wait_s=generation.prompt_wait_s,
    )


def require_tellable(choices: Sequence[Generation]) -> None:
    """Raises GenerationStays for a request of which more log probabilities were told than are taken along."""
    told = sum(one.new_tokens * (1 + (one.params.top_logprobs or 0)) for one in choices if one.text.said)
    if told > MAX_SAID_LOGPROBS:
        raise GenerationStays("The answer has so many log probabilities that it stays where it is.")


def ended_choices(siblings: Sequence[Generation]) -> tuple[EndedChoice, ...]:
    """Those of a request's choices that have ended; on the core's thread."""
    return tuple(
        EndedChoice(
            one.choice,
            tuple(one.tokens),
            len(one.prompt),
            one.text.sent_bytes,
            *one.outcome,
            tuple(one.text.said or ()),
        )
        for one in siblings
        if one.outcome is not None
    )


def said_pieces(choice: int, text: str, said: Sequence[Said]) -> tuple[Piece, ...]:
    """The pieces that `text` went out in; one, where nothing hangs on how many they were."""
    if not said:
        return (Piece(choice, text),)
    pieces, at = [], 0
    for characters, logprobs in said:
        pieces.append(Piece(choice, text[at : at + characters], logprobs))
        at += characters
    return tuple(pieces)


def resumed(
    manifest: Manifest,
    llama: Llama,
    compiler: Callable[[], ConstraintCompiler],
    mailbox: Mailbox,
    deadline_at: float,
    rows: Sequence[int] | None = None,
) -> Generation:
    """The generation that goes on where `captured` left it; on any thread: a form takes a while. Its next piece carries no token
    twice. `rows`: all tokens that have state, where the manifest tells only the last ones.

    Raises StateInvalid when the manifest carries none, InvalidRequest or ConstraintFailed for a constraint that this engine
    cannot follow.
    """
    state = manifest.generation
    if state is None:
        raise StateInvalid("The state carries no generation.")
    last = () if manifest.next_token is None else (manifest.next_token,)
    tokens = manifest.all_tokens if rows is None else [*rows, *last]
    generation = Generation(
        request_id=state.request_id,
        prompt=tokens[: state.prompt_tokens],
        params=state.params,
        stops=state.stops,
        max_new_tokens=state.max_new_tokens,
        mailbox=mailbox,
        deadline_at=deadline_at,
        choice=state.choice,
        owner=state.owner,
        priority=state.priority,
        tenant=state.tenant,
        session=state.session,
        system_cut=state.system_cut,
        draft_min=state.draft_min,
        draft_max=state.draft_max,
        drafts=state.drafts,
        drafted_tokens=state.drafted_tokens,
        accepted_tokens=state.accepted_tokens,
        restore_s=state.restore_s,
        prompt_wait_s=state.prompt_wait_s,
    )
    generation.tokens = tokens
    generation.unposted()
    generation.arrived_tokens = generation.new_tokens
    if state.constraint is not None:
        generation.constraint = compiler().compile(state.constraint)
        generation.constraint.replay(tokens[state.prompt_tokens :])
    if state.thinking is not None:
        generation.thinking_budget = ThinkingBudget.on(state.thinking, llama.vocabulary.pieces)
        spend_budget(generation, tokens[state.prompt_tokens :])
    generation.cached_tokens = state.cached_tokens
    generation.text.resume(state.held_text, state.sent_bytes, state.held_logprobs)
    if state.said or state.params.top_logprobs is not None:
        generation.text.said = list(state.said)
    now = time.monotonic()
    generation.first_token_at = now - state.decode_s if generation.new_tokens else None
    generation.started_at = now - state.decode_s - state.prompt_s
    generation.queued_at = generation.started_at - state.queue_s
    generation.sampler = Sampler(state.params, llama, generation.constraint)
    generation.sampler.see_prompt(tokens)
    generation.sampler.skip(state.draws)
    return generation
