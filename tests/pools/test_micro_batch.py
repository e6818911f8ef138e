"""How many tokens a card computes at once: as many as pay where there is room, and never at the price of anything else."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pools.gguf_weights import WeightSizes
from pools.ledger import Form, ModelFacts, Prediction
from pools.ledger_predict import predict
from pools.micro_batch import CARD_SHARE, card_micro_batch_tokens, open_form
from pools.placement import Preview, Room, as_wished, describe, fit, placed
from pools.placement_rooms import Reading, room_of, whole_card_bytes
from tests.pools.placement_cases import GIB, MIB, forms, models

OPEN = open_form(Form())
HOST_BYTES = 64 * GIB


def hybrid(layers: int, embedding: int, wide: int, heads: tuple[int, int], **values: object) -> ModelFacts:
    """Shaped like Qwen 3.6: every fourth layer attends, the others are recurrent; sizes as of Q4_0."""
    queries, keys = heads
    facts = ModelFacts(
        embedding_length=embedding,
        feed_forward_length=wide,
        head_count=queries,
        key_length=256,
        value_length=256,
        kv_heads=tuple(0 if (il + 1) % 4 else keys for il in range(layers)),
        draft_layers=0,
        vocab_size=248320,
        experts=0,
        experts_used=0,
        recurrent_state_bytes=2 * MIB,
        convolution_length=8192,
        inner_length=4096,
        context_train_tokens=262144,
        weights=WeightSizes(280 * MIB, 280 * MIB, (212 * MIB,) * layers, (0,) * layers, is_tied=False),
        size_bytes=0,
    )
    return dataclasses.replace(facts, **values)  # type: ignore[arg-type]


DENSE_27B = hybrid(64, 5120, 17408, (24, 4))
MOE_35B = hybrid(
    40,
    2048,
    512,
    (16, 2),
    experts=256,
    experts_used=8,
    weights=WeightSizes(280 * MIB, 280 * MIB, (18 * MIB,) * 40, (432 * MIB,) * 40, is_tied=False),
)


def wish(**values: object) -> Form:
    return dataclasses.replace(OPEN, **values)  # type: ignore[arg-type]


def chosen(facts: ModelFacts, form: Form, card_gb: int) -> int:
    return card_micro_batch_tokens(facts, form, whole_card_bytes(card_gb * 10**9))


@pytest.mark.parametrize(
    ("facts", "values", "by_card_gb"),
    [
        # Neither fits the small cards whole; experts of 35B-A3B, or layers of 27B, stay with the host there.
        (MOE_35B, {}, {12: 512, 16: 512, 24: 2048, 141: 2048}),
        (MOE_35B, {"cpu_moe_layers": 24}, {12: 2048, 16: 2048, 24: 2048, 141: 2048}),
        (DENSE_27B, {}, {12: 512, 16: 512, 24: 2048, 141: 2048}),
        (DENSE_27B, {"gpu_layers": 40}, {12: 2048, 16: 2048, 24: 2048, 141: 2048}),
        (DENSE_27B, {"gpu_layers": 42}, {12: 1024, 16: 2048}),
        # A mask has a row for every token computed at once and a column for every cell, on the card and on its host: with
        # 1,048,576 cells 2,048 take 6 GiB more.
        (
            MOE_35B,
            {"slots": 8, "context_tokens": 32768, "kv_type_k": "q8_0", "kv_type_v": "q8_0"},
            {24: 512, 141: 2048},
        ),
        (
            MOE_35B,
            {"slots": 8, "context_tokens": 131072, "kv_type_k": "q8_0", "kv_type_v": "q8_0"},
            {48: 1024, 141: 2048},
        ),
        (MOE_35B, {"slots": 16, "context_tokens": 131072, "kv_type_k": "q8_0", "kv_type_v": "q8_0"}, {141: 1024}),
        (MOE_35B, {"slots": 64, "context_tokens": 131072, "kv_type_k": "q8_0", "kv_type_v": "q8_0"}, {141: 512}),
    ],
)
def test_a_card_gets_what_pays_and_has_room(
    facts: ModelFacts, values: dict[str, object], by_card_gb: dict[int, int]
) -> None:
    assert {card_gb: chosen(facts, wish(**values), card_gb) for card_gb in by_card_gb} == by_card_gb


def test_a_processor_one_that_embeds_and_a_card_of_unknown_size_stay_as_they_are() -> None:
    assert chosen(MOE_35B, wish(gpu_layers=0), 141) == 512
    assert chosen(MOE_35B, open_form(Form(pooling="mean")), 141) == 512
    assert card_micro_batch_tokens(MOE_35B, OPEN, whole_card_bytes(0)) == 512


def test_what_a_person_says_is_kept_and_a_short_batch_bounds_it() -> None:
    assert chosen(MOE_35B, wish(micro_batch_tokens=4096), 141) == 4096
    assert chosen(MOE_35B, wish(micro_batch_tokens=64), 141) == 64
    assert chosen(MOE_35B, wish(batch_tokens=1500), 141) == 1024
    short = wish(batch_tokens=256)
    assert chosen(MOE_35B, short, 141) == 512
    assert dataclasses.replace(short, micro_batch_tokens=512).micro_batch == 256


def _taken_bytes(prediction: Prediction) -> int:
    return prediction.device.total_bytes + prediction.host.total_bytes


@settings(max_examples=50)
@given(models, forms, st.integers(0, 160 * GIB))
def test_the_largest_that_may_be_is_taken(model: ModelFacts, form: Form, whole_bytes: int) -> None:
    form = open_form(form)
    tokens = card_micro_batch_tokens(model, form, whole_bytes)
    predictions = {
        count: predict(model, dataclasses.replace(form, micro_batch_tokens=count)) for count in (512, 1024, 2048)
    }
    may_be = [
        count
        for count, one in predictions.items()
        if one.device.total_bytes <= whole_bytes
        and _taken_bytes(one) - _taken_bytes(predictions[512]) <= whole_bytes // CARD_SHARE
    ]
    assert tokens == max(may_be, default=512)


# --- beside what others hold --------------------------------------------------------------------------


def room(card_bytes: int, whole_bytes: int = 0) -> Room:
    return Room(1, "card", card_bytes, HOST_BYTES, HOST_BYTES, True, whole_bytes or max(card_bytes, 0))


@settings(deadline=None, max_examples=40)
@given(models, forms, st.integers(0, 48 * GIB), st.integers(0, 96 * GIB))
def test_nobody_gives_up_anything_for_it(model: ModelFacts, form: Form, card_bytes: int, others_bytes: int) -> None:
    """Where the form fits with 512 it fits, weights, slots and checkpoints split alike, with as many at once as are left room."""
    there = room(card_bytes, card_bytes + others_bytes)
    usual = placed(model, dataclasses.replace(form, micro_batch_tokens=512), there)
    found = placed(model, open_form(form), there)
    assert (usual is None) == (found is None)
    if usual is None or found is None:
        return
    assert found.cost == usual.cost
    kept = {"batch_tokens": form.batch_tokens, "micro_batch_tokens": 512}
    assert dataclasses.replace(found.form, **kept) == usual.form  # type: ignore[arg-type]
    assert found.form.micro_batch_tokens in (512, 1024, 2048)
    assert found.prediction == predict(model, found.form)
    assert as_wished(model, found.form, there) is not None
    if found.form.gpu_layers:
        alone = card_micro_batch_tokens(model, open_form(found.form), there.whole_card_bytes)
        assert found.form.micro_batch_tokens <= alone, "no more than with the card to itself"


def test_beside_residents_it_falls_back_as_far_as_it_must() -> None:
    form = wish(slots=2)
    needs = {
        count: predict(MOE_35B, dataclasses.replace(form, micro_batch_tokens=count)).device.total_bytes
        for count in (512, 1024, 2048)
    }
    for count, needed_bytes in needs.items():
        answer = fit(MOE_35B, form, room(needed_bytes, 24 * GIB))
        assert isinstance(answer, Preview)
        assert (answer.form.micro_batch_tokens, answer.card_left_bytes, answer.cost) == (count, 0, 0.0)
    assert as_wished(MOE_35B, form, room(needs[512] - 1, 24 * GIB)) is None


def test_the_books_tell_how_large_a_card_is_and_a_form_says_what_it_computes_at_once() -> None:
    reading = Reading(1, "card", True, 24 * GIB, 20 * GIB, 0, HOST_BYTES, HOST_BYTES, 0)
    assert room_of(reading, []).whole_card_bytes == 24 * GIB - 512 * MIB
    assert room_of(dataclasses.replace(reading, is_card=False), []).whole_card_bytes == 0
    assert describe(wish(micro_batch_tokens=2048)).endswith(", f16 KV, 2,048 tokens at once")
    assert describe(OPEN).endswith(", f16 KV")
