"""The only writer of engine rows; and what other apps may ask about engines, as frozen views.

Every change of state is a conditional UPDATE. Those that return bool say whether this caller made the change; False means
that somebody else was first, which is a normal answer.
"""

import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from urllib.parse import urlsplit

from celery import current_app
from django.conf import settings
from django.db import transaction
from django.db.models import F, Q
from django.utils import timezone
from kombu.exceptions import OperationalError as BrokerError

from engines.choices import LIVE, SERVING, TERMINAL, EngineState, Wanted
from engines.config import EngineConfig
from engines.errors import ModelNotFound, NoEngineReady
from engines.models import Engine
from engines.reconcile import COMMAND_EXPIRES_S, EngineFacts, Step, decide
from pools import services as pools
from pools.events import publish_on_commit
from pools.generation_defaults import GenerationDefaults

ALL_GPU_LAYERS = 999
MAX_ERROR_CHARS = 2000

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineEndpoint:
    """A ready engine as dispatch sees it. `context_tokens` bounds one request."""

    engine_id: int
    name: str
    base_url: str
    model_name: str
    variant_id: int
    slots: int
    context_tokens: int


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


@dataclass(frozen=True)
class EngineTask:
    """An engine as its head handles it: what is wanted, what the row says, and what its process would be told."""

    engine_id: int
    epoch: int
    wanted: str
    state: str
    pid: int | None
    pid_start_time: float | None
    http_port: int | None
    config: EngineConfig
    directory: Path


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
    down = Engine.objects.filter(host__name=host_name, wanted=Wanted.RUNNING, state__in=TERMINAL)
    return sum(_command(pk, "engines.tasks.start_engine", restarts=0) for pk in down.values_list("pk", flat=True))


def configure(engine: Engine, changed: list[str] | None) -> None:
    """Write an engine that a person filled in: all of it when `changed` is None (a new row), else only the fields named."""
    with transaction.atomic():
        if changed is None:
            engine.save(force_insert=True)
        elif changed:
            engine.save(update_fields=changed)
        publish_on_commit("engine", engine.pk)


def start(engine_id: int) -> bool:
    """Ask for the engine to run: wanted changes and its head is told; past failures are forgiven."""
    return _command(engine_id, "engines.tasks.start_engine", wanted=Wanted.RUNNING, restarts=0)


def stop(engine_id: int) -> bool:
    """Ask for the engine to stop: wanted changes and its head is told."""
    return _command(engine_id, "engines.tasks.stop_engine", wanted=Wanted.STOPPED)


def suspect(endpoint: EngineEndpoint) -> bool:
    """Somebody could not reach this engine: no more requests go there, and its head looks at once, not at the next probe.

    False also when it listens somewhere else by now: then only the caller's knowledge was old.
    """
    port = urlsplit(endpoint.base_url).port
    lost = Q(pk=endpoint.engine_id, state=EngineState.READY, http_port=port)
    with transaction.atomic():
        if not _change(lost, EngineState.UNHEALTHY, last_error="a request did not reach it"):
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
        now = timezone.now()
        if not Engine.objects.filter(due).update(epoch=F("epoch") + 1, commanded_at=now, **changes):
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


def claim_start(engine_id: int, epoch: int) -> EngineTask | None:
    """Take the start with this epoch: the engine is `starting` and the caller launches it. None when it is not due."""
    due = Q(pk=engine_id, epoch=epoch, wanted=Wanted.RUNNING, state__in=TERMINAL)
    if not _change(due, EngineState.STARTING, pid=None, pid_start_time=None, http_port=None, ready_at=None):
        return None
    return engine_task(engine_id)


def claim_stop(engine_id: int, epoch: int) -> EngineTask | None:
    """Take the stop with this epoch: the engine is `stopping` and the caller ends it. None when it is not due."""
    if not _change(Q(pk=engine_id, epoch=epoch, state__in=LIVE), EngineState.STOPPING):
        return None
    return engine_task(engine_id)


