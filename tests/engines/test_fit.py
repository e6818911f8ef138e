"""The preview of a model's placements, and what the admin shows and takes of placement."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from django.contrib.auth import get_user_model
from django.test import Client

from engines import residents
from pools import device_limits
from pools import services as pools
from pools.fit import device_fits
from pools.models import Gpu, Model
from pools.placement import Preview, Refusal
from pools.readings import GpuReading
from pools.services import VariantView
from tests.rows import CPU, HOST, add_engine, add_model, set_ready
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db
CARD = GpuReading(
    kind="cuda",
    index=0,
    uuid="GPU-1",
    name="A card",
    arch="sm_86",
    memory_total_bytes=12 << 30,
    memory_used_bytes=1 << 30,
    temperature_c=40.0,
    utilization_percent=1.0,
    power_w=20.0,
)


@pytest.fixture
def variant(tiny_model: Callable[..., SyntheticModel], tmp_path: Path) -> VariantView:
    pools.record_probe("here", HOST, [CPU, CARD])
    return add_model(tiny_model("llama").path, tmp_path / "models")


@pytest.fixture
def staff(client: Client) -> Client:
    client.force_login(get_user_model().objects.create_superuser("admin", password="x"))
    return client


def test_every_device_says_how_the_model_would_be_loaded_there(variant: VariantView) -> None:
    found = device_fits("tiny")
    assert found is not None
    on_cpu, on_card = found[1]
    assert isinstance(on_cpu.answer, Preview)
    assert isinstance(on_card.answer, Preview)
    assert (on_cpu.answer.form.gpu_layers, on_card.answer.form.gpu_layers) == (0, -1)
    assert {preview.form.gpu_layers for preview in on_card.previews} > {-1, 0}
    assert device_fits("unknown") is None


def test_what_engines_hold_and_what_a_person_allows_is_taken_off(variant: VariantView) -> None:
    before = device_fits("tiny")
    engine = add_engine(variant)
    set_ready(engine, 12345)
    after = device_fits("tiny")
    assert before is not None
    assert after is not None
    taken = residents.engine_ledger(engine).host
    assert before[1][0].room.resident_bytes - after[1][0].room.resident_bytes == taken.total_bytes
    device_limits.set_memory_limit(Gpu.objects.get(kind="cpu").pk, 1 << 20)
    limited = device_fits("tiny")
    assert limited is not None
    assert isinstance(limited[1][0].answer, Refusal)


def test_the_admin_shows_where_a_model_fits_and_what_an_engine_takes(variant: VariantView, staff: Client) -> None:
    engine = add_engine(variant)
    pools.record_probe("here", HOST, [CPU, CARD])
    model = Model.objects.get()
    page = staff.get(f"/admin/pools/model/{model.pk}/change/").content.decode()
    assert "here/cuda0" in page
    assert "all layers on the card" in page
    page = staff.get(f"/admin/engines/engine/{engine.pk}/change/").content.decode()
    assert "on the CPU; 2 slots of 256 tokens, f16 KV: host " in page


def test_the_admin_takes_a_devices_limit_and_nothing_else_of_it(variant: VariantView, staff: Client) -> None:
    device = Gpu.objects.get(kind="cuda")
    data = {"memory_limit_bytes": 1 << 33, "name": "mine", "_save": "Save"}
    prefix = "minutes"
    data |= {f"{prefix}-{key}": 0 for key in ("TOTAL_FORMS", "INITIAL_FORMS", "MIN_NUM_FORMS", "MAX_NUM_FORMS")}
    answer = staff.post(f"/admin/pools/gpu/{device.pk}/change/", data)
    assert answer.status_code == 302, answer.content.decode()[-2000:]
    device.refresh_from_db()
    assert (device.memory_limit_bytes, device.name) == (1 << 33, "A card")


def test_a_models_choices_are_kept_by_the_admins_service(variant: VariantView) -> None:
    model = Model.objects.get()
    model.pinned, model.idle_unload_s, model.kv_type_k = True, 600, "q8_0"
    assert pools.change_model(
        model.pk,
        display_name=model.display_name,
        generation_defaults=model.generation_defaults,
        chat_template="",
        pooling="",
        speculation="none",
        projector_path="",
        loading=pools.LoadingChoices.of(model),
    )
    model.refresh_from_db()
    assert (model.pinned, model.idle_unload_s, model.kv_type_k, model.load_on_demand) == (True, 600, "q8_0", True)
