"""What engines hold of devices by their ledgers: the books that loading on demand is decided by. Reads rows, writes none."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from engines.choices import LIVE, TERMINAL, EngineState, Wanted
from engines.models import Engine
from engines.reconcile import MAX_RESTARTS
from pools.fit import reading_of
from pools.ledger import ALL_LAYERS, Form, Prediction
from pools.ledger_predict import predict
from pools.load_facts import DeviceFacts, model_form, model_sampling, variant_facts
from pools.micro_batch import card_micro_batch_tokens, open_form
from pools.placement import Room
from pools.placement_rooms import Held, room_of, whole_card_bytes
from pools.placement_swap import DeviceState, Resident, reload_s

# Who came a moment ago stays long enough to answer the request it came for.
MIN_RESIDENT_S = 10.0
# Further settings that forms know.
_MEMORY_SETTINGS = ("batch_tokens", "micro_batch_tokens", "cache_tokens", "host_cache_bytes", "mmap")


def engine_form(engine: Engine) -> Form:
    """The form in which an engine runs, or would: books count it, and its process is told so.

    Its micro-batch is what the row's further settings say, else what there was room for when it was placed, else what suits the
    card; that depends on the row, the model and the card's size alone, not on what happens to be free.
    """
    form = placed_form(engine)
    if form.micro_batch_tokens:
        return form
    whole_bytes = whole_card_bytes(engine.gpu.memory_total_bytes if engine.gpu else 0)
    tokens = engine.placed_micro_batch_tokens or card_micro_batch_tokens(
        variant_facts(engine.variant), form, whole_bytes
    )
    return dataclasses.replace(form, micro_batch_tokens=tokens)


def placed_form(engine: Engine) -> Form:
    """The form in which an engine is to be placed: where nobody said a micro-batch, as large a one as there is room for."""
    on_card = engine.gpu is not None and engine.gpu.kind == "cuda"
    form = open_form(model_form(engine.variant)) if on_card else model_form(engine.variant)
    return dataclasses.replace(
        form,
        gpu_layers=(ALL_LAYERS if engine.gpu_layers is None else engine.gpu_layers) if on_card else 0,
        cpu_moe_layers=engine.cpu_moe_layers if on_card else 0,
        slots=engine.slots,
        context_tokens=engine.context_tokens,
        kv_type_k=engine.kv_type_k or form.kv_type_k,
        kv_type_v=engine.kv_type_v or form.kv_type_v,
        checkpoints=-1 if engine.checkpoints is None else engine.checkpoints,
        **_further(engine),
    )


def _further(engine: Engine) -> dict[str, Any]:
    """What the row says beyond, as far as memory depends on it."""
    settings = engine.further.values
    values = {name: settings[name] for name in _MEMORY_SETTINGS if name in settings}
    if engine.whole_vocabulary_slots is not None:
        values["whole_vocabulary_slots"] = engine.whole_vocabulary_slots
    if settings.get("sampling", "auto") != "auto":
        values["sampling"] = settings["sampling"]
    elif "device_candidates" in settings:
        values["sampling"] = model_sampling(engine.variant.model, settings["device_candidates"])
    return values


def engine_ledger(engine: Engine) -> Prediction:
    """What an engine takes of its card and of its host, by its model's header."""
    return predict(variant_facts(engine.variant), engine_form(engine))


def engines_of(host_ids: Iterable[int]) -> list[Engine]:
    """All engines of these hosts, with what their ledgers need."""
    return list(Engine.objects.select_related("variant__model", "gpu", "host").filter(host_id__in=list(host_ids)))


def is_held(engine: Engine) -> bool:
    """Whether an engine's memory counts: a process may have it, or it is about to be started."""
    if engine.state == EngineState.FAILED:
        return engine.wanted == Wanted.RUNNING and engine.restarts <= MAX_RESTARTS
    return engine.state in LIVE or engine.wanted == Wanted.RUNNING


def held(engine: Engine, seen_at: datetime | None) -> Held:
    """An engine in the books of its devices, whose last reading is of `seen_at`."""
    ledger = engine_ledger(engine)
    return Held(
        device_id=engine.gpu_id or 0,
        card_bytes=ledger.device.total_bytes,
        kept_bytes=ledger.host.kept_bytes,
        resident_bytes=ledger.host.total_bytes,
        promised_bytes=ledger.host.cache_bytes,
        now=is_held(engine),
        when_read=seen_at is not None and _was_there(engine, seen_at),
    )


def _was_there(engine: Engine, seen_at: datetime) -> bool:
    if engine.state in TERMINAL:
        return engine.ready_at is not None and engine.ready_at <= seen_at < engine.state_since
    return engine.ready_at is not None and engine.ready_at <= seen_at


def device_states(
    devices: Sequence[DeviceFacts], engines: Sequence[Engine], busy: frozenset[int] = frozenset()
) -> list[DeviceState]:
    """Devices with the room that is left on them."""
    states = []
    for device in devices:
        books = [held(engine, device.seen_at) for engine in engines if engine.host_id == device.host_id]
        room = room_of(reading_of(device), books)
        states.append(DeviceState(room, device.host_id, device.device_id in busy))
    return states


def rooms(devices: Sequence[DeviceFacts]) -> list[Room]:
    """What is left on devices, by the books."""
    engines = engines_of({device.host_id for device in devices})
    return [state.room for state in device_states(devices, engines)]


def resident(engine: Engine, now: datetime, *, protects_young: bool = True) -> Resident:
    """An engine as one that might make way."""
    ledger = engine_ledger(engine)
    used_at = max((at for at in (engine.last_used_at, engine.ready_at) if at is not None), default=engine.created_at)
    age_s = (now - engine.ready_at).total_seconds() if engine.ready_at else 0.0
    may_go = engine.state in (EngineState.READY, EngineState.UNHEALTHY) and not engine.variant.model.pinned
    return Resident(
        engine_id=engine.pk,
        device_id=engine.gpu_id or 0,
        host_id=engine.host_id,
        card_bytes=ledger.device.total_bytes,
        kept_bytes=ledger.host.kept_bytes,
        resident_bytes=ledger.host.total_bytes,
        reload_s=reload_s(engine.load_s, ledger.device.loaded_bytes + ledger.host.loaded_bytes),
        idle_s=max((now - used_at).total_seconds(), 0.0),
        may_go=may_go and (age_s >= MIN_RESIDENT_S or not protects_young),
    )
