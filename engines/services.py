"""What people and other apps ask of engines: commands, and frozen views. What their head writes stands in engine_rows.

Every change of state is a conditional UPDATE. Those that return bool say whether this caller made the change; False means
that somebody else was first, which is a normal answer.
"""

import logging
from dataclasses import dataclass, field
from datetime import datetime
from urllib.parse import urlsplit

from celery import current_app
from django.db import transaction
from django.db.models import F, Q
from django.db.models.functions import Now
from kombu.exceptions import OperationalError as BrokerError

from engines import closed_places, engine_rows, store_rows
from engines.addresses import http_url
from engines.choices import HANDING_OVER, SERVING, TERMINAL, EngineState, StopReason, Wanted
from engines.errors import ModelNotFound, NoEngineReady
from engines.http_secret import http_secret
from engines.models import Engine
from engines.reconcile import COMMAND_EXPIRES_S, EngineFacts, Step, decide
from pools import services as pools
from pools.db import database_now
from pools.events import publish_on_commit

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineEndpoint:
    """A ready engine as dispatch sees it. `context_tokens` bounds one request. `kv_family` names the quants that its model lets
    share KV, "" none; a request is split over two of them up to `most_kv_loss` (nats), as the model's `run_mode` says. Engines of
    one `gpu_id` have its device between them."""

    engine_id: int
    name: str
    base_url: str
    model_name: str
    variant_id: int
    slots: int
    context_tokens: int
    secret: str = field(default="", repr=False, compare=False)
    host_name: str = field(default="", compare=False)
    sees_images: bool = field(default=False, compare=False)
    run_mode: str = field(default="auto", compare=False)
    kv_family: str = field(default="", compare=False)
    most_kv_loss: float = field(default=0.0, compare=False)
    gpu_id: int | None = field(default=None, compare=False)


@dataclass(frozen=True)
class EngineRpc:
    """Where an engine speaks the binary protocol, and with whom."""

    engine_id: int
    address: str
    port: int
    secret: str = field(repr=False)


@dataclass(frozen=True)
class EngineView:
    """An engine as pages show it. `base_url` is None while no process of it is known."""

    id: int
    name: str
    host_id: int
    gpu_id: int | None
    model_name: str
    variant_filename: str
    quantization: str
    wanted: str
    state: str
    epoch: int
    slots: int
    context_tokens: int
    threads: int
    base_url: str | None
    last_error: str
    restarts: int
    last_seen_at: datetime | None
    ready_at: datetime | None
    takes_new: bool = True
    secret: str = field(default="", repr=False)


def ensure_engine(
    name: str, *, host_id: int, gpu_id: int | None, variant_id: int, slots: int, context_tokens: int, threads: int
) -> int:
    """Make the engine `name`, wanted running, or bring an existing row to these values; returns its primary key.

    An existing row keeps what is wanted of it. A running process with other values is replaced when it is next looked at.
    """
    values = {
        "host_id": host_id,
        "gpu_id": gpu_id,
        "variant_id": variant_id,
        "slots": slots,
        "context_tokens": context_tokens,
        "threads": threads,
    }
    with transaction.atomic():
        engine, _ = Engine.objects.update_or_create(
            name=name, defaults=values, create_defaults={**values, "wanted": Wanted.RUNNING}
        )
        publish_on_commit("engine", engine.pk)
    return engine.pk


def default_engine_name(host_id: int, host_name: str) -> str:
    """The name of a host's first CPU engine: cpu-0, or the host's name before it where another host has that already."""
    name = "cpu-0"
    taken = Engine.objects.filter(name=name).exclude(host_id=host_id).exists()
    return f"{host_name[: 62 - len(name)]}-{name}" if taken else name


def start_wanted(host_name: str) -> int:
    """Tell a host's head to start every engine that is wanted and does not run; returns how many."""
    down = Engine.objects.filter(host__name=host_name, wanted=Wanted.RUNNING, state__in=TERMINAL, waits_for=[])
    return sum(_command(pk, "engines.tasks.start_engine", restarts=0) for pk in down.values_list("pk", flat=True))


def configure(engine: Engine, changed: list[str] | None) -> None:
    """Write an engine that a person filled in: all of it when `changed` is None (a new row), else only the fields named."""
    with transaction.atomic():
        if changed is None:
            engine.save(force_insert=True)
        elif changed:
            # It was placed as it was; what suits it now is chosen anew.
            engine.placed_micro_batch_tokens = None
            engine.save(update_fields=[*changed, "placed_micro_batch_tokens"])
        publish_on_commit("engine", engine.pk)


def start(engine_id: int) -> bool:
    """Ask for the engine to run: wanted changes and its head is told; past failures are forgiven. False also where it, its card
    or its host is being emptied: that is to serve again first."""
    with transaction.atomic():
        asked = _command(
            engine_id,
            "engines.tasks.start_engine",
            wanted=Wanted.RUNNING,
            restarts=0,
            stop_reason=StopReason.NONE,
            waits_for=[],
            takes_new=True,
            held_until=None,
        )
        # Behind the write, which holds the row: whoever closes its place waits for this, or is seen here.
        if asked and closed_places.closed(Engine.objects.get(pk=engine_id)):
            transaction.set_rollback(True)
            return False
    return asked


