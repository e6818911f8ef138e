"""The bytes of one placement: which layers a form puts where, and what that takes of the card and of its host."""

from __future__ import annotations

import dataclasses

from pools.ledger import Form, Ledger, ModelFacts, Prediction
from pools.ledger_compute import compute_bytes, device_compute_bytes, draft_compute_bytes, draft_inputs_bytes


def predict(facts: ModelFacts, form: Form) -> Prediction:
    """What an engine of `form` takes of its card and of its host's memory."""
    weights = facts.weights
    split = _Split(facts, form)
    on_card = Ledger(
        weights_bytes=split.layer_bytes(on_card=True) + split.output_weights_bytes,
        expert_bytes=split.expert_bytes(on_card=True),
        kv_bytes=split.kv_bytes(on_card=True),
        recurrent_bytes=split.recurrent_bytes(on_card=True),
    )
    host_output_bytes = 0 if split.card_is_used else weights.output_bytes
    host = Ledger(
        weights_bytes=weights.input_bytes + host_output_bytes + split.layer_bytes(on_card=False),
        expert_bytes=split.expert_bytes(on_card=False),
        kv_bytes=split.kv_bytes(on_card=False),
        recurrent_bytes=split.recurrent_bytes(on_card=False),
        output_bytes=_output_bytes(facts, form),
        cache_bytes=0 if form.pooling else form.host_cache_bytes,
    )
    # Of layers that stay with the host a card that copies weights computes all but steps of few tokens.
    inputs_only = split.card_is_used and (split.all_on_card or form.copies_weights)
    host = dataclasses.replace(
        host,
        mapped_bytes=host.weights_bytes + host.expert_bytes if form.mmap else 0,
        compute_bytes=compute_bytes(facts, form, inputs_only=inputs_only),
        projector_bytes=0 if split.card_is_used else form.projector_bytes,
    )
    if split.card_is_used:
        compute = device_compute_bytes(facts, form, host.expert_bytes, attends_for_host=host.kv_bytes > 0)
        on_card = dataclasses.replace(on_card, compute_bytes=compute, projector_bytes=form.projector_bytes)
    if split.drafts:
        drafts = _draft_ledger(facts, form)
        if split.drafts_on_card:
            on_card, host = on_card + drafts, host + Ledger(draft_bytes=draft_inputs_bytes(facts, form))
        else:
            host += drafts
    return Prediction(on_card, host, facts.estimated)


def _output_bytes(facts: ModelFacts, form: Form) -> int:
    """Rows of logits, with what a device's sampler hands over beside them, and of embeddings where those are the result."""
    if form.pooling:
        return form.outputs * facts.embedding_length * 4
    per_row = facts.vocab_size * 4 * (4 if form.samples_on_device else 1)
    return form.outputs * per_row


def _draft_ledger(facts: ModelFacts, form: Form) -> Ledger:
    """The draft head's own context: attention cells of its layers, and its compute buffer."""
    heads = max(facts.kv_heads, default=0)
    row_bytes = facts.kv_row_bytes(heads, form.kv_type_k, form.kv_type_v)
    return Ledger(draft_bytes=facts.draft_layers * form.draft_cells * row_bytes + draft_compute_bytes(facts, form))


class _Split:
    """Which layers a form puts on the card: the output first, then draft heads and trunk from their ends."""

    def __init__(self, facts: ModelFacts, form: Form) -> None:
        self._facts, self._form = facts, form
        wanted = facts.placed_layers if form.gpu_layers < 0 else min(form.gpu_layers, facts.placed_layers)
        first = facts.placed_layers - wanted
        self.card_is_used = wanted > 0
        self.all_on_card = first == 0 and form.cpu_moe_layers == 0
        self.drafts = form.uses_draft_head and form.draft_tokens > 0 and facts.draft_layers > 0
        # Of the trunk: from where on layers lie on the card, and from where on their experts do, too.
        self._first = min(first, facts.layers)
        self._first_experts = min(max(first, form.cpu_moe_layers), facts.layers)
        self.drafts_on_card = first <= facts.layers

    def _draft_bytes(self, sizes: tuple[int, ...], *, on_card: bool) -> int:
        """Of the draft heads, which are read only if somebody drafts with them."""
        return sum(sizes[self._facts.layers :]) if self.drafts and self.drafts_on_card is on_card else 0

    def layer_bytes(self, *, on_card: bool) -> int:
        tails, sizes = self._facts.layer_tails, self._facts.weights.layer_bytes
        return _side(tails, self._first, on_card=on_card) + self._draft_bytes(sizes, on_card=on_card)

    def expert_bytes(self, *, on_card: bool) -> int:
        tails, sizes = self._facts.expert_tails, self._facts.weights.expert_bytes
        return _side(tails, self._first_experts, on_card=on_card) + self._draft_bytes(sizes, on_card=on_card)

    @property
    def output_weights_bytes(self) -> int:
        """On the card: the output matrix, or a copy of the input's that serves as one."""
        weights = self._facts.weights
        return (weights.output_bytes + weights.input_bytes * weights.is_tied) * self.card_is_used

    def kv_bytes(self, *, on_card: bool) -> int:
        form = self._form
        return form.cells * sum(
            _side(tails, self._first, on_card=on_card) * self._facts.kv_row_bytes(heads, form.kv_type_k, form.kv_type_v)
            for heads, tails in self._facts.attention_tails.items()
            if heads
        )

    def recurrent_bytes(self, *, on_card: bool) -> int:
        """State of every sequence, once more for each token of a draft that may be taken back."""
        if not self._facts.is_hybrid:
            return 0
        layers = _side(self._facts.attention_tails[0], self._first, on_card=on_card)
        planes = 1 + self._form.draft_tokens
        return layers * self._facts.recurrent_state_bytes * self._form.sequences * planes


def _side(tails: tuple[int, ...], first: int, *, on_card: bool) -> int:
    """The part of a sum over layers that lies on the card, from `first` on, or with the host."""
    return tails[first] if on_card else tails[0] - tails[first]
