"""Placement: predictions grow with what is asked, previews fit, hints fit when followed, the least missed make way."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.config import EngineConfig
from pools.ledger import Form, ModelFacts
from pools.ledger_predict import predict
from pools.placement import Preview, Refusal, Room, as_wished, fit, nearest, previews
from pools.placement_rooms import Held, Reading, room_of
from pools.placement_swap import DeviceState, LoadPlan, Resident, plan_load
from tests.pools.placement_cases import GIB, MIB, facts, forms, models

rooms = st.builds(
    Room,
    device_id=st.just(1),
    name=st.just("card"),
    card_bytes=st.integers(0, 32 * GIB),
    host_bytes=st.integers(0, 64 * GIB),
    resident_bytes=st.integers(0, 64 * GIB),
    is_card=st.booleans(),
)


def card(size_bytes: int, host_bytes: int = 64 * GIB) -> Room:
    return Room(1, "card", size_bytes, host_bytes, host_bytes, is_card=True)


def replaced(form: Form, **values: object) -> Form:
    return dataclasses.replace(form, **values)  # type: ignore[arg-type]


# --- predictions --------------------------------------------------------------------------------------


@given(models, forms)
def test_more_context_slots_and_checkpoints_take_more(model: ModelFacts, form: Form) -> None:
    now = predict(model, form)
    for values in (
        {"context_tokens": form.context_tokens * 2},
        {"slots": form.slots + 1},
        {"checkpoints": form.checkpoints + 1},
    ):
        more = predict(model, replaced(form, **values))
        assert more.device.total_bytes >= now.device.total_bytes
        assert more.host.total_bytes >= now.host.total_bytes


@given(models, forms, st.data())
def test_layers_move_whole_between_card_and_host(model: ModelFacts, form: Form, data: st.DataObject) -> None:
    layers = data.draw(st.integers(1, model.placed_layers - 1))
    fewer, more = (predict(model, replaced(form, gpu_layers=count)) for count in (layers, layers + 1))
    for kind in ("weights_bytes", "expert_bytes", "kv_bytes", "recurrent_bytes"):
        assert getattr(more.device, kind) >= getattr(fewer.device, kind)
        assert getattr(more.host, kind) <= getattr(fewer.host, kind)
        total = [getattr(one.device, kind) + getattr(one.host, kind) for one in (fewer, more)]
        assert total[0] == total[1]


@given(models, forms)
def test_experts_that_stay_with_the_host_leave_the_card(model: ModelFacts, form: Form) -> None:
    left = [predict(model, replaced(form, cpu_moe_layers=count)) for count in range(model.layers + 1)]
    on_card = [one.device.expert_bytes for one in left]
    assert on_card == sorted(on_card, reverse=True)
    assert {one.device.expert_bytes + one.host.expert_bytes for one in left} == {on_card[0]}


@given(models, forms)
def test_without_a_card_all_is_the_hosts(model: ModelFacts, form: Form) -> None:
    alone = predict(model, replaced(form, gpu_layers=0, cpu_moe_layers=0))
    assert alone.device.total_bytes == 0
    assert alone.host.mapped_bytes == (alone.host.weights_bytes + alone.host.expert_bytes) * form.mmap


@pytest.mark.parametrize(
    "values",
    [
        {"slots": 4, "context_tokens": 4096},
        {"slots": 3, "gpu_layers": -1, "speculation": "mtp", "draft_tokens": 3, "checkpoints": 0},
        {"slots": 9, "gpu_layers": 12, "speculation": "lookup", "batch_tokens": 256},
        {"slots": 2, "pooling": "mean"},
    ],
)
def test_a_form_counts_as_the_engine_does(values: dict[str, object]) -> None:
    config = EngineConfig(model_path="m", model_name="m", **values)  # type: ignore[arg-type]
    form = Form(
        gpu_layers=config.gpu_layers,
        slots=config.slots,
        context_tokens=config.context_tokens,
        checkpoints=config.checkpoints,
        draft_tokens=config.longest_draft,
        uses_draft_head=config.wants_draft_head,
        batch_tokens=config.batch_tokens,
        micro_batch_tokens=config.micro_batch_tokens,
        whole_vocabulary_slots=config.whole_vocabulary_slots,
        pooling=config.pooling,
    )
    assert form.decoding_sequences == config.decoding_sequences
    assert form.samples_on_device == config.samples_on_device
    assert form.cells >= config.cells > form.cells - 256
    if not config.pooling:
        assert (form.sequences, form.outputs) == (config.sequences, config.outputs)


# --- what fits ----------------------------------------------------------------------------------------


def check_fits(model: ModelFacts, preview: Preview, room: Room) -> None:
    again = as_wished(model, preview.form, room)
    assert again is not None
    assert (again.card_left_bytes, again.host_left_bytes) == (preview.card_left_bytes, preview.host_left_bytes)
    assert min(preview.card_left_bytes, preview.host_left_bytes) >= 0


@settings(deadline=None, max_examples=25)
@given(models, forms, rooms)
def test_every_preview_fits_and_leaves_what_it_says(model: ModelFacts, wish: Form, room: Room) -> None:
    found = previews(model, wish, room)
    for preview in found:
        check_fits(model, preview, room)
    assert [one.cost for one in found] == sorted(one.cost for one in found)
    assert len({one.form for one in found}) == len(found)


@settings(deadline=None, max_examples=40)
@given(models, forms, rooms)
def test_a_refusals_hint_fits_when_it_is_followed(model: ModelFacts, wish: Form, room: Room) -> None:
    answer = fit(model, wish, room)
    if isinstance(answer, Preview):
        check_fits(model, answer, room)
        assert (answer.form.slots, answer.form.context_tokens) == (wish.slots, wish.context_tokens)
        return
    assert answer.reason
    if answer.nearest is None:
        assert previews(model, wish, room) == []
        return
    check_fits(model, answer.nearest, room)
    followed = fit(model, answer.nearest.form, room)
    assert isinstance(followed, Preview)
    assert answer.nearest.label in str(answer)


@settings(deadline=None, max_examples=25)
@given(models, forms, rooms, st.integers(0, 8 * GIB))
def test_more_room_never_makes_it_worse(model: ModelFacts, wish: Form, room: Room, more_bytes: int) -> None:
    larger = dataclasses.replace(
        room,
        card_bytes=room.card_bytes + more_bytes,
        host_bytes=room.host_bytes + more_bytes,
        resident_bytes=room.resident_bytes + more_bytes,
    )
    now, then = nearest(model, wish, room), nearest(model, wish, larger)
    if now is not None:
        assert then is not None
        assert then.cost <= now.cost


def test_experts_leave_a_card_that_is_too_small_before_layers_do() -> None:
    """The shape of 25 parts, most of them experts, on a card of 16."""
    model = facts(layers=40, layer_bytes=25 * MIB, expert_bytes=600 * MIB)
    wish = Form(slots=2)
    whole = predict(model, wish).device.total_bytes
    answer = fit(model, wish, card(whole * 16 // 25))
    assert isinstance(answer, Preview)
    assert answer.form.gpu_layers == -1
    assert 0 < answer.form.cpu_moe_layers < 40
    fewer = replaced(answer.form, cpu_moe_layers=answer.form.cpu_moe_layers - 1)
    assert as_wished(model, fewer, card(whole * 16 // 25)) is None, "no more experts are moved than have to be"


def test_a_dense_model_keeps_as_many_layers_as_fit() -> None:
    model, wish = facts(), Form(checkpoints=0)
    whole = predict(model, wish).device.total_bytes
    answer = fit(model, wish, card(whole // 2))
    assert isinstance(answer, Preview)
    assert 0 < answer.form.gpu_layers < model.placed_layers
    assert as_wished(model, replaced(wish, gpu_layers=answer.form.gpu_layers + 1), card(whole // 2)) is None


def test_a_refusal_says_what_is_missing_and_what_would_do() -> None:
    model, wish = facts(), Form(slots=8, context_tokens=131072)
    answer = fit(model, wish, card(5 * GIB, host_bytes=8 * GIB))
    assert isinstance(answer, Refusal)
    assert "card has 5.0 GiB for it and " in str(answer)
    assert "nearest form that fits: " in str(answer)
    nothing = fit(model, wish, card(GIB, host_bytes=0))
    assert isinstance(nothing, Refusal)
    assert str(nothing).endswith("; no smaller form fits either")


# --- the books ----------------------------------------------------------------------------------------

READING = Reading(1, "card", True, 16 * GIB, 6 * GIB, 0, 64 * GIB, 60 * GIB, 0)
MARGIN = 512 * MIB


def holds(card_gib: int, *, now: bool, when_read: bool) -> Held:
    return Held(1, card_gib * GIB, 0, 0, 0, now, when_read)


def test_what_others_use_is_what_was_read_less_what_was_ours() -> None:
    assert room_of(READING, []).card_bytes == 10 * GIB - MARGIN
    assert room_of(READING, [holds(5, now=True, when_read=True)]).card_bytes == 10 * GIB - MARGIN


def test_an_engine_counts_before_the_driver_tells_of_it_and_no_longer_once_it_is_gone() -> None:
    assert room_of(READING, [holds(4, now=True, when_read=False)]).card_bytes == 6 * GIB - MARGIN
    assert room_of(READING, [holds(4, now=False, when_read=True)]).card_bytes == 14 * GIB - MARGIN


def test_a_limit_bounds_what_engines_have_together() -> None:
    limited = dataclasses.replace(READING, limit_bytes=8 * GIB)
    assert room_of(limited, [holds(5, now=True, when_read=True)]).card_bytes == 3 * GIB


def test_mapped_weights_count_against_all_memory_and_the_rest_against_what_is_free() -> None:
    reading = Reading(1, "cpu", False, 64 * GIB, None, 0, 64 * GIB, 60 * GIB, 0)
    ours = Held(1, 0, 2 * GIB, 20 * GIB, GIB, True, True)
    room = room_of(reading, [ours])
    # 4 GiB are used, one of them ours by the books (the other is promised, not taken).
    assert room.host_bytes == (64 - 3 - 2) * GIB - 256 * MIB
    assert room.resident_bytes == (64 - 3 - 20) * GIB - 256 * MIB


# --- making way ---------------------------------------------------------------------------------------


def resident(
    engine_id: int, gib: int, *, idle_s: float = 60.0, reload_s: float = 10.0, may_go: bool = True
) -> Resident:
    return Resident(engine_id, 1, 1, gib * GIB, 0, 0, reload_s, idle_s, may_go=may_go)


def device(card_gib: float) -> DeviceState:
    return DeviceState(card(int(card_gib * GIB)), 1)


MODEL, WISH = facts(), Form(checkpoints=0)  # some 5.3 GiB on a card
WHOLE_GIB = predict(MODEL, WISH).device.total_bytes / GIB


def test_nobody_goes_where_there_is_room() -> None:
    plan = plan_load(MODEL, WISH, [device(WHOLE_GIB + 1)], [resident(1, 4)])
    assert isinstance(plan, LoadPlan)
    assert plan.stops == ()


def test_the_least_missed_goes_and_no_more_than_must() -> None:
    there = [resident(1, 4, idle_s=5), resident(2, 4, idle_s=5000), resident(3, 4, reload_s=90, idle_s=5)]
    plan = plan_load(MODEL, WISH, [device(WHOLE_GIB - 3)], there)
    assert isinstance(plan, LoadPlan)
    assert plan.stops == (2,)
    both = plan_load(MODEL, WISH, [device(WHOLE_GIB - 7)], there)
    assert isinstance(both, LoadPlan)
    assert set(both.stops) == {1, 2}


def test_who_may_not_go_stays() -> None:
    plan = plan_load(MODEL, WISH, [device(WHOLE_GIB - 3)], [resident(1, 8, may_go=False), resident(2, 4, reload_s=500)])
    assert isinstance(plan, LoadPlan)
    assert 1 not in plan.stops


def test_a_pool_of_many_residents_is_planned_all_the_same() -> None:
    there = [resident(number, 1, idle_s=float(number)) for number in range(1, 21)]
    plan = plan_load(MODEL, WISH, [device(WHOLE_GIB - 3.5)], there)
    assert isinstance(plan, LoadPlan)
    assert len(plan.stops) == 4


def test_a_card_is_preferred_to_the_cpu_and_another_card_to_a_swap() -> None:
    cpu = DeviceState(Room(2, "cpu", 0, 64 * GIB, 64 * GIB), 1)
    other = DeviceState(dataclasses.replace(card(8 * GIB), device_id=3), 1)
    plan = plan_load(MODEL, WISH, [cpu, device(WHOLE_GIB - 3), other], [resident(1, 4)])
    assert isinstance(plan, LoadPlan)
    assert (plan.device_id, plan.stops) == (3, ())
    plan = plan_load(MODEL, WISH, [cpu, device(WHOLE_GIB - 3)], [resident(1, 4)])
    assert isinstance(plan, LoadPlan)
    assert plan.device_id == 1


def test_a_smaller_form_is_taken_only_where_nobody_insisted() -> None:
    wish = Form(slots=8, context_tokens=131072, checkpoints=0)
    small = DeviceState(card(4 * GIB, host_bytes=8 * GIB), 1)
    plan = plan_load(MODEL, wish, [small], [])
    assert isinstance(plan, LoadPlan)
    assert plan.is_smaller
    assert isinstance(plan_load(MODEL, wish, [small], [], may_shrink=False), Refusal)


def test_a_pool_without_devices_says_so() -> None:
    assert "no device" in str(plan_load(MODEL, WISH, [], []))


@settings(deadline=None, max_examples=20)
@given(models, forms, rooms, st.lists(st.integers(0, 6), max_size=6))
def test_what_is_planned_fits_once_those_are_gone(model: ModelFacts, wish: Form, room: Room, sizes: list[int]) -> None:
    there = [resident(number, size, idle_s=number) for number, size in enumerate(sizes)]
    plan = plan_load(model, wish, [DeviceState(room, 1)], there)
    if isinstance(plan, LoadPlan):
        freed = sum(one.card_bytes for one in there if one.engine_id in plan.stops)
        check_fits(model, plan.preview, dataclasses.replace(room, card_bytes=room.card_bytes + freed))
