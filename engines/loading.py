"""Models loaded on demand: a request that finds no engine has one started where it fits; others may have to make way.

A load is an engine row that is wanted running and `waits_for` those that make way, plus a reservation of its device
(`gpu:<id>:load`), so that one model at a time is loaded there. Who makes way is drained: it takes nothing new, finishes what it
has, puts its conversations away, and ends. Every step is a conditional UPDATE and may be repeated; beat repeats what is due.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from django.db import transaction
from django.db.models import Q
from django.db.models.functions import Now
from django.utils.text import slugify

from engines import closed_places, emptying, residents, services
from engines.choices import LIVE, TERMINAL, EngineState, StopReason, Wanted
from engines.errors import ModelDoesNotFit, ModelLoading, ModelNotFound, NoEngineReady
from engines.models import Engine
from engines.reconcile import DRAIN_DEADLINE_S
from engines.services import EngineEndpoint
from pools import reservation
from pools import services as pools
from pools.db import database_now
from pools.events import publish_on_commit
from pools.load_facts import DeviceFacts, LoadWish, load_wish, usable_devices
from pools.placement import Preview, Refusal
from pools.placement_swap import DeviceState, LoadPlan, plan_load

# A load may wait for streams to end and then read a large file; afterwards the reservation frees itself.
LOAD_LEASE_S = DRAIN_DEADLINE_S + 600.0
TOUCH_EVERY_S = 5.0
# A form that llama.cpp refused is not tried again and again.
MISFIT_KEPT_S = 300.0
EMPTIED = "What could serve it is being emptied; let it serve again in the panel."

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadView:
    """How far a model's engine is: queued (its device is at another load), draining, starting, loading, or ready.

    `progress` is the loaded share, 0 to 1; `eta_s` how long it still takes. None where that is not known.
    """

    state: str
    node: str = ""
    device: str = ""
    progress: float | None = None
    eta_s: float | None = None

    def as_dict(self) -> dict[str, object]:
        """What an answer's `loading` holds; what is unknown is left out."""
        values = {"state": self.state, "node": self.node, "device": self.device, "progress": self.progress}
        if self.eta_s is not None:
            values["eta_seconds"] = round(self.eta_s, 1)
        return {key: value for key, value in values.items() if value not in (None, "")}


def engines_for(model_name: str | None) -> list[EngineEndpoint]:
    """The engines that can answer for this model now (None: the default one), never empty; has one started if there is none.

    Raises ModelNotFound; ModelLoading while one comes, with how far it is; ModelDoesNotFit; NoEngineReady where none will come.
    """
    try:
        return services.ready_engines(model_name)
    except NoEngineReady:
        view = want(model_name)
    name = model_name or pools.default_model_name()
    raise ModelLoading(f"The model {name!r} is being loaded ({view.state}).", view.as_dict())


def want(model_name: str | None) -> LoadView:
    """Have the model loaded if nothing of it serves or comes, and say how far it is. Raises as `engines_for` does."""
    wish = load_wish(model_name)
    if wish is None:
        name = model_name or pools.default_model_name()
        if name is None:
            raise NoEngineReady("The pool has no model yet.", hint="Pull one with `manage.py pull NAME`.")
        if not pools.model_exists(name):
            raise ModelNotFound(f"The model {name!r} does not exist.", param="model")
        raise NoEngineReady(f"The model {name!r} has no file.", hint="Pull it with `manage.py pull NAME`.")
    if (coming := _coming(wish)) is not None:
        return _view(coming)
    _refuse_unwanted(wish)
    return _load(wish)


def _coming(wish: LoadWish) -> Engine | None:
    """An engine of the model that serves by now, or will without anybody doing more."""
    coming_back = (EngineState.DRAINING, EngineState.STOPPING, EngineState.STOPPED)
    due = Q(state__in=[EngineState.READY, EngineState.STARTING]) | Q(state__in=coming_back, wanted=Wanted.RUNNING)
    engines = Engine.objects.select_related("host", "gpu").filter(
        due, variant__model_id=wish.model_id, host__state="up", host__duty="active", takes_new=True
    )
    return min(engines, key=lambda engine: engine.state in coming_back, default=None)


