"""How many tokens of a prompt a card computes in one go (llama.cpp's n_ubatch): the more, the fewer times it reads all weights.

A prompt of 8,192 tokens of 35B-A3B on an H200: 6,300 tokens a second with 512 of them at once, 9,800 with 1,024, 13,000 with
2,048, and with 4,096 hardly more. What it costs is memory, in compute buffers and masks that grow with it, so nobody goes
without slots, context or layers for it: a form has to fit with 512 first, and gets more of what is left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from pools.ledger import USUAL_MICRO_BATCH_TOKENS, Form, ModelFacts, Prediction
from pools.ledger_predict import predict

# What every measurement on a card was made with: a prompt's chunk may take more than one micro-batch.
CARD_BATCH_TOKENS = 4096
LARGER_MICRO_BATCHES = (2048, 1024)
# What larger ones take beside 512 is no more than this part of a card.
CARD_SHARE = 16


def open_form(form: Form) -> Form:
    """As an engine on a card computes prompts: it takes many tokens, as many at once as the card allows. One that embeds or
    scores computes inputs, whose length bounds its steps."""
    return form if form.pooling else dataclasses.replace(form, batch_tokens=CARD_BATCH_TOKENS, micro_batch_tokens=0)


def with_micro_batch(
    facts: ModelFacts, form: Form, whole_card_bytes: int, fits: Callable[[Prediction], bool]
) -> tuple[Form, Prediction] | None:
    """The form with the largest micro-batch for which it `fits`, and what it takes; None if it does not fit.

    A form that names its micro-batch keeps it. `whole_card_bytes` is all that engines may have of the card, were it empty; 0
    where there is none, or where that is not known.
    """
    least = dataclasses.replace(form, micro_batch_tokens=form.micro_batch_tokens or USUAL_MICRO_BATCH_TOKENS)
    needed = predict(facts, least)
    if not fits(needed):
        return None
    if form.micro_batch_tokens or form.gpu_layers == 0 or form.pooling:
        return least, needed
    for tokens in LARGER_MICRO_BATCHES:
        if tokens > form.batch_tokens:
            continue
        larger = dataclasses.replace(form, micro_batch_tokens=tokens)
        prediction = predict(facts, larger)
        if _taken_bytes(prediction) - _taken_bytes(needed) <= whole_card_bytes // CARD_SHARE and fits(prediction):
            return larger, prediction
    return least, needed


def card_micro_batch_tokens(facts: ModelFacts, form: Form, whole_card_bytes: int) -> int:
    """The same for a card of which nothing else is known: the largest with which the form would fit it empty, else 512."""
    found = with_micro_batch(
        facts, form, whole_card_bytes, lambda prediction: prediction.device.total_bytes <= whole_card_bytes
    )
    return USUAL_MICRO_BATCH_TOKENS if found is None else found[0].micro_batch_tokens


def _taken_bytes(prediction: Prediction) -> int:
    """On both sides: the host prepares masks of the same size."""
    return prediction.device.total_bytes + prediction.host.total_bytes
