"""What choosing a place for a model needs of the rows: its facts and wishes, and its hosts' devices, as frozen views."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pools.choices import HostDuty, HostState
from pools.generation_defaults import GenerationDefaults
from pools.ledger import DEVICE_CANDIDATES, Form, ModelFacts
from pools.micro_batch import open_form
from pools.models import Gpu, Model, Variant, VariantFile

USUAL_SLOTS = 4
USUAL_CONTEXT_TOKENS = 8192
# A projector takes buffers beside its weights.
PROJECTOR_FACTOR = 1.2


@dataclass(frozen=True)
class LoadWish:
    """A model that is to be loaded. `may_shrink`: nobody insisted on slots or context, so less of them will do."""

    model_id: int
    model_name: str
    variant_id: int
    facts: ModelFacts
    form: Form
    may_shrink: bool
    on_demand: bool
    pinned: bool


@dataclass(frozen=True)
class DeviceFacts:
    """A device that engines can be placed on, as it was last read. `used_bytes` None: it does not tell."""

    device_id: int
    host_id: int
    host_name: str
    name: str
    kind: str
    total_bytes: int
    used_bytes: int | None
    limit_bytes: int
    host_total_bytes: int
    host_available_bytes: int
    host_limit_bytes: int
    seen_at: datetime | None


def load_wish(model_name: str | None) -> LoadWish | None:
    """The newest variant of the model (None: the default one) and how to load it; None when there is no such model or file."""
    variants = Variant.objects.select_related("model").order_by("-pk")
    chosen = variants.filter(model__name=model_name) if model_name else variants.filter(model__is_default=True)
    variant = chosen.first()
    return None if variant is None else _wish(variant)


def variant_facts(variant: Variant) -> ModelFacts:
    """What memory depends on, of a variant's header."""
    return ModelFacts.from_header(variant.header, variant.size_bytes)


def model_form(variant: Variant) -> Form:
    """What every engine of a variant has in common, as far as memory depends on it."""
    model = variant.model
    drafts = 0 if model.pooling or model.speculation == "none" else model.draft_tokens
    return Form(
        kv_type_k=model.kv_type_k,
        kv_type_v=model.kv_type_v,
        draft_tokens=drafts,
        uses_draft_head=drafts > 0 and model.speculation in ("mtp", "auto"),
        pooling=model.pooling,
        projector_bytes=0 if model.pooling else _projector_bytes(model.projector_path),
        whole_vocabulary_slots=variant_facts(variant).whole_row_slots,
        sampling=model_sampling(model),
    )


def model_sampling(model: Model, device_candidates: int = DEVICE_CANDIDATES) -> str:
    """Where its engines sample, in the words of EngineConfig: on the host, if requests need whole rows of logits anyway."""
    defaults = GenerationDefaults.from_dict(model.generation_defaults)
    return "host" if defaults.needs_whole_rows(device_candidates) else "auto"


def _wish(variant: Variant) -> LoadWish:
    model, facts = variant.model, variant_facts(variant)
    trained = variant.context_train_tokens or USUAL_CONTEXT_TOKENS
    form = dataclasses.replace(
        open_form(model_form(variant)),
        slots=model.load_slots or USUAL_SLOTS,
        context_tokens=model.load_context_tokens or min(USUAL_CONTEXT_TOKENS, trained),
    )
    return LoadWish(
        model_id=model.pk,
        model_name=model.name,
        variant_id=variant.pk,
        facts=facts,
        form=form,
        may_shrink=not (model.load_slots or model.load_context_tokens),
        on_demand=model.load_on_demand,
        pinned=model.pinned,
    )


def _projector_bytes(path: str) -> int:
    """Unknown, and so 0, where the projector lies on another host."""
    try:
        return int(Path(path).stat().st_size * PROJECTOR_FACTOR) if path else 0
    except OSError:
        return 0


def usable_devices(variant_id: int | None = None) -> list[DeviceFacts]:
    """The devices of hosts that serve and are heard of; with a variant, of those that have its file."""
    devices = Gpu.objects.select_related("host").filter(
        host__state=HostState.UP, host__duty=HostDuty.ACTIVE, problem="", memory_total_bytes__gt=0
    )
    if variant_id is not None:
        having = list(VariantFile.objects.filter(variant_id=variant_id).values_list("host_id", flat=True))
        devices = devices.filter(host_id__in=having) if having else devices
    host_limits = dict(Gpu.objects.filter(kind="cpu").values_list("host_id", "memory_limit_bytes"))
    return [
        DeviceFacts(
            device_id=device.pk,
            host_id=device.host_id,
            host_name=device.host.name,
            name=f"{device.host.name}/{device.kind}{device.index}",
            kind=device.kind,
            total_bytes=device.memory_total_bytes,
            used_bytes=device.memory_used_bytes,
            limit_bytes=device.memory_limit_bytes,
            host_total_bytes=device.host.memory_total_bytes,
            host_available_bytes=device.host.memory_available_bytes,
            host_limit_bytes=host_limits.get(device.host_id, 0),
            seen_at=device.last_seen_at,
        )
        for device in devices
    ]