def _refuse_unwanted(wish: LoadWish) -> None:
    """Raises NoEngineReady where a load would be against somebody's will, or in vain."""
    said = f"No engine serves the model {wish.model_name!r} right now."
    engines = Engine.objects.filter(variant__model_id=wish.model_id)
    if not wish.on_demand:
        raise NoEngineReady(said, hint="It is not loaded on demand; start an engine of it in the panel.")
    if engines.filter(stop_reason=StopReason.PERSON, wanted=Wanted.STOPPED).exists():
        raise NoEngineReady(said, hint="Its engine was stopped in the panel; start it there.")
    misfit = engines.filter(
        stop_reason=StopReason.MISFIT, state_since__gt=Now() - timedelta(seconds=MISFIT_KEPT_S)
    ).first()
    if misfit is not None:
        raise ModelDoesNotFit(f"The model {wish.model_name!r} {misfit.last_error}.")
    busy = engines.filter(wanted=Wanted.RUNNING, state__in=[EngineState.FAILED, EngineState.UNHEALTHY])
    if not busy.exists():
        return
    if engines.filter(state=EngineState.READY, takes_new=False).exists():
        raise NoEngineReady(said, hint=EMPTIED)
    if not busy.exclude(state=EngineState.FAILED, restarts=0).exists():
        # engine_rows.hold: a start that was put off is no failure.
        raise NoEngineReady(said, hint="Its engine waits for what it starts with; the dashboard shows how far that is.")
    raise NoEngineReady(said, hint="Its engine failed and is being looked after; the dashboard shows why.")


# --- placing ------------------------------------------------------------------------------------------


def _load(wish: LoadWish) -> LoadView:
    with transaction.atomic():
        closed_places.plan_alone()
        if (coming := _coming(wish)) is not None:
            return _view(coming)
        usable = usable_devices(wish.variant_id)
        engines = residents.engines_of({device.host_id for device in usable})
        closed = _closed_by_engines(engines) | _being_emptied(usable, engines)
        devices = [device for device in usable if not closed & _places(device)]
        held = reservation.held_of(load_resource(device.device_id) for device in devices)
        busy = frozenset(device.device_id for device in devices if load_resource(device.device_id) in held)
        states = residents.device_states(devices, engines, busy)
        kept = _kept_row(wish, engines, closed)
        answer = _plan(wish, kept, [state for state in states if not state.is_busy], engines)
        if isinstance(answer, Refusal):
            return _queued_or_refused(wish, kept, states, engines, answer, is_closed=len(devices) < len(usable))
        device = next(device for device in devices if device.device_id == answer.device_id)
        return _begin(wish, kept, device, answer)


def load_resource(device_id: int) -> str:
    """The reservation of one load at a time on a device."""
    return f"gpu:{device_id}:load"


def load_owner(engine_id: int) -> str:
    """Who has it."""
    return f"load:{engine_id}"


def _closed_by_engines(engines: Sequence[Engine]) -> set[tuple[int, int | None]]:
    """Host and device of engines that were told to take nothing new, as those that are being emptied: nothing is loaded beside
    them. One that a person stopped keeps its device from nobody."""
    return {
        (engine.host_id, engine.gpu_id)
        for engine in engines
        if not engine.takes_new
        and (
            engine.state in LIVE
            or engine.wanted == Wanted.RUNNING
            or engine.stop_reason in (StopReason.IDLE, StopReason.SWAP)
        )
    }


def _being_emptied(devices: Sequence[DeviceFacts], engines: Sequence[Engine]) -> set[tuple[int, int | None]]:
    """The same of hosts, cards and engines that are being emptied, also where none of their engines is known yet."""
    emptied = closed_places.among(
        {device.host_id for device in devices},
        {device.device_id for device in devices},
        {engine.pk for engine in engines},
    )
    closed = {(engine.host_id, engine.gpu_id) for engine in engines if emptied.holds(engine)}
    for device in devices:
        if device.host_id in emptied.hosts or device.device_id in emptied.cards:
            closed |= _places(device)
    return closed


def _places(device: DeviceFacts) -> set[tuple[int, int | None]]:
    """As engines name it: those of a CPU may name none."""
    named: set[tuple[int, int | None]] = {(device.host_id, device.device_id)}
    return named | {(device.host_id, None)} if device.kind == "cpu" else named


