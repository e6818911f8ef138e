"""The micro-batch of engines on cards: previews, books and the process itself are told the same one, and what does not fit with
it runs with a smaller one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines import engine_rows, launch, loading, loading_exact, residents, services
from engines.choices import StopReason
from engines.config import EngineConfig
from engines.engine_rows import EngineTask
from engines.models import Engine
from engines.runtime.host_memory import host_room
from pools import device_limits
from pools import services as pools
from pools.fit import device_fits
from pools.ledger_predict import predict
from pools.load_facts import variant_facts
from pools.models import Gpu, Model
from pools.placement import Preview
from tests.rows import CPU, HOST, add_engine, add_model
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db(transaction=True)
GIB = 1 << 30
CARD = dataclasses.replace(
    CPU, kind="cuda", uuid="GPU-1", name="A card", arch="sm_86", memory_total_bytes=12 * GIB, memory_used_bytes=0
)


@pytest.fixture
def engine(home: Path, db: None, tiny_model: Callable[..., SyntheticModel]) -> Engine:
    """An engine that a person set up, on a card."""
    added = add_engine(add_model(tiny_model("llama").path, home / "models"))
    pools.record_probe("here", HOST, [CPU, CARD])
    return changed(added, gpu=Gpu.objects.get(kind="cuda"), wanted="stopped")


def changed(engine: Engine, **values: Any) -> Engine:
    Engine.objects.filter(pk=engine.pk).update(**values)
    return Engine.objects.get(pk=engine.pk)


def task_of(engine: Engine) -> EngineTask:
    task = engine_rows.engine_task(engine.pk)
    assert task is not None
    return task


def told(engine: Engine) -> EngineConfig:
    return task_of(engine).config


def agreed(engine: Engine) -> int:
    """The micro-batch that the process is told, which is the one that books count."""
    engine = Engine.objects.get(pk=engine.pk)
    config, form = told(engine), residents.engine_form(engine)
    assert (config.batch_tokens, config.micro_batch_tokens) == (form.batch_tokens, form.micro_batch_tokens)
    counted = predict(variant_facts(engine.variant), dataclasses.replace(form, micro_batch_tokens=form.micro_batch))
    assert residents.engine_ledger(engine) == counted
    return config.micro_batch_tokens


def test_an_engine_on_a_card_is_told_what_books_count(engine: Engine) -> None:
    assert agreed(engine) == 2048
    with_512 = predict(
        variant_facts(engine.variant), dataclasses.replace(residents.engine_form(engine), micro_batch_tokens=512)
    )
    assert residents.engine_ledger(engine).device.compute_bytes > with_512.device.compute_bytes
    assert agreed(changed(engine, gpu_layers=0)) == 512
    assert agreed(changed(engine, gpu_layers=None, gpu=Gpu.objects.get(kind="cpu"))) == 512


def test_one_that_embeds_keeps_its_steps(engine: Engine) -> None:
    Model.objects.update(pooling="mean")
    config = told(engine)
    assert (config.batch_tokens, config.micro_batch_tokens, task_of(engine).chose_micro_batch) == (4096, 512, False)
    assert residents.engine_form(engine).micro_batch == config.pooled_step_tokens == 512


def test_what_a_person_says_wins_over_what_was_placed_and_that_over_what_suits_the_card(engine: Engine) -> None:
    assert agreed(changed(engine, placed_micro_batch_tokens=1024)) == 1024
    assert task_of(engine).chose_micro_batch
    engine = changed(engine, further_settings={"micro_batch_tokens": 4096})
    assert agreed(engine) == 4096
    assert not task_of(engine).chose_micro_batch
    assert agreed(changed(engine, further_settings={"batch_tokens": 1500}, placed_micro_batch_tokens=None)) == 1024


def test_what_suits_the_card_is_chosen_anew_once_a_person_stops_it_or_changes_it(engine: Engine) -> None:
    engine = changed(engine, placed_micro_batch_tokens=512)
    engine.threads = 3
    services.configure(engine, ["threads"])
    assert agreed(engine) == 2048
    engine = changed(engine, placed_micro_batch_tokens=512)
    services.stop(engine.pk)
    assert agreed(engine) == 2048


def test_a_running_engine_is_not_ended_for_another_micro_batch(engine: Engine) -> None:
    wanted = told(engine)
    assert launch.fits(dataclasses.replace(wanted, micro_batch_tokens=512), wanted)
    assert not launch.fits(dataclasses.replace(wanted, batch_tokens=512), wanted)


# --- placing ------------------------------------------------------------------------------------------


def limited(engine: Engine, tokens: int) -> None:
    """Caps the card at what the engine takes with so many tokens at once."""
    form = dataclasses.replace(residents.placed_form(engine), micro_batch_tokens=tokens)
    taken_bytes = predict(variant_facts(engine.variant), form).device.total_bytes
    assert device_limits.set_memory_limit(Gpu.objects.get(kind="cuda").pk, taken_bytes)


def test_an_engine_made_by_a_request_is_started_as_the_preview_says(engine: Engine) -> None:
    engine.delete()
    found = device_fits("tiny")
    assert found is not None
    on_card = found[1][1].answer
    assert isinstance(on_card, Preview)
    assert on_card.form.micro_batch_tokens == 2048
    loading.want("tiny")
    made = Engine.objects.get()
    assert made.gpu is not None and made.gpu.kind == "cuda"
    assert agreed(made) == 2048
    assert residents.engine_form(made) == on_card.form
    assert residents.engine_ledger(made) == on_card.prediction


@pytest.mark.parametrize("tokens", [512, 1024, 2048])
def test_one_that_is_kept_is_loaded_with_as_many_as_there_is_room_for(engine: Engine, tokens: int) -> None:
    """A person's engine, loaded for a request beside what else the card holds; it is counted as it is started."""
    Engine.objects.filter(pk=engine.pk).update(stop_reason=StopReason.SWAP, placed_micro_batch_tokens=512)
    limited(engine, tokens)
    loading.want("tiny")
    made = Engine.objects.get()
    assert (made.pk, made.wanted, made.slots, made.placed_micro_batch_tokens) == (engine.pk, "running", 2, tokens)
    assert agreed(made) == tokens


