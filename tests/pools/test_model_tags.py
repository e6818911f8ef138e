"""What models can do, read from their files; and the KV family that an owner switches on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engines import engine_rows
from pools import job_runner, services
from pools.errors import GgufInvalid, ModelUnknown
from pools.fetch import Fetched
from pools.model_tags import is_projector, projector_tags, tags
from pools.models import Model
from tests.rows import add_engine, add_model
from tests.synthetic_projector import write_qwen_projector

CHANGES: dict[str, Any] = {
    "display_name": "Tiny",
    "generation_defaults": {},
    "chat_template": "",
    "pooling": "",
    "speculation": "none",
    "projector_path": "",
}
TEMPLATE = "{% if tools %}{{ tools }}{% endif %}<think>{{ messages[0].content }}"


def test_tags_are_what_the_header_and_the_template_say() -> None:
    assert tags({}, [], sees=False) == ()
    header = {"nextn_layers": 1, "expert_count": 256, "ssm": {"inner_size": 4096}}
    assert tags(header, ["tools", "reasoning"], sees=True) == ("tools", "thinking", "vision", "MTP", "MoE", "hybrid")
    assert tags({"ssm": {"inner_size": 0}, "nextn_layers": 0}, ["tools"], sees=False) == ("tools",)


def test_projectors_are_told_from_models(tmp_path: Path, tiny_model: Any) -> None:
    write_qwen_projector(tmp_path / "mmproj.gguf")
    assert is_projector(tmp_path / "mmproj.gguf")
    assert projector_tags(tmp_path / "mmproj.gguf") == ("vision",)
    assert not is_projector(tiny_model("llama").path)
    with pytest.raises(GgufInvalid, match="is no projector"):
        projector_tags(tiny_model("llama").path)


@pytest.mark.django_db
def test_a_model_shows_its_tags_and_those_of_a_template_given_instead(tiny_model: Any, tmp_path: Path) -> None:
    add_model(tiny_model("qwen35").path, tmp_path)
    assert services.model_views()[0].tags == ("hybrid",)
    model = Model.objects.get()
    services.change_model(model.pk, **{**CHANGES, "chat_template": TEMPLATE, "projector_path": "/mmproj.gguf"})
    assert services.model_views()[0].tags == ("tools", "thinking", "vision", "hybrid")


@pytest.mark.django_db
def test_a_projector_is_given_to_the_model_that_is_named(tiny_model: Any, tmp_path: Path) -> None:
    path = tmp_path / "mmproj.gguf"
    write_qwen_projector(path)
    fetched = Fetched(str(path), "00", path.stat().st_size, "", False, "")
    for name in ("tiny", ""):
        with pytest.raises(ModelUnknown):
            job_runner.register(fetched, "here", name, tmp_path)
    add_model(tiny_model("llama").path, tmp_path)
    assert job_runner.register(fetched, "here", "tiny", tmp_path) == "tiny"
    assert Model.objects.get().projector_path == str(path)
    assert "vision" in services.model_views()[0].tags


@pytest.mark.django_db
def test_a_declared_family_counts_once_it_is_switched_on(tiny_model: Any, tmp_path: Path) -> None:
    engine = add_engine(add_model(tiny_model("llama").path, tmp_path, kv_family="tiny-quants"))
    model = Model.objects.get()

    def told() -> str:
        task = engine_rows.engine_task(engine.pk)
        assert task is not None
        return task.config.kv_family

    assert (model.kv_family, told()) == ("tiny-quants", "")
    services.change_model(model.pk, **CHANGES, shares_kv_family=True)
    assert told() == "tiny-quants"
    # What the catalogue declares later does not replace what an owner wrote.
    services.change_model(model.pk, **CHANGES, kv_family="mine")
    add_model(tiny_model("llama").path, tmp_path, kv_family="tiny-quants")
    assert told() == "mine"
