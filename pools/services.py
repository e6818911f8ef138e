"""The only writer of hosts, devices and models; and what other apps may ask about them, as frozen views."""

from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from django.db import transaction
from django.db.models import F
from django.utils import timezone

from pools.chat_template import TemplateUnreadable, template_abilities
from pools.choices import HostState, Pooling, Speculation
from pools.events import publish_on_commit
from pools.generation_defaults import GenerationDefaults
from pools.gguf_header import GgufHeader
from pools.models import Gpu, Host, Model, Variant
from pools.probe import GpuReading, HostReading

LOST_AFTER_S = 20.0
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
    """A model as pages and the API list it. Size, quantization, counts and `header` are those of its first variant, if any.

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


@dataclass(frozen=True)
class GpuView:
    """A device with its last reading; None where it does not tell."""

    id: int
    kind: str
    index: int
    name: str
    arch: str
    memory_total_bytes: int
    memory_used_bytes: int | None
    temperature_c: float | None
    utilization_percent: float | None
    power_w: float | None
    last_seen_at: datetime | None


@dataclass(frozen=True)
class HostView:
    """A host with its last reading and its devices, ordered by kind and index."""

    id: int
    name: str
    state: str
    cpu_model: str
    cpu_count: int
    memory_total_bytes: int
    memory_available_bytes: int | None
    load_1m: float | None
    last_seen_at: datetime | None
    gpus: tuple[GpuView, ...]


def join_host(name: str) -> int:
    """Make the host's row if it is missing, count its (re)joining in `agent_epoch`, and return its primary key."""
    with transaction.atomic():
        host, _ = Host.objects.get_or_create(name=name)
        Host.objects.filter(pk=host.pk).update(
            agent_epoch=F("agent_epoch") + 1, state=HostState.UP, last_seen_at=timezone.now()
        )
        publish_on_commit("host", host.pk)
    return host.pk


def record_probe(host_name: str, reading: HostReading, gpus: list[GpuReading]) -> int:
    """Write what a probe read of a host and its devices; returns the host's primary key.

    Devices that were not seen keep their last reading and its time: the page shows them as stale, not as zero.
    """
    now = timezone.now()
    with transaction.atomic():
        host, _ = Host.objects.update_or_create(
            name=host_name, defaults={**asdict(reading), "state": HostState.UP, "last_seen_at": now}
        )
        for gpu in gpus:
            values = {**asdict(gpu), "last_seen_at": now}
            Gpu.objects.update_or_create(host=host, uuid=values.pop("uuid"), defaults=values)
        publish_on_commit("host", host.pk)
    return host.pk


def mark_lost_hosts(older_than_s: float = LOST_AFTER_S) -> list[str]:
    """Mark hosts that have not been heard of for `older_than_s` seconds as lost; returns the names of those it marked."""
    limit = timezone.now() - timedelta(seconds=older_than_s)
    lost = []
    for pk, name in Host.objects.filter(state=HostState.UP, last_seen_at__lt=limit).values_list("pk", "name"):
        with transaction.atomic():
            if Host.objects.filter(pk=pk, state=HostState.UP, last_seen_at__lt=limit).update(state=HostState.LOST):
                publish_on_commit("host", pk)
                lost.append(name)
    return lost


def host_names() -> list[str]:
    """The names of all hosts, lost ones included: only a probe brings one back."""
    return list(Host.objects.values_list("name", flat=True))


def lost_host_names() -> list[str]:
    """The names of the hosts that are lost."""
    return list(Host.objects.filter(state=HostState.LOST).values_list("name", flat=True))


def cpu_of(host_name: str) -> tuple[int, int] | None:
    """Primary keys of a host and its CPU device, or None before the first probe."""
    return Gpu.objects.filter(host__name=host_name, kind="cpu").values_list("host_id", "pk").first()