def stop(engine_id: int) -> bool:
    """A person asks for the engine to stop: wanted changes and its head is told. Nothing starts it on demand after that."""
    return _command(
        engine_id,
        "engines.tasks.stop_engine",
        wanted=Wanted.STOPPED,
        stop_reason=StopReason.PERSON,
        waits_for=[],
        placed_micro_batch_tokens=None,
    )


def drain(engine_id: int, reason: StopReason) -> bool:
    """Ask for the engine to take nothing new, to finish what it has, and to stop. False when it does not serve."""
    with transaction.atomic():
        serving = Q(pk=engine_id, state__in=[EngineState.READY, EngineState.UNHEALTHY])
        if not engine_rows.change(serving, EngineState.DRAINING):
            return False
        return _command(engine_id, "engines.tasks.drain_engine", wanted=Wanted.STOPPED, stop_reason=reason)


def renew(engine_id: int) -> bool:
    """Ask for the engine to finish what it has, to stop and to start again, as what is wanted of it says. False when it does not
    serve, or is not to."""
    with transaction.atomic():
        serving = Q(pk=engine_id, state=EngineState.READY, wanted=Wanted.RUNNING, takes_new=True)
        if not engine_rows.change(serving, EngineState.DRAINING):
            return False
        return _command(engine_id, "engines.tasks.drain_engine")


def suspect(endpoint: EngineEndpoint) -> bool:
    """Somebody could not reach this engine: no more requests go there, and its head looks at once, not at the next probe.

    False also when it listens somewhere else by now: then only the caller's knowledge was old.
    """
    port = urlsplit(endpoint.base_url).port
    lost = Q(pk=endpoint.engine_id, state=EngineState.READY, http_port=port)
    with transaction.atomic():
        if not engine_rows.change(lost, EngineState.UNHEALTHY, last_error="a request did not reach it"):
            return False
        host = Engine.objects.values_list("host__name", flat=True).get(pk=endpoint.engine_id)
        transaction.on_commit(lambda: _send("engines.tasks.probe_host", [host], host), robust=True)
    return True


def _command(engine_id: int, task: str, *, epoch: int | None = None, **changes: object) -> bool:
    """Count a new epoch and send `task` to the engine's head once that is committed; it expires before it is repeated.

    With `epoch`, only if no other command came since that one.
    """
    with transaction.atomic():
        due = Q(pk=engine_id) if epoch is None else Q(pk=engine_id, epoch=epoch)
        if not Engine.objects.filter(due).update(epoch=F("epoch") + 1, commanded_at=Now(), **changes):
            return False
        # The UPDATE holds the row, so this is the epoch that it wrote.
        new_epoch, host = Engine.objects.values_list("epoch", "host__name").get(pk=engine_id)
        transaction.on_commit(lambda: _send(task, [engine_id, new_epoch], host), robust=True)
        publish_on_commit("engine", engine_id)
    return True


def _send(task: str, args: list[int | str], host: str) -> None:
    try:
        current_app.send_task(task, args=args, queue=f"host.{host}.fast", expires=COMMAND_EXPIRES_S)
    except BrokerError as error:
        logger.warning("%s%r was not sent, beat will repeat what is still due: %s", task, args, error)


def reconcile(host_name: str | None = None, idle: frozenset[int] = frozenset()) -> int:
    """Compare what is wanted with what is, for every engine (of one host), and take one step each; returns their number.

    `idle` are engines on which no request runs; only their own head knows. A store is looked after by its own head; here only
    those of lost hosts are marked.
    """
    now = database_now()
    lost = set(pools.lost_host_names())
    leaving = pools.leaving_host_ages_s()
    steps = store_rows.mark_lost(sorted(lost)) if host_name is None else 0
    engines = Engine.objects.select_related("host", "variant")
    for engine in engines if host_name is None else engines.filter(host__name=host_name):
        facts = EngineFacts(
            wanted=engine.wanted,
            state=engine.state,
            host_lost=engine.host.name in lost,
            has_process=engine.pid is not None,
            state_age_s=(now - engine.state_since).total_seconds(),
            commanded_age_s=None if engine.commanded_at is None else (now - engine.commanded_at).total_seconds(),
            restarts=engine.restarts,
            leaving_age_s=leaving.get(engine.host.name),
            is_idle=engine.pk in idle,
            waits_for_others=bool(engine.waits_for),
            weights_bytes=engine.variant.size_bytes,
        )
        step = decide(facts)
        if step is not None:
            steps += _take(step, engine)
    return steps


