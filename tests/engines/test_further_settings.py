"""Settings for which an engine's row has no column: which are taken, what refuses the others, and where they go."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.core.exceptions import ValidationError

from engines import engine_rows, further_settings, loading, residents, services, tasks
from engines.config import ConfigInvalid, EngineConfig
from engines.models import Engine
from pools.models import Gpu, Model
from tests.rows import add_engine, add_model
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db


@pytest.fixture
def engine(db: None, tiny_model: Callable[..., SyntheticModel], tmp_path: Path) -> Engine:
    return add_engine(add_model(tiny_model("llama").path, tmp_path))


def with_settings(engine: Engine, **settings: Any) -> Engine:
    Engine.objects.filter(pk=engine.pk).update(further_settings=settings)
    return Engine.objects.get(pk=engine.pk)


def told(engine: Engine) -> EngineConfig:
    task = engine_rows.engine_task(engine.pk)
    assert task is not None
    return task.config


def test_every_key_is_decided_by_somebody_or_can_be_set() -> None:
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    assert set(further_settings.DECIDED_BY) <= names
    assert set(further_settings.NAMES) == names - set(further_settings.DECIDED_BY)
    own = names & {field.name for field in Engine._meta.fields}
    assert own <= set(further_settings.DECIDED_BY)
    assert not [name for name in further_settings.NAMES if "secret" in name or name.endswith("port")]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"slots": 3}, "slots is decided by the engine's own field"),
        ({"speculation": "mtp"}, "speculation is decided by the model"),
        ({"default_top_k": 3}, "default_top_k is decided by the model's generation defaults"),
        ({"batch_token": 3}, "batch_token is no setting of an engine; did you mean batch_tokens?"),
        ({"zzz": 3}, "known are batch_tokens, "),
        ({"batch_tokens": "many"}, "batch_tokens is 'many'; it must be of type int"),
        ({"batch_tokens": 1}, "batch_tokens is 1; it must lie between 16 and 65536"),
        ({"kv_block_tokens": 100}, "kv_block_tokens is 100; it must be a power of two"),
        ({"cache_tokens": 100}, "cache_tokens is 100; one request alone may take 256"),
        ({"tensor_overrides": ["ffn"]}, "an entry reads regex=DEVICE"),
        ({"log_level": "loud"}, "log_level is 'loud'; it must be one of DEBUG"),
        ([], "must be a JSON object"),
    ],
)
def test_what_cannot_work_is_refused_and_named(engine: Engine, settings: Any, said: str) -> None:
    engine.further_settings = settings
    with pytest.raises(ValidationError) as refused:
        engine.full_clean()
    assert list(refused.value.message_dict) == ["further_settings"]
    assert said.lower() in refused.value.message_dict["further_settings"][0].lower()
    with pytest.raises(ConfigInvalid):
        further_settings.checked(settings, slots=2, context_tokens=256)


def test_an_engine_is_told_them(engine: Engine) -> None:
    engine.further_settings = {"micro_batch_tokens": 256, "tensor_split": [3, 1], "queue_limit": 5, "mmap": False}
    engine.full_clean()
    services.configure(engine, ["further_settings"])
    config = told(engine)
    assert (config.micro_batch_tokens, config.tensor_split, config.queue_limit) == (256, (3, 1), 5)
    assert not config.mmap
    assert EngineConfig.from_json(config.to_json()) == config


def test_memory_is_foreseen_with_them(engine: Engine) -> None:
    before = residents.engine_ledger(engine).host
    engine = with_settings(engine, micro_batch_tokens=128, cache_tokens=4096, host_cache_bytes=0, mmap=False)
    after = residents.engine_ledger(engine).host
    assert after.kv_bytes == before.kv_bytes * 4096 // 512
    assert (before.cache_bytes, after.cache_bytes, after.mapped_bytes) == (1 << 30, 0, 0)
    form, config = residents.engine_form(engine), told(engine)
    assert (form.cells, form.micro_batch) == (config.cells, config.micro_batch_tokens)


def on_a_card(engine: Engine) -> Engine:
    card, _ = Gpu.objects.get_or_create(
        host=engine.host, kind="cuda", index=0, defaults={"uuid": "GPU-1", "name": "A card", "arch": "sm_86"}
    )
    Engine.objects.filter(pk=engine.pk).update(gpu=card)
    return Engine.objects.get(pk=engine.pk)


def test_on_a_card_all_slots_may_serve_whole_rows_unless_each_takes_a_state(
    engine: Engine, tiny_model: Callable[..., SyntheticModel], tmp_path: Path
) -> None:
    hybrid = add_engine(add_model(tiny_model("qwen35").path, tmp_path, "hybrid"), name="cpu-1", slots=8)
    for one, count in ((on_a_card(engine), 2), (on_a_card(hybrid), 2)):
        config, form = told(one), residents.engine_form(one)
        assert config.samples_on_device
        assert config.whole_row_sequences == form.whole_row_sequences == count
        assert (config.sequences, config.outputs) == (form.sequences, form.outputs)
        assert (config.batch_tokens, config.micro_batch_tokens) == (4096, 512)
    Engine.objects.filter(pk=hybrid.pk).update(whole_vocabulary_slots=5)
    hybrid = Engine.objects.get(pk=hybrid.pk)
    assert told(hybrid).whole_row_sequences == residents.engine_form(hybrid).whole_row_sequences == 5


def test_a_model_whose_defaults_need_whole_rows_is_sampled_on_the_host(engine: Engine) -> None:
    engine = on_a_card(engine)
    Model.objects.update(generation_defaults={"top_k": 0})
    engine = Engine.objects.get(pk=engine.pk)
    assert not told(engine).samples_on_device
    assert not residents.engine_form(engine).samples_on_device
    engine = with_settings(engine, sampling="backend")
    assert told(engine).samples_on_device
    assert residents.engine_form(engine).samples_on_device


def test_what_became_wrong_is_no_start_and_says_so(engine: Engine) -> None:
    # As another release may have left it.
    with_settings(engine, tensor_spilt=[1])
    services.start(engine.pk)
    epoch = Engine.objects.get(pk=engine.pk).epoch
    tasks.start_engine(engine.pk, epoch)
    row = Engine.objects.get(pk=engine.pk)
    assert (row.state, row.wanted, row.stop_reason) == ("failed", "stopped", "misfit")
    assert "tensor_spilt is no setting of an engine; did you mean tensor_split?" in row.last_error


def test_an_engine_of_a_load_that_was_given_settings_is_started_as_it_is(engine: Engine) -> None:
    Engine.objects.filter(pk=engine.pk).update(
        on_demand=True, wanted="stopped", stop_reason="idle", slots=1, context_tokens=128
    )
    with_settings(engine, batch_tokens=64)
    assert loading.want("tiny").state == "starting"
    row = Engine.objects.get()
    assert (row.pk, row.wanted) == (engine.pk, "running")
    assert (row.slots, row.context_tokens, row.further_settings) == (1, 128, {"batch_tokens": 64})
