"""The choices of one request at the target of a move: they go on together, and those that ended elsewhere are told of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engines.errors import StateInvalid
from engines.runtime.generation import Generation, Mailbox
from engines.runtime.preparation import Preparation
from engines.runtime.state_adopt import Adopting
from engines.runtime.state_snapshot import EndedChoice, Manifest, said_pieces


async def gone_on(
    arrived: Sequence[tuple[Adopting, Manifest]], preparation: Preparation, deadline_at: float
) -> list[Generation]:
    """All choices of the request by their number: those that arrived stand in this engine's line, in one mailbox.

    Raises StateInvalid when they are not what one request consists of, and what `Adopting.go_on` raises; then none goes on.
    """
    mailbox, going = Mailbox(), []
    for adopting, manifest in arrived:
        one = await adopting.resumed(manifest, preparation.compiler, mailbox, deadline_at)
        assert manifest.generation is not None
        text = sent_text(one.tokens[len(one.prompt) :], manifest.generation.sent_bytes, preparation)
        one.followed, one.continued = True, said_pieces(one.choice, text, manifest.generation.said)
        going.append(one)
    first = arrived[0][1].generation
    assert first is not None
    every = [*going, *(_ended(choice, going[0], preparation) for choice in first.ended)]
    every.sort(key=lambda one: one.choice)
    if [one.choice for one in every] != list(range(len(every))):
        raise StateInvalid("A request's choices are not all here.")
    for one in every:
        one.siblings = tuple(every)
    preparation.core.submit(*going)
    return every


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
