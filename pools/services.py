"""The only writer of models and variants; and what other apps may ask about them, as frozen views.

Hosts and devices are `pools.host_services`'; other apps reach both through this module.
"""

from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from django.db import transaction
from django.db.models.functions import Now

from pools.chat_template import TemplateUnreadable, template_abilities
from pools.choices import Pooling, RunMode, Speculation
from pools.events import publish_on_commit
from pools.generation_defaults import GenerationDefaults
from pools.gguf_header import GgufHeader
from pools.host_services import (
    LOST_AFTER_S,
    GpuView,
    HostView,
    card_keys,
    change_duty,
    cpu_of,
    finish_retirement,
    host_address,
    host_names,
    host_views,
    join_host,
    leaving_host_ages_s,
    lost_host_names,
    mark_lost_hosts,
    record_beat,
    record_probe,
    retiring_hosts,
)
from pools.model_tags import tags
from pools.models import MAX_DRAFT_TOKENS, Host, Model, Variant, VariantFile

__all__ = [
    "LOST_AFTER_S",
    "GpuView",
    "HostView",
    "LoadingChoices",
    "ModelView",
    "VariantView",
    "card_keys",
    "change_duty",
    "change_model",
    "cpu_of",
    "default_model_name",
    "find_variant",
    "finish_retirement",
    "host_address",
    "host_names",
    "host_views",
    "join_host",
    "leaving_host_ages_s",
    "lost_host_names",
    "mark_lost_hosts",
    "model_exists",
    "model_views",
    "record_beat",
    "record_probe",
    "register_gguf",
    "retiring_hosts",
    "set_default_model",
    "set_projector",
    "variant_paths",
    "variant_source",
]

_HEADER_FIELDS_LEFT_OUT = ("path", "chat_template")


@dataclass(frozen=True)
class VariantView:
    """A variant as engines need it: what to load and under which name it is asked for."""

    variant_id: int
    model_name: str
    path: str
    context_train_tokens: int
    context_tokens: int


@dataclass(frozen=True)
class ModelView:
    """A model as pages and the API list it. Size, quantization, counts and `header` are those of its newest variant, if any,
    which is the one that `find_variant` gives to engines.

    `capabilities`: completion (with tools and reasoning where the chat template knows them, vision with a projector),
    embedding, or rerank.
    """

    name: str
    display_name: str
    is_default: bool
    context_tokens: int
    created_at: datetime
    variants: int
    quantization: str
    size_bytes: int
    parameter_count: int
    context_train_tokens: int
    header: dict[str, Any]
    capabilities: tuple[str, ...]
    tags: tuple[str, ...] = ()
    kv_family: str = ""
    shares_kv_family: bool = False


@dataclass(frozen=True)
class LoadingChoices:
    """When and how a model's engines are loaded and unloaded by themselves; see the fields of `Model`."""

    load_on_demand: bool = True
    pinned: bool = False
    idle_unload_s: int = 0
    load_slots: int = 0
    load_context_tokens: int = 0
    kv_type_k: str = "f16"
    kv_type_v: str = "f16"

    @classmethod
    def of(cls, model: Model) -> "LoadingChoices":
        return cls(**{name: getattr(model, name) for name in cls.__dataclass_fields__})