def _kept_row(wish: LoadWish, engines: Sequence[Engine], closed: set[tuple[int, int | None]]) -> Engine | None:
    """A stopped engine of the model that a person set up, or gave settings of its own: it is started as it is, instead of one of
    our making.
    """
    rows = [
        engine
        for engine in engines
        if engine.variant.model_id == wish.model_id
        and engine.state in TERMINAL
        and (not engine.on_demand or engine.further_settings or engine.whole_vocabulary_slots is not None)
        and engine.takes_new
        and (engine.host_id, engine.gpu_id) not in closed
    ]
    return min(rows, key=lambda engine: engine.pk, default=None)


def _plan(
    wish: LoadWish,
    kept: Engine | None,
    states: Sequence[DeviceState],
    engines: Sequence[Engine],
    *,
    protects_young: bool = True,
) -> LoadPlan | Refusal:
    now = database_now()
    there = [
        residents.resident(engine, now, protects_young=protects_young)
        for engine in engines
        if residents.is_held(engine)
    ]
    if kept is not None:
        device_id = kept.gpu_id
        states = [
            state for state in states if state.host_id == kept.host_id and device_id in (None, state.room.device_id)
        ]
        states = states if device_id is not None else [state for state in states if not state.room.is_card]
        return plan_load(wish.facts, residents.placed_form(kept), states, there, may_shrink=False, exact=True)
    return plan_load(wish.facts, wish.form, states, there, may_shrink=wish.may_shrink)


def _queued_or_refused(
    wish: LoadWish,
    kept: Engine | None,
    states: Sequence[DeviceState],
    engines: Sequence[Engine],
    refusal: Refusal,
    *,
    is_closed: bool,
) -> LoadView:
    """Raises ModelDoesNotFit unless patience would help: a device is at another load, or who would go came just now. Where
    devices are closed (`is_closed`) it might fit there: raises NoEngineReady."""
    later = _plan(wish, kept, states, engines, protects_young=False)
    coming_or_going = (EngineState.STARTING, EngineState.DRAINING, EngineState.STOPPING)
    if isinstance(later, LoadPlan) or any(engine.takes_new and engine.state in coming_or_going for engine in engines):
        return LoadView("queued")
    if is_closed:
        raise NoEngineReady(
            f"No engine serves the model {wish.model_name!r} right now.",
            hint=EMPTIED,
        )
    raise ModelDoesNotFit(
        f"The model {wish.model_name!r} does not fit: {refusal.reason}.",
        hint=f"It would fit as: {refusal.nearest.label}." if refusal.nearest else None,
    )


def _begin(wish: LoadWish, kept: Engine | None, device: DeviceFacts, plan: LoadPlan) -> LoadView:
    """Write the load: the engine's row, the device's reservation, and who makes way."""
    own = kept or _own_row(wish, device)
    # All in one order before any is written, as whoever closes several does.
    emptying.lock([*plan.stops, *([own.pk] if own else [])])
    engine = kept or _shaped_row(wish, device, own, plan.preview)
    if engine is None:
        return LoadView("queued")
    lease = reservation.reserve(
        load_resource(device.device_id), load_owner(engine.pk), LOAD_LEASE_S, f"loads {wish.model_name}"
    )
    # Between the look and now a person may have stopped or closed it, or somebody started it.
    due = Engine.objects.filter(pk=engine.pk, state__in=TERMINAL, takes_new=True).exclude(
        stop_reason=StopReason.PERSON, wanted=Wanted.STOPPED
    )
    begun = lease is not None and due.update(
        wanted=Wanted.RUNNING,
        waits_for=list(plan.stops),
        stop_reason=StopReason.NONE,
        placed_micro_batch_tokens=plan.preview.form.micro_batch_tokens if device.kind == "cuda" else None,
        restarts=0,
        load_progress=None,
        last_error="",
    )
    if not begun:
        transaction.set_rollback(True)
        return LoadView("queued")
    publish_on_commit("engine", engine.pk)
    logger.info("engine %d loads %s on %s: %s", engine.pk, wish.model_name, device.name, plan.preview.label)
    for engine_id in plan.stops:
        logger.info("engine %d makes way for %s", engine_id, wish.model_name)
        services.drain(engine_id, StopReason.SWAP)
    if not plan.stops:
        services.start(engine.pk)
    return LoadView("draining" if plan.stops else "starting", device.host_name, device.name)