# --- by llama.cpp's plan ------------------------------------------------------------------------------


def test_what_a_person_set_up_and_does_not_fit_takes_a_smaller_micro_batch_and_nothing_else(engine: Engine) -> None:
    """With the host's memory for the card's: as many cells as leave room for the masks of fewer tokens only."""
    device_limits.set_memory_limit(Gpu.objects.get(kind="cuda").pk, 0)
    Gpu.objects.filter(kind="cuda").update(memory_total_bytes=1 << 45)
    slots = 16
    # With 512 tokens at once a cell takes some 2 KiB, with 2,048 some 5.
    tokens = host_room().free_bytes * 10 // 32 // 1024 // slots // 256 * 256
    refused = {"last_error": "its process ended\ntiny does not fit: …", "wanted": "running", "epoch": 1}
    engine = changed(engine, slots=slots, context_tokens=tokens, **refused)
    task = engine_rows.claim_start(engine.pk, 1)
    assert task is not None
    assert task.config.micro_batch_tokens == 2048
    refitted = loading_exact.refitted(task)
    assert refitted is not None
    placed = refitted.config.micro_batch_tokens
    assert placed in (512, 1024)
    assert refitted.config == dataclasses.replace(task.config, micro_batch_tokens=placed)
    assert refitted.last_error == ""
    assert agreed(engine) == placed
    plan = loading_exact.exact_plan(refitted)
    assert plan is not None and plan["fits"]
    # What a person insisted on is not changed; its own start says what would fit.
    insisted = changed(engine, further_settings={"micro_batch_tokens": 2048}, **refused)
    assert loading_exact.refitted(task_of(insisted)) == task_of(insisted)