def register_gguf(
    name: str,
    path: Path,
    *,
    header: GgufHeader,
    content_digest: str,
    display_name: str = "",
    defaults: GenerationDefaults | None = None,
    make_default: bool = False,
    source: str = "",
    is_verified: bool = False,
    kv_family: str = "",
    host_name: str = "",
) -> VariantView:
    """Write a model and its variant for the GGUF at `path`; the same content under the same name is written only once.

    A file that moved gets its new path. The first model of a pool becomes the default even when not asked to. With `host_name`,
    the path counts for that host; others keep theirs. A source and a verification once known are kept.
    """
    values = _variant_values(path, header)
    with transaction.atomic():
        model, _ = Model.objects.get_or_create(
            name=name,
            defaults={
                "display_name": display_name or header.name or name,
                "context_tokens": header.context_train_tokens,
                "generation_defaults": (defaults or GenerationDefaults()).as_dict(),
                "pooling": header.pooling,
                "speculation": Speculation.AUTO if header.nextn_layers else Speculation.NONE,
                "kv_family": kv_family,
            },
        )
        if kv_family:
            Model.objects.filter(pk=model.pk, kv_family="").update(kv_family=kv_family)
        if source:
            values |= {"source": source, "is_verified": is_verified}
        variant, _ = Variant.objects.update_or_create(model=model, content_digest=content_digest, defaults=values)
        if host := Host.objects.filter(name=host_name).first():
            VariantFile.objects.update_or_create(
                variant=variant, host=host, defaults={"path": str(path), "checked_at": Now()}
            )
        if make_default or not Model.objects.filter(is_default=True).exists():
            _set_default(model.pk)
        publish_on_commit("model", model.pk)
    return _variant_view(variant)


def _variant_values(path: Path, header: GgufHeader) -> dict[str, Any]:
    """A variant's columns that its file alone tells."""
    return {
        "path": str(path),
        "filename": path.name,
        "size_bytes": header.size_bytes,
        "architecture": header.architecture,
        "quantization": header.quantization,
        "parameter_count": header.parameter_count,
        "context_train_tokens": header.context_train_tokens,
        "header": _header_values(header),
    }


def set_default_model(name: str) -> bool:
    """Make `name` the model that serves requests which name none; False when there is no such model."""
    with transaction.atomic():
        pk = Model.objects.filter(name=name).values_list("pk", flat=True).first()
        if pk is None:
            return False
        _set_default(pk)
        publish_on_commit("model", pk)
    return True


def change_model(
    model_id: int,
    *,
    display_name: str,
    generation_defaults: dict[str, Any],
    chat_template: str,
    pooling: str,
    speculation: str,
    projector_path: str,
    draft_tokens: int | None = None,
    kv_family: str | None = None,
    shares_kv_family: bool | None = None,
    most_kv_loss: float | None = None,
    run_mode: str | None = None,
    loading: LoadingChoices | None = None,
) -> bool:
    """Change the name that pages show for a model, and what its engines read at their start; False when the row is gone.

    None leaves what it stands for as it is. Raises ValueError for defaults that cannot be used, an unknown pooling,
    speculation, run mode or length of drafts, or a template that cannot be read.
    """
    if chat_template:
        template_abilities(chat_template)
    values: dict[str, Any] = {
        "display_name": display_name,
        "generation_defaults": GenerationDefaults.from_dict(generation_defaults).as_dict(),
        "chat_template": chat_template,
        "pooling": Pooling(pooling),
        "speculation": Speculation(speculation),
        "projector_path": projector_path.strip(),
    }
    if draft_tokens is not None:
        if not 1 <= draft_tokens <= MAX_DRAFT_TOKENS:
            raise ValueError(f"A draft has 1 to {MAX_DRAFT_TOKENS} tokens, not {draft_tokens}.")
        values["draft_tokens"] = draft_tokens
    if kv_family is not None:
        values["kv_family"] = kv_family
    if shares_kv_family is not None:
        values["shares_kv_family"] = shares_kv_family
    if most_kv_loss is not None:
        values["most_kv_loss"] = most_kv_loss
    if run_mode is not None:
        values["run_mode"] = RunMode(run_mode)
    if loading is not None:
        values |= asdict(loading)
    with transaction.atomic():
        changed = Model.objects.filter(pk=model_id).update(**values)
        if changed:
            publish_on_commit("model", model_id)
    return bool(changed)


def set_projector(name: str, path: Path) -> bool:
    """Let the engines of a model take in images through the projector at `path`; False when there is no such model."""
    with transaction.atomic():
        pk = Model.objects.filter(name=name).values_list("pk", flat=True).first()
        if pk is None:
            return False
        Model.objects.filter(pk=pk).update(projector_path=str(path))
        publish_on_commit("model", pk)
    return True