def _own_row(wish: LoadWish, device: DeviceFacts) -> Engine | None:
    """The row that an earlier load made there."""
    return Engine.objects.filter(
        variant_id=wish.variant_id, gpu_id=device.device_id, on_demand=True, takes_new=True, state__in=TERMINAL
    ).first()


def _shaped_row(wish: LoadWish, device: DeviceFacts, row: Engine | None, preview: Preview) -> Engine | None:
    """`row`, or a new one, as the load needs it; None where somebody started the one that there is in this very moment."""
    form = preview.form
    values = {
        "slots": form.slots,
        "context_tokens": form.context_tokens,
        "gpu_layers": form.gpu_layers if device.kind == "cuda" else None,
        "cpu_moe_layers": form.cpu_moe_layers,
        "kv_type_k": form.kv_type_k,
        "kv_type_v": form.kv_type_v,
        "checkpoints": None if form.checkpoints < 0 else form.checkpoints,
    }
    if row is None:
        place = {"host_id": device.host_id, "gpu_id": device.device_id, "variant_id": wish.variant_id}
        return Engine.objects.create(name=_free_name(wish, device), on_demand=True, **place, **values)
    return row if Engine.objects.filter(pk=row.pk, state__in=TERMINAL).update(**values) else None


def _free_name(wish: LoadWish, device: DeviceFacts) -> str:
    base = slugify(f"{wish.model_name} {device.name}".replace("/", " ").replace(".", "-"))[:58] or "engine"
    taken = set(Engine.objects.filter(name__startswith=base).values_list("name", flat=True))
    return next(
        name for number in range(len(taken) + 2) if (name := f"{base}-{number}" if number else base) not in taken
    )


# --- steps --------------------------------------------------------------------------------------------


def advance() -> int:
    """Start every engine whose way is free by now; returns how many."""
    started = 0
    for engine in Engine.objects.exclude(waits_for=[]):
        waiting = Engine.objects.filter(pk=engine.pk, waits_for=engine.waits_for)
        if engine.wanted != Wanted.RUNNING or not engine.takes_new:
            # Somebody stopped it before it began, or its place is being emptied.
            given_up = waiting.exclude(wanted=Wanted.RUNNING, takes_new=True)
            if given_up.update(waits_for=[], wanted=Wanted.STOPPED):
                reservation.release_owner(load_owner(engine.pk))
            continue
        if Engine.objects.filter(pk__in=engine.waits_for).exclude(state__in=TERMINAL).exists():
            continue
        with transaction.atomic():
            if waiting.filter(takes_new=True).update(waits_for=[]):
                started += services.start(engine.pk)
    return started


def idle_overdue(host_name: str) -> list[int]:
    """The serving engines of a host that nobody has asked for longer than their model's `idle_unload_s`."""
    now = database_now()
    serving = Engine.objects.select_related("variant__model").filter(
        host__name=host_name,
        state=EngineState.READY,
        variant__model__idle_unload_s__gt=0,
        variant__model__pinned=False,
    )
    return [
        engine.pk for engine in serving if residents.resident(engine, now).idle_s > engine.variant.model.idle_unload_s
    ]


def touch(engine_id: int | None) -> None:
    """A request came to this engine or ended there; written at most every TOUCH_EVERY_S seconds."""
    if engine_id is None:
        return
    old = Q(last_used_at__isnull=True) | Q(last_used_at__lt=Now() - timedelta(seconds=TOUCH_EVERY_S))
    Engine.objects.filter(old, pk=engine_id).update(last_used_at=Now())


def _view(engine: Engine) -> LoadView:
    device = f"{engine.host.name}/{engine.gpu.kind}{engine.gpu.index}" if engine.gpu else ""
    if engine.state == EngineState.READY:
        return LoadView("ready", engine.host.name, device, 1.0)
    if engine.waits_for:
        return LoadView("draining", engine.host.name, device)
    progress = engine.load_progress if engine.state == EngineState.STARTING else None
    eta_s = engine.load_s * (1 - (progress or 0.0)) if engine.load_s else None
    return LoadView("starting" if progress is None else "loading", engine.host.name, device, progress, eta_s)