def record_process(engine_id: int, pid: int, pid_start_time: float, http_port: int) -> bool:
    """Write which process a starting engine is. False: it is not wanted any more."""
    return _change(
        Q(pk=engine_id, wanted=Wanted.RUNNING, state=EngineState.STARTING),
        EngineState.STARTING,
        pid=pid,
        pid_start_time=pid_start_time,
        http_port=http_port,
        last_seen_at=timezone.now(),
    )


def adopt(task: EngineTask, pid: int, pid_start_time: float, http_port: int) -> bool:
    """Write a running process into the row of an engine that did not know of it; its next health check does the rest."""
    return _change(
        Q(pk=task.engine_id, epoch=task.epoch, wanted=Wanted.RUNNING, state=task.state),
        EngineState.STARTING,
        pid=pid,
        pid_start_time=pid_start_time,
        http_port=http_port,
        last_error="",
    )


def mark_ready(engine_id: int, pid: int) -> bool:
    """The process `pid` answers its health check with ok."""
    now = timezone.now()
    came_up = Q(pk=engine_id, pid=pid, state__in=[EngineState.STARTING, EngineState.UNHEALTHY])
    if _change(came_up, EngineState.READY, last_seen_at=now, ready_at=now, last_error=""):
        return True
    Engine.objects.filter(pk=engine_id, pid=pid, state=EngineState.READY).update(last_seen_at=now)
    return False


def mark_unhealthy(engine_id: int, pid: int, error: str) -> bool:
    """The process `pid` lives, but does not answer any more."""
    return _change(
        Q(pk=engine_id, pid=pid, state=EngineState.READY), EngineState.UNHEALTHY, last_error=error[:MAX_ERROR_CHARS]
    )


def mark_failed(engine_id: int, epoch: int, error: str) -> bool:
    """The engine's process is gone or never came up; the last command is done with."""
    return _change(
        Q(pk=engine_id, epoch=epoch, state__in=[EngineState.STARTING, EngineState.READY, EngineState.UNHEALTHY]),
        EngineState.FAILED,
        pid=None,
        pid_start_time=None,
        http_port=None,
        commanded_at=None,
        restarts=F("restarts") + 1,
        last_error=error[:MAX_ERROR_CHARS],
    )


def mark_stopped(engine_id: int, states: Iterable[str] = (EngineState.STOPPING,)) -> bool:
    """No process of the engine runs any more, and that is no failure."""
    return _change(
        Q(pk=engine_id, state__in=list(states)),
        EngineState.STOPPED,
        pid=None,
        pid_start_time=None,
        http_port=None,
        commanded_at=None,
    )


def _change(due: Q, state: EngineState, **values: object) -> bool:
    """Move the engine that `due` names to `state`. `state_since` keeps its value where the state stays."""
    with transaction.atomic():
        engine = Engine.objects.filter(due).values_list("pk", "state").first()
        if engine is None:
            return False
        pk, old_state = engine
        if old_state != state:
            values["state_since"] = timezone.now()
        if not Engine.objects.filter(due, state=old_state).update(state=state, **values):
            return False
        publish_on_commit("engine", pk)
    if old_state != state:
        logger.info("engine %d: %s → %s", pk, old_state, state.value)
    return True