def variant_paths(host_name: str) -> dict[int, str]:
    """Where variants lie on a host, by their primary keys; one that is not among them lies where its own row says, if at all."""
    return dict(VariantFile.objects.filter(host__name=host_name).values_list("variant_id", "path"))


def variant_source(variant_id: int) -> str:
    """Where a variant can be fetched from, "" where nobody knows."""
    return Variant.objects.filter(pk=variant_id).values_list("source", flat=True).first() or ""


def _set_default(model_id: int) -> None:
    # The old default first: at no moment may two rows carry the mark.
    Model.objects.filter(is_default=True).exclude(pk=model_id).update(is_default=False)
    Model.objects.filter(pk=model_id, is_default=False).update(is_default=True)


def default_model_name() -> str | None:
    """The model that serves requests which name none, or None in a pool without models."""
    return Model.objects.filter(is_default=True).values_list("name", flat=True).first()


def find_variant(model_name: str) -> VariantView | None:
    """The newest variant of a model, or None when there is no such model or it has no file."""
    variant = Variant.objects.select_related("model").filter(model__name=model_name).order_by("-pk").first()
    return None if variant is None else _variant_view(variant)


def model_exists(name: str) -> bool:
    """Whether users may ask for a model of this name, served now or not."""
    return Model.objects.filter(name=name).exists()


def model_views(name: str | None = None) -> tuple[ModelView, ...]:
    """All models (or the one called `name`): the default first, then by name."""
    models = Model.objects.prefetch_related("variants").order_by("-is_default", "name")
    if name is not None:
        models = models.filter(name=name)
    return tuple(_model_view(model) for model in models)


def _variant_view(variant: Variant) -> VariantView:
    return VariantView(
        variant_id=variant.pk,
        model_name=variant.model.name,
        path=variant.path,
        context_train_tokens=variant.context_train_tokens,
        context_tokens=variant.model.context_tokens,
    )


def _model_view(model: Model) -> ModelView:
    variants = list(model.variants.all())
    newest = max(variants, key=lambda variant: variant.pk, default=None)
    return ModelView(
        name=model.name,
        display_name=model.display_name or model.name,
        is_default=model.is_default,
        context_tokens=model.context_tokens,
        created_at=model.created_at,
        variants=len(variants),
        quantization=newest.quantization if newest else "",
        size_bytes=newest.size_bytes if newest else 0,
        parameter_count=newest.parameter_count if newest else 0,
        context_train_tokens=newest.context_train_tokens if newest else 0,
        header=newest.header if newest else {},
        capabilities=_capabilities(model, newest.header if newest else {}),
        tags=model_tags(model, newest.header if newest else {}),
        kv_family=model.kv_family,
        shares_kv_family=model.shares_kv_family,
    )


def model_tags(model: Model, header: dict[str, Any]) -> tuple[str, ...]:
    """What the model can do, with the header of one of its variants."""
    abilities = _abilities(model.chat_template) if model.chat_template else header.get("template_abilities", [])
    return tags(header, abilities, sees=bool(model.projector_path))


def _capabilities(model: Model, header: dict[str, Any]) -> tuple[str, ...]:
    if model.pooling:
        return ("rerank",) if model.pooling == Pooling.RANK else ("embedding",)
    abilities = _abilities(model.chat_template) if model.chat_template else header.get("template_abilities", [])
    return "completion", *abilities, *(("vision",) if model.projector_path else ())


def _abilities(template: str | None) -> list[str]:
    try:
        return sorted(template_abilities(template or ""), reverse=True)
    except TemplateUnreadable:
        return []


def _header_values(header: GgufHeader) -> dict[str, Any]:
    """The header as JSON; the chat template stays in the file, here stands only whether there is one and what it can do."""
    values = {key: value for key, value in asdict(header).items() if key not in _HEADER_FIELDS_LEFT_OUT}
    return {
        **values,
        "has_chat_template": header.chat_template is not None,
        "template_abilities": _abilities(header.chat_template),
    }