def _take(step: Step, engine: Engine) -> bool:
    if step is Step.START:
        return _command(engine.pk, "engines.tasks.start_engine", epoch=engine.epoch)
    if step is Step.STOP:
        return _command(engine.pk, "engines.tasks.stop_engine", epoch=engine.epoch)
    if step is Step.DRAIN:
        return _command(engine.pk, "engines.tasks.drain_engine", epoch=engine.epoch)
    if step is Step.LOSE:
        live = Q(pk=engine.pk, epoch=engine.epoch, state__in=[EngineState.READY, EngineState.STARTING])
        return engine_rows.change(live, EngineState.UNHEALTHY, last_error=step.value)
    if step is Step.STEADY:
        return bool(Engine.objects.filter(pk=engine.pk, state=EngineState.READY).update(restarts=0))
    return engine_rows.mark_failed(engine.pk, engine.epoch, step.value)


def ready_engines(model_name: str | None) -> list[EngineEndpoint]:
    """The engines that can answer for this model now (None: the default model); never empty.

    Raises ModelNotFound for a name nobody knows, NoEngineReady while no engine of it serves.
    """
    # One query on the way of every request; why there is none is asked only then.
    asked_for = Q(variant__model__name=model_name) if model_name else Q(variant__model__is_default=True)
    endpoints = _endpoints(asked_for)
    if endpoints:
        return endpoints
    name = model_name or pools.default_model_name()
    if name is None:
        raise NoEngineReady("The pool has no model yet.", hint="Pull one with `manage.py pull NAME`.")
    if not pools.model_exists(name):
        raise ModelNotFound(f"The model {name!r} does not exist.", param="model")
    raise NoEngineReady(f"No engine serves the model {name!r} right now.")


def serving_engines(model_name: str | None = None) -> list[EngineEndpoint]:
    """The engines that serve a model (None: all of the pool); empty where there is none."""
    return _endpoints(Q(variant__model__name=model_name) if model_name else Q())


def holding_engines(model_name: str | None = None) -> list[EngineEndpoint]:
    """The engines that may hold conversations of a model (None: of any), those too that take nothing new."""
    return _endpoints(Q(variant__model__name=model_name) if model_name else Q(), _HOLDS)


# Who is sent requests; and who can still be asked for what it holds.
_TAKES = Q(state__in=SERVING, host__duty="active", takes_new=True)
_HOLDS = Q(state__in=HANDING_OVER)


def _endpoints(asked_for: Q, among: Q = _TAKES) -> list[EngineEndpoint]:
    serving = (
        Engine.objects.filter(asked_for, among, http_port__isnull=False)
        .order_by("pk")
        .values_list(
            "pk",
            "name",
            "host__address",
            "http_port",
            "rpc_secret",
            "host__name",
            "variant__model__projector_path",
            "variant__model__run_mode",
            "variant__model__kv_family",
            "variant__model__shares_kv_family",
            "variant__model__most_kv_loss",
            "gpu_id",
            "variant__model__name",
            "variant_id",
            "slots",
            "context_tokens",
        )
    )
    return [
        EngineEndpoint(
            pk,
            engine,
            http_url(address, port),
            *values,
            secret=http_secret(rpc_secret, address),
            host_name=host_name,
            sees_images=bool(projector),
            run_mode=run_mode,
            kv_family=family if shares else "",
            most_kv_loss=loss,
            gpu_id=gpu,
        )
        for pk, engine, address, port, rpc_secret, host_name, projector, run_mode, family, shares, loss, gpu, *values in serving
    ]


def engine_rpc(engine_id: int, *, leaving: bool = False) -> EngineRpc | None:
    """Where a serving engine speaks the binary protocol; None for one that does not serve. `leaving`: or finishes what it has."""
    states = HANDING_OVER if leaving else SERVING
    engine = Engine.objects.filter(pk=engine_id, state__in=states, rpc_port__isnull=False)
    values = engine.values_list("pk", "host__address", "rpc_port", "rpc_secret").first()
    return None if values is None else EngineRpc(*values)


# Where a view's fields stand that are not columns of the engine's own row; None: made of others.
_VIEW_COLUMNS: dict[str, str | None] = {
    "id": "pk",
    "model_name": "variant__model__name",
    "variant_filename": "variant__filename",
    "quantization": "variant__quantization",
    "base_url": None,
    "secret": None,
}


def engine_views() -> tuple[EngineView, ...]:
    """All engines, ordered by name. Read every second by each site: as plain values, without what the view does not show."""
    names = [name for name in EngineView.__dataclass_fields__ if _VIEW_COLUMNS.get(name, name)]
    columns = [_VIEW_COLUMNS.get(name) or name for name in names]
    rows = Engine.objects.order_by("name").values_list("host__address", "http_port", "rpc_secret", *columns)
    return tuple(
        EngineView(
            base_url=None if port is None else http_url(address, port),
            secret=http_secret(rpc_secret, address),
            **dict(zip(names, values, strict=True)),
        )
        for address, port, rpc_secret, *values in rows
    )