def register_gguf(
    name: str,
    path: Path,
    *,
    header: GgufHeader,
    content_digest: str,
    display_name: str = "",
    defaults: GenerationDefaults | None = None,
    make_default: bool = False,
) -> VariantView:
    """Write a model and its variant for the GGUF at `path`; the same content under the same name is written only once.

    A file that moved gets its new path. The first model of a pool becomes the default even when not asked to.
    """
    context_train_tokens = header.context_train_tokens
    values = {
        "path": str(path),
        "filename": path.name,
        "size_bytes": header.size_bytes,
        "architecture": header.architecture,
        "quantization": header.quantization,
        "parameter_count": header.parameter_count,
        "context_train_tokens": context_train_tokens,
        "header": _header_values(header),
    }
    with transaction.atomic():
        model, _ = Model.objects.get_or_create(
            name=name,
            defaults={
                "display_name": display_name or header.name or name,
                "context_tokens": context_train_tokens,
                "generation_defaults": (defaults or GenerationDefaults()).as_dict(),
                "pooling": header.pooling,
                "speculation": Speculation.AUTO if header.nextn_layers else Speculation.NONE,
            },
        )
        variant, _ = Variant.objects.update_or_create(model=model, content_digest=content_digest, defaults=values)
        if make_default or not Model.objects.filter(is_default=True).exists():
            _set_default(model.pk)
        publish_on_commit("model", model.pk)
    return _variant_view(variant)


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
) -> bool:
    """Change the name that pages show for a model, and what its engines read at their start; False when the row is gone.

    Raises ValueError for defaults that cannot be used, an unknown pooling or speculation, or a template that cannot be read.
    """
    if chat_template:
        template_abilities(chat_template)
    values = {
        "display_name": display_name,
        "generation_defaults": GenerationDefaults.from_dict(generation_defaults).as_dict(),
        "chat_template": chat_template,
        "pooling": Pooling(pooling),
        "speculation": Speculation(speculation),
        "projector_path": projector_path.strip(),
    }
    with transaction.atomic():
        changed = Model.objects.filter(pk=model_id).update(**values)
        if changed:
            publish_on_commit("model", model_id)
    return bool(changed)


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


def host_views() -> tuple[HostView, ...]:
    """All hosts with their devices, ordered by name."""
    return tuple(_host_view(host) for host in Host.objects.prefetch_related("gpus").order_by("name"))


def model_views(name: str | None = None) -> tuple[ModelView, ...]:
    """All models (or the one called `name`): the default first, then by name."""
    models = Model.objects.prefetch_related("variants").order_by("-is_default", "name")
    if name is not None:
        models = models.filter(name=name)
    return tuple(_model_view(model) for model in models)


def _host_view(host: Host) -> HostView:
    probed = host.memory_total_bytes > 0
    return HostView(
        id=host.pk,
        name=host.name,
        state=host.state,
        cpu_model=host.cpu_model,
        cpu_count=host.cpu_count,
        memory_total_bytes=host.memory_total_bytes,
        memory_available_bytes=host.memory_available_bytes if probed else None,
        load_1m=host.load_1m if probed else None,
        last_seen_at=host.last_seen_at,
        gpus=tuple(_gpu_view(gpu) for gpu in sorted(host.gpus.all(), key=lambda gpu: (gpu.kind, gpu.index))),
    )


def _gpu_view(gpu: Gpu) -> GpuView:
    return GpuView(
        id=gpu.pk,
        kind=gpu.kind,
        index=gpu.index,
        name=gpu.name,
        arch=gpu.arch,
        memory_total_bytes=gpu.memory_total_bytes,
        memory_used_bytes=gpu.memory_used_bytes,
        temperature_c=gpu.temperature_c,
        utilization_percent=gpu.utilization_percent,
        power_w=gpu.power_w,
        last_seen_at=gpu.last_seen_at,
    )


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
    first = variants[0] if variants else None
    return ModelView(
        name=model.name,
        display_name=model.display_name or model.name,
        is_default=model.is_default,
        context_tokens=model.context_tokens,
        created_at=model.created_at,
        variants=len(variants),
        quantization=first.quantization if first else "",
        size_bytes=first.size_bytes if first else 0,
        parameter_count=first.parameter_count if first else 0,
        context_train_tokens=first.context_train_tokens if first else 0,
        header=first.header if first else {},
        capabilities=_capabilities(model, first.header if first else {}),
    )


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
