"""Models and forms for the tests of placement: drawn by hypothesis, and two of real shape."""

from __future__ import annotations

from hypothesis import strategies as st

from pools.gguf_weights import WeightSizes
from pools.ledger import Form, ModelFacts

GIB = 1 << 30
MIB = 1 << 20


def facts(
    *,
    layers: int = 32,
    layer_bytes: int = 100 * MIB,
    expert_bytes: int = 0,
    recurrent_every: int = 0,
    draft_layers: int = 0,
    embedding: int = 2048,
    vocab: int = 32000,
) -> ModelFacts:
    """A model whose layers are alike; with `recurrent_every` n, all but every n-th keep recurrent state instead of KV."""
    kv_heads = tuple(0 if recurrent_every and (il + 1) % recurrent_every else 4 for il in range(layers))
    blocks = layers + draft_layers
    weights = WeightSizes(64 * MIB, 64 * MIB, (layer_bytes,) * blocks, (expert_bytes,) * blocks, is_tied=False)
    return ModelFacts(
        embedding_length=embedding,
        feed_forward_length=3 * embedding,
        head_count=16,
        key_length=128,
        value_length=128,
        kv_heads=kv_heads,
        draft_layers=draft_layers,
        vocab_size=vocab,
        experts=64 if expert_bytes else 0,
        experts_used=4 if expert_bytes else 0,
        recurrent_state_bytes=2 * MIB if recurrent_every else 0,
        convolution_length=8192 if recurrent_every else 0,
        inner_length=4096 if recurrent_every else 0,
        context_train_tokens=131072,
        weights=weights,
        size_bytes=blocks * (layer_bytes + expert_bytes) + 128 * MIB,
    )


models = st.builds(
    facts,
    layers=st.integers(1, 48),
    layer_bytes=st.integers(1, 400).map(lambda size: size * MIB),
    expert_bytes=st.sampled_from([0, 50 * MIB, 400 * MIB]),
    recurrent_every=st.sampled_from([0, 0, 4]),
    draft_layers=st.integers(0, 1),
    embedding=st.sampled_from([256, 2048, 5120]),
    vocab=st.sampled_from([32000, 152064]),
)
forms = st.builds(
    Form,
    slots=st.integers(1, 16),
    context_tokens=st.sampled_from([512, 2048, 8192, 32768, 131072]),
    kv_type_k=st.sampled_from(["f16", "q8_0", "q4_0"]),
    kv_type_v=st.sampled_from(["f16", "q8_0", "q4_0"]),
    checkpoints=st.integers(0, 8),
    draft_tokens=st.sampled_from([0, 2]),
    uses_draft_head=st.booleans(),
    host_cache_bytes=st.sampled_from([0, GIB]),
    mmap=st.booleans(),
)