def reconcile() -> int:
    """Compare what is wanted with what is, for every engine, and take one step each; returns the number of steps."""
    now = timezone.now()
    lost = set(pools.lost_host_names())
    steps = 0
    for engine in Engine.objects.select_related("host"):
        facts = EngineFacts(
            wanted=engine.wanted,
            state=engine.state,
            host_lost=engine.host.name in lost,
            has_process=engine.pid is not None,
            state_age_s=(now - engine.state_since).total_seconds(),
            commanded_age_s=None if engine.commanded_at is None else (now - engine.commanded_at).total_seconds(),
            restarts=engine.restarts,
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
    if step is Step.LOSE:
        live = Q(pk=engine.pk, epoch=engine.epoch, state__in=[EngineState.READY, EngineState.STARTING])
        return _change(live, EngineState.UNHEALTHY, last_error=step.value)
    if step is Step.STEADY:
        return bool(Engine.objects.filter(pk=engine.pk, state=EngineState.READY).update(restarts=0))
    return mark_failed(engine.pk, engine.epoch, step.value)


def ready_engines(model_name: str | None) -> list[EngineEndpoint]:
    """The engines that can answer for this model now (None: the default model); never empty.

    Raises ModelNotFound for a name nobody knows, NoEngineReady while no engine of it serves.
    """
    # One query on the way of every request; why there is none is asked only then.
    asked_for = Q(variant__model__name=model_name) if model_name else Q(variant__model__is_default=True)
    serving = (
        Engine.objects.filter(asked_for, state__in=SERVING, http_port__isnull=False)
        .order_by("pk")
        .values_list("pk", "name", "http_port", "variant__model__name", "variant_id", "slots", "context_tokens")
    )
    endpoints = [
        EngineEndpoint(pk, engine, f"http://127.0.0.1:{port}", *values) for pk, engine, port, *values in serving
    ]
    if endpoints:
        return endpoints
    name = model_name or pools.default_model_name()
    if name is None:
        raise NoEngineReady("The pool has no model yet.", hint="Pull one with `manage.py pull NAME`.")
    if not pools.model_exists(name):
        raise ModelNotFound(f"The model {name!r} does not exist.", param="model")
    raise NoEngineReady(f"No engine serves the model {name!r} right now.")


def engine_views() -> tuple[EngineView, ...]:
    """All engines, ordered by name."""
    engines = Engine.objects.select_related("variant__model").order_by("name")
    return tuple(
        EngineView(
            id=engine.pk,
            name=engine.name,
            host_id=engine.host_id,
            gpu_id=engine.gpu_id,
            model_name=engine.variant.model.name,
            variant_filename=engine.variant.filename,
            quantization=engine.variant.quantization,
            wanted=engine.wanted,
            state=engine.state,
            epoch=engine.epoch,
            slots=engine.slots,
            context_tokens=engine.context_tokens,
            threads=engine.threads,
            base_url=engine.base_url,
            last_error=engine.last_error,
            restarts=engine.restarts,
            last_seen_at=engine.last_seen_at,
            ready_at=engine.ready_at,
        )
        for engine in engines
    )


def engine_task(engine_id: int) -> EngineTask | None:
    """One engine as its head handles it; None when the row is gone."""
    engine = Engine.objects.select_related("variant__model", "gpu").filter(pk=engine_id).first()
    return None if engine is None else _engine_task(engine)


def engine_tasks(host_name: str) -> list[EngineTask]:
    """All engines of a host as its head handles them."""
    engines = Engine.objects.select_related("variant__model", "gpu").filter(host__name=host_name)
    return [_engine_task(engine) for engine in engines]


def _engine_task(engine: Engine) -> EngineTask:
    on_cuda = engine.gpu is not None and engine.gpu.kind == "cuda"
    defaults = GenerationDefaults.from_dict(engine.variant.model.generation_defaults)
    config = EngineConfig(
        model_path=engine.variant.path,
        model_name=engine.variant.model.name,
        slots=engine.slots,
        context_tokens=engine.context_tokens,
        threads=engine.threads,
        gpu_layers=ALL_GPU_LAYERS if on_cuda else 0,
        main_gpu=engine.gpu.index if on_cuda and engine.gpu is not None else 0,
        chat_template=engine.variant.model.chat_template,
        pooling=engine.variant.model.pooling,
        speculation=engine.variant.model.speculation,
        projector_path="" if engine.variant.model.pooling else engine.variant.model.projector_path,
        max_body_bytes=settings.HYDRA_MAX_BODY_BYTES,
        engine_id=engine.pk,
        **{f"default_{key}": value for key, value in asdict(defaults).items()},
    )
    return EngineTask(
        engine_id=engine.pk,
        epoch=engine.epoch,
        wanted=engine.wanted,
        state=engine.state,
        pid=engine.pid,
        pid_start_time=engine.pid_start_time,
        http_port=engine.http_port,
        config=config,
        directory=Path(settings.HYDRA_HOME) / "engines" / str(engine.pk),
    )
