"""How large llama.cpp's compute buffers get: the widest moment of its graph for one micro-batch.

Calibrated against llama.cpp's own planning (`python -m bench placement` prints both); every term is a tensor of the graph.
Buffers are reused over layers, so the widest layer counts, not their sum.
"""

from __future__ import annotations

from pools.ledger import Form, ModelFacts

FLOAT_BYTES, HALF_BYTES, MASK_BYTES = 4, 2, 2
CELL_INDEX_BYTES = 20  # where each cell's row goes, and who sees it
# llama.cpp hands a large batch's host weights to the card one layer at a time, two layers' worth under way.
_OFFLOAD_LAYERS = 2


def compute_bytes(facts: ModelFacts, form: Form, *, inputs_only: bool = False) -> int:
    """One side's buffer; `inputs_only`: of a host whose layers are all on the card, which only prepares what goes in."""
    if inputs_only:
        return _inputs_bytes(facts, form)
    return _graph_bytes(facts, form, _logits_bytes(facts, form))


def device_compute_bytes(
    facts: ModelFacts, form: Form, host_expert_bytes: int, *, attends_for_host: bool = False
) -> int:
    """The card's buffer: the graph, the sampler's ranking, and copies of what stays with the host: experts, and with
    `attends_for_host` a layer's keys and values."""
    logits = _logits_bytes(facts, form) + _ranking_bytes(facts, form)
    beside = _unpacked_bytes(facts, form)
    if attends_for_host and form.copies_weights:
        row_bytes = facts.kv_row_bytes(max(facts.kv_heads, default=0), form.kv_type_k, form.kv_type_v)
        beside += form.cells * row_bytes
    graph = _graph_bytes(facts, form, logits, beside)
    largest = max(facts.weights.expert_bytes, default=0)
    return graph + (_OFFLOAD_LAYERS * largest // 3 if host_expert_bytes and form.copies_weights else 0)


def draft_compute_bytes(facts: ModelFacts, form: Form) -> int:
    """The draft head's own buffer: one layer, a row of logits for each sequence."""
    rows = form.sequences * facts.vocab_size * FLOAT_BYTES
    return max(
        rows, _mask_bytes(form, form.draft_cells) + max(_feed_forward_bytes(facts, form), _attention_bytes(facts, form))
    )


def draft_inputs_bytes(facts: ModelFacts, form: Form) -> int:
    """What the host prepares for a draft head on the card: token and hidden row of each position."""
    return _mask_bytes(form, form.draft_cells) + 2 * form.micro_batch * facts.embedding_length * FLOAT_BYTES


def _graph_bytes(facts: ModelFacts, form: Form, logits_bytes: int, unpacked_bytes: int = 0) -> int:
    """Logits come last and take what layers left, if that is one piece large enough; else they lie behind the mask."""
    layers = _layer_bytes(facts, form, unpacked_bytes)
    return layers if logits_bytes <= layers else logits_bytes + _mask_bytes(form)


def _layer_bytes(facts: ModelFacts, form: Form, unpacked_bytes: int) -> int:
    """The widest layer, beside the mask that all of them read."""
    attention = _attention_bytes(facts, form) + unpacked_bytes
    return _mask_bytes(form) + max(attention, _feed_forward_bytes(facts, form), _recurrence_bytes(facts, form))


def _unpacked_bytes(facts: ModelFacts, form: Form) -> int:
    """Of a card that computes as CUDA does: one layer's keys and values in f16, where the cache keeps them smaller."""
    lengths = ((facts.key_length, form.kv_type_k), (facts.value_length, form.kv_type_v))
    length = sum(length for length, kind in lengths if kind not in ("f16", "bf16", "f32"))
    return form.cells * max(facts.kv_heads, default=0) * length * HALF_BYTES if form.copies_weights else 0


def _mask_bytes(form: Form, cells: int | None = None) -> int:
    return (form.cells if cells is None else cells) * (MASK_BYTES * form.micro_batch + CELL_INDEX_BYTES)


def _inputs_bytes(facts: ModelFacts, form: Form) -> int:
    return _mask_bytes(form) + form.micro_batch * facts.embedding_length * FLOAT_BYTES


def _feed_forward_bytes(facts: ModelFacts, form: Form) -> int:
    """Gate, up and down beside the residual stream; with experts once for each that a token wakes."""
    wide = 2 * facts.feed_forward_length
    if facts.experts:
        wide = facts.experts_used * (wide + facts.embedding_length)
    return form.micro_batch * FLOAT_BYTES * (wide + 7 * facts.embedding_length)


def _attention_bytes(facts: ModelFacts, form: Form) -> int:
    """Queries twice (hybrids gate them), keys and values, and the residual stream."""
    query = facts.head_count * facts.key_length
    kv = max(facts.kv_heads, default=0) * (facts.key_length + facts.value_length)
    return form.micro_batch * FLOAT_BYTES * ((4 if facts.is_hybrid else 3) * query + kv + 3 * facts.embedding_length)


def _recurrence_bytes(facts: ModelFacts, form: Form) -> int:
    """A recurrent layer: its convolution and gates for every token, its state before and after for every sequence."""
    if not facts.is_hybrid:
        return 0
    per_token = 2 * (facts.convolution_length + facts.inner_length + facts.embedding_length)
    return form.micro_batch * FLOAT_BYTES * per_token + 2 * form.sequences * facts.recurrent_state_bytes


def _logits_bytes(facts: ModelFacts, form: Form) -> int:
    rows = 0 if form.pooling else form.outputs
    return rows * facts.vocab_size * FLOAT_BYTES + 2 * form.micro_batch * facts.embedding_length * FLOAT_BYTES


def _ranking_bytes(facts: ModelFacts, form: Form) -> int:
    """The device's top-k: indices, and the sorted values beside the logits."""
    return form.slots * facts.vocab_size * 8 if form.samples_on_device else 0
