"""The choices of one request at the target of a move: they go on together, and those that ended elsewhere are told of."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace

from engines.errors import StateInvalid
from engines.runtime.generation import Generation, Mailbox
from engines.runtime.preparation import Preparation
from engines.runtime.state_adopt import Adopting
from engines.runtime.state_dock import Dock
from engines.runtime.state_snapshot import EndedChoice, GenerationState, Manifest, resumed, said_pieces
from engines.runtime.state_together import begin_together

Making = asyncio.Task[list[Generation]]


def making_of(
    arriving: Sequence[tuple[Adopting, Manifest]], preparation: Preparation, dock: Dock, deadline_at: float
) -> Making:
    """All choices of the request by their number, none of them begun; beside the core's thread, which has others' tokens to draw
    meanwhile. Whoever has it must hand it to `gone_on` or `unmade`. Raises StateInvalid when they are not what one request
    consists of, and what `resumed` raises."""
    return asyncio.create_task(dock.in_thread(_made, arriving, preparation, deadline_at), name="handoff-choices")


async def unmade(making: Making) -> None:
    """Nobody's sampler is left."""
    await asyncio.wait((making,))
    if not making.cancelled() and making.exception() is None:
        # One that has begun all the same was cancelled, and ends in its slot.
        _close(one for one in making.result() if not one.cancelled)


async def gone_on(arrived: Sequence[tuple[Adopting, Manifest]], making: Making) -> list[Generation]:
    """All choices of the request by their number: those that arrived go on in their slots, in one mailbox.

    Raises what `making_of` and `begin_together` raise; then none goes on, and nobody's sampler is left.
    """
    try:
        for adopting, _ in arrived:
            await adopting.require_all()
        # A cancel must not take along what the thread has made.
        every = await asyncio.shield(making)
        arrived[0][0].mark("made")
        going = {one.choice: one for one in every if one.outcome is None}
        for one in going.values():
            one.marks = arrived[0][0].marks
        coming = [going[_state_of(manifest).choice] for _, manifest in arrived]
        await begin_together([adopting for adopting, _ in arrived], coming)
    except BaseException:
        await unmade(making)
        raise
    return every


def _state_of(manifest: Manifest) -> GenerationState:
    if manifest.generation is None:
        raise StateInvalid("The state carries no generation.")
    return manifest.generation


def _made(
    arriving: Sequence[tuple[Adopting, Manifest]], preparation: Preparation, deadline_at: float
) -> list[Generation]:
    """All choices by their number, none of them begun."""
    mailbox, going = Mailbox(), list[Generation]()
    try:
        for adopting, manifest in arriving:
            state, rows = _state_of(manifest), adopting.tokens
            one = resumed(manifest, preparation.llama, lambda: preparation.compiler, mailbox, deadline_at, rows)
            going.append(one)
            text = sent_text(one.tokens[len(one.prompt) :], state.sent_bytes, preparation)
            one.followed, one.continued = True, said_pieces(one.choice, text, state.said)
        ended = _state_of(arriving[0][1]).ended
        every = [*going, *(_ended(choice, going[0], preparation) for choice in ended)]
        every.sort(key=lambda one: one.choice)
        if [one.choice for one in every] != list(range(len(every))):
            raise StateInvalid("A request's choices are not all here.")
    except BaseException:
        _close(going)
        raise
    for one in every:
        one.siblings = tuple(every)
    return every


def _close(generations: Iterable[Generation]) -> None:
    """Of those that never began."""
    for one in generations:
        if one.sampler is not None:
            one.sampler.close()


def _ended(choice: EndedChoice, like: Generation, preparation: Preparation) -> Generation:
    """A choice that has nothing more to say."""
    vocabulary, tokens = preparation.llama.vocabulary, list(choice.tokens)
    if max(tokens) >= vocabulary.size:
        raise StateInvalid("A choice that has ended has tokens beyond the vocabulary.")
    generation = Generation(
        request_id=like.request_id,
        prompt=tokens[: choice.prompt_tokens],
        params=like.params,
        stops=like.stops,
        max_new_tokens=like.max_new_tokens,
        mailbox=like.mailbox,
        deadline_at=like.deadline_at,
        choice=choice.choice,
        tenant=like.tenant,
        session=like.session,
        followed=True,
        outcome=(choice.reason, choice.stats),
    )
    generation.tokens = tokens
    generation.unposted()
    made = [token for token in tokens[choice.prompt_tokens :] if token not in vocabulary.end_tokens]
    *before, last = said_pieces(choice.choice, sent_text(made, choice.sent_bytes, preparation), choice.said)
    generation.text.resume(b"", choice.sent_bytes)
    generation.text.said = list(choice.said) or None
    generation.continued = (*before, replace(last, finish_reason=choice.reason, stats=choice.stats))
    return generation


def sent_text(tokens: Sequence[int], sent_bytes: int, preparation: Preparation) -> str:
    """The text of an answer's `tokens` that was sent before it came here."""
    pieces = preparation.llama.vocabulary.pieces
    return b"".join(pieces[token] for token in tokens)[:sent_bytes].decode("utf-8", "replace")
