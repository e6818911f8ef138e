"""Hosts, devices and models as rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from django.utils import timezone

from pools import catalogue, services
from pools.gguf_header import GgufHeader
from pools.models import Host, Model, Variant
from pools.probe import read_gpus, read_host
from tests.rows import CPU, HOST, add_model
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db

CARD = dataclasses.replace(CPU, kind="cuda", uuid="GPU-1", name="A card", arch="sm_90")


def test_this_machine_can_be_probed() -> None:
    services.record_probe("here", read_host(), read_gpus())
    (host,) = services.host_views()
    assert (host.name, host.state) == ("here", "up")
    assert host.cpu_count > 0
    assert host.memory_total_bytes > 0
    assert host.gpus[0].kind == "cpu"


def test_a_probe_updates_rows_and_keeps_devices_it_did_not_see() -> None:
    services.record_probe("here", HOST, [CPU, CARD])
    services.record_probe("here", dataclasses.replace(HOST, load_1m=2.5), [CPU])
    (host,) = services.host_views()
    assert host.load_1m == 2.5
    assert [gpu.kind for gpu in host.gpus] == ["cpu", "cuda"]
    cpu, card = host.gpus
    assert cpu.last_seen_at > card.last_seen_at


def test_each_joining_of_a_host_counts() -> None:
    first = services.join_host("here")
    assert services.join_host("here") == first
    assert Host.objects.get(pk=first).agent_epoch == 2


def test_a_silent_host_is_lost_until_a_probe_brings_it_back() -> None:
    services.record_probe("here", HOST, [CPU])
    assert services.mark_lost_hosts() == []
    Host.objects.update(last_seen_at=timezone.now() - timedelta(seconds=services.LOST_AFTER_S + 1))
    assert services.mark_lost_hosts() == ["here"]
    assert services.mark_lost_hosts() == []
    assert services.lost_host_names() == ["here"]
    services.record_probe("here", HOST, [CPU])
    assert services.lost_host_names() == []


def test_a_gguf_becomes_a_model_with_one_variant_however_often_it_is_registered(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path
) -> None:
    path = tiny_model("llama").path
    first = add_model(path, tmp_path)
    assert add_model(path, tmp_path) == first
    variant = Variant.objects.get()
    assert variant.path == str(path.resolve())
    assert variant.architecture == "llama"
    assert variant.header["vocab_size"] == 512
    assert first.context_train_tokens == variant.context_train_tokens > 0


def test_a_file_that_moved_keeps_its_variant(tiny_model: Callable[..., SyntheticModel], tmp_path: Path) -> None:
    path = tiny_model("llama").path
    first = add_model(path, tmp_path)
    moved = tmp_path / "moved.gguf"
    moved.write_bytes(path.read_bytes())
    assert add_model(moved, tmp_path).variant_id == first.variant_id
    assert Variant.objects.get().path == str(moved.resolve())


def test_the_first_model_is_the_default_and_only_one_ever_is(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path
) -> None:
    path = tiny_model("llama").path
    assert services.default_model_name() is None
    add_model(path, tmp_path, "first")
    add_model(path, tmp_path, "second")
    assert services.default_model_name() == "first"
    assert services.set_default_model("second")
    assert services.default_model_name() == "second"
    assert Model.objects.filter(is_default=True).count() == 1
    assert [model.name for model in services.model_views()] == ["second", "first"]
    assert not services.set_default_model("unknown")


def test_a_model_shows_the_variant_that_its_engines_load(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path
) -> None:
    older, newer = tiny_model("llama"), tiny_model("qwen3")
    add_model(older.path, tmp_path)
    add_model(newer.path, tmp_path)
    loaded = services.find_variant("tiny")
    (view,) = services.model_views()
    assert loaded is not None
    assert view.variants == 2
    assert (view.size_bytes, view.header["architecture"]) == (
        Variant.objects.get(pk=loaded.variant_id).size_bytes,
        Variant.objects.get(pk=loaded.variant_id).architecture,
    )
    assert loaded.path == str(newer.path.resolve())


def test_a_pool_without_rows_has_empty_views() -> None:
    assert services.host_views() == ()
    assert services.model_views() == ()
    assert services.find_variant("tiny") is None
    assert services.cpu_of("here") is None


def test_the_catalogue_header_is_json_without_the_template(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path
) -> None:
    header = catalogue.inspect(tiny_model("llama").path, tmp_path).header
    add_model(tiny_model("llama").path, tmp_path)
    stored = Variant.objects.get().header
    assert "chat_template" not in stored
    assert stored["has_chat_template"] is (header.chat_template is not None)


def capabilities(header: GgufHeader) -> tuple[str, ...]:
    Model.objects.all().delete()
    services.register_gguf("tiny", header.path, header=header, content_digest="0" * 64)
    return services.model_views("tiny")[0].capabilities


def test_what_a_model_is_good_for_follows_from_its_file(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path
) -> None:
    header = catalogue.inspect(tiny_model("llama").path, tmp_path).header
    assert capabilities(header) == ("completion",)
    thinking = dataclasses.replace(header, chat_template="{{ tools }}<think>")
    assert capabilities(thinking) == ("completion", "tools", "reasoning")
    assert capabilities(dataclasses.replace(header, chat_template="{% broken")) == ("completion",)
    assert capabilities(dataclasses.replace(header, pooling="mean")) == ("embedding",)
    assert capabilities(dataclasses.replace(header, pooling="rank")) == ("rerank",)


def test_a_template_and_a_pooling_of_the_owners_win_over_the_files(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path
) -> None:
    add_model(tiny_model("llama").path, tmp_path)
    model = Model.objects.get()
    changes = {
        "display_name": "Tiny",
        "generation_defaults": {},
        "chat_template": "",
        "pooling": "",
        "speculation": "none",
        "projector_path": "",
    }
    assert services.change_model(model.pk, **{**changes, "chat_template": "{{ tools }}"})
    assert services.model_views()[0].capabilities == ("completion", "tools")
    assert services.change_model(model.pk, **{**changes, "projector_path": "/models/mmproj.gguf"})
    assert services.model_views()[0].capabilities[-1] == "vision"
    assert services.change_model(model.pk, **{**changes, "pooling": "last"})
    assert services.model_views()[0].capabilities == ("embedding",)
    for wrong in (
        {"chat_template": "{% if"},
        {"pooling": "max"},
        {"speculation": "always"},
        {"draft_tokens": 17},
        {"generation_defaults": {"top_p": 2}},
    ):
        with pytest.raises(ValueError, match=r"Line 1|max|always|top_p|not 17"):
            services.change_model(model.pk, **{**changes, **wrong})
    # What an owner chose stays when the file is registered again.
    add_model(tiny_model("llama").path, tmp_path)
    assert Model.objects.get().pooling == "last"
