"""Engine rows as their head handles them: the claims, and what it saw of a process.

Every change of state is a conditional UPDATE. Those that return bool say whether this caller made the change; False means
that somebody else was first, which is a normal answer.
"""

import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from django.conf import settings
from django.db import transaction
from django.db.models import F, Q
from django.db.models.functions import Now

from engines import residents, store_rows
from engines.choices import LIVE, TERMINAL, EngineState, StopReason, Wanted
from engines.config import EngineConfig
from engines.models import Engine
from pools import reservation
from pools.events import publish_on_commit
from pools.generation_defaults import GenerationDefaults
from pools.load_facts import variant_facts
from pools.micro_batch import CARD_BATCH_TOKENS

ALL_GPU_LAYERS = 999
MAX_ERROR_CHARS = 2000
PROGRESS_STEP = 0.04  # of loading, that is worth a write

NO_PROCESS: dict[str, object] = {
    "pid": None,
    "pid_start_time": None,
    "http_port": None,
    "rpc_port": None,
    "rpc_secret": "",
}

_MAY_FAIL = [EngineState.STARTING, EngineState.READY, EngineState.UNHEALTHY, EngineState.DRAINING]
# What was loading is loaded, or never will be: the device is free for another load.
_LOAD_IS_OVER = frozenset({EngineState.READY, EngineState.FAILED, EngineState.STOPPED})

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineTask:
    """An engine as its head handles it: what is wanted, what the row says, and what its process would be told. With a `refusal`
    it must not be started: that is not what the row says. `chose_micro_batch`: nobody said how many tokens it computes at once,
    so fewer will do.
    """

    engine_id: int
    epoch: int
    wanted: str
    state: str
    pid: int | None
    pid_start_time: float | None
    http_port: int | None
    config: EngineConfig
    directory: Path
    card_uuid: str = ""
    on_demand: bool = False
    last_error: str = ""
    refusal: str = ""
    ready_at: datetime | None = None
    chose_micro_batch: bool = False


def claim_start(engine_id: int, epoch: int) -> EngineTask | None:
    """Take the start with this epoch: the engine is `starting` and the caller launches it. None when it is not due."""
    due = Q(pk=engine_id, epoch=epoch, wanted=Wanted.RUNNING, state__in=TERMINAL, waits_for=[])
    if not change(due, EngineState.STARTING, **NO_PROCESS, ready_at=None, load_progress=None):
        return None
    return engine_task(engine_id)


def claim_stop(engine_id: int, epoch: int) -> EngineTask | None:
    """Take the stop with this epoch: the engine is `stopping` and the caller ends it. None when it is not due."""
    if not change(Q(pk=engine_id, epoch=epoch, state__in=LIVE), EngineState.STOPPING):
        return None
    return engine_task(engine_id)


def record_process(
    engine_id: int,
    pid: int,
    pid_start_time: float,
    http_port: int,
    rpc_port: int | None = None,
    rpc_secret: str = "",
    *,
    epoch: int | None = None,
) -> bool:
    """Write which process a starting engine is. False: it is not wanted any more, or (of `epoch`) another start came after."""
    start = Q() if epoch is None else Q(epoch=epoch, pid__isnull=True)
    return change(
        start & Q(pk=engine_id, wanted=Wanted.RUNNING, state=EngineState.STARTING),
        EngineState.STARTING,
        pid=pid,
        pid_start_time=pid_start_time,
        http_port=http_port,
        rpc_port=rpc_port,
        rpc_secret=rpc_secret,
        last_seen_at=Now(),
    )


def adopt(task: EngineTask, pid: int, pid_start_time: float, told: EngineConfig) -> bool:
    """Write a running process, which was `told` this, into the row of an engine that did not know of it; its next health
    check does the rest.
    """
    return change(
        Q(pk=task.engine_id, epoch=task.epoch, wanted=Wanted.RUNNING, state=task.state),
        EngineState.STARTING,
        pid=pid,
        pid_start_time=pid_start_time,
        http_port=told.port,
        rpc_port=told.rpc_port or None,
        rpc_secret=told.rpc_secret,
        last_error="",
    )


def mark_ready(engine_id: int, pid: int) -> bool:
    """The process `pid` answers its health check with ok."""
    now = Now()
    came_up = Q(pk=engine_id, pid=pid, state__in=[EngineState.STARTING, EngineState.UNHEALTHY])
    if change(came_up, EngineState.READY, last_seen_at=now, ready_at=now, last_error=""):
        return True
    Engine.objects.filter(pk=engine_id, pid=pid, state=EngineState.READY).update(last_seen_at=now)
    return False


def mark_unhealthy(engine_id: int, pid: int, error: str) -> bool:
    """The process `pid` lives, but does not answer any more."""
    return change(
        Q(pk=engine_id, pid=pid, state=EngineState.READY), EngineState.UNHEALTHY, last_error=error[:MAX_ERROR_CHARS]
    )


def mark_failed(engine_id: int, epoch: int, error: str) -> bool:
    """The engine's process is gone or never came up; the last command is done with."""
    return change(
        Q(pk=engine_id, epoch=epoch, state__in=_MAY_FAIL),
        EngineState.FAILED,
        **NO_PROCESS,
        commanded_at=None,
        restarts=F("restarts") + 1,
        last_error=error[:MAX_ERROR_CHARS],
    )


def hold(engine_id: int, epoch: int, reason: str) -> bool:
    """A start that has to wait, which is no failure: it is tried again once the last command has expired."""
    return change(
        Q(pk=engine_id, epoch=epoch, state=EngineState.STARTING),
        EngineState.FAILED,
        **NO_PROCESS,
        restarts=0,
        last_error=reason[:MAX_ERROR_CHARS],
    )


def mark_stopped(engine_id: int, states: Iterable[str] = (EngineState.STOPPING,)) -> bool:
    """No process of the engine runs any more, and that is no failure."""
    return change(
        Q(pk=engine_id, state__in=list(states)),
        EngineState.STOPPED,
        **NO_PROCESS,
        commanded_at=None,
    )


def change(due: Q, state: EngineState, **values: object) -> bool:
    """Move the engine that `due` names to `state`. `state_since` keeps its value where the state stays."""
    with transaction.atomic():
        engine = Engine.objects.filter(due).values_list("pk", "state").first()
        if engine is None:
            return False
        pk, old_state = engine
        if old_state != state:
            values["state_since"] = Now()
        if (old_state, state) == (EngineState.STARTING, EngineState.READY):
            values["load_s"] = _age_s(pk)
        if not Engine.objects.filter(due, state=old_state).update(state=state, **values):
            return False
        if old_state != state and state in _LOAD_IS_OVER:
            reservation.release_owner(f"load:{pk}")
        publish_on_commit("engine", pk)
    if old_state != state:
        logger.info("engine %d: %s → %s", pk, old_state, state.value)
    return True


def record_progress(engine_id: int, pid: int, progress: float) -> None:
    """The process `pid` has loaded this share of its model."""
    starting = Engine.objects.filter(pk=engine_id, pid=pid, state=EngineState.STARTING)
    if starting.exclude(load_progress__gt=progress - PROGRESS_STEP).update(load_progress=progress):
        publish_on_commit("engine", engine_id)


def reshape(engine_id: int, epoch: int, changes: dict[str, object]) -> EngineTask | None:
    """Give an engine that did not fit the form that does; None when another command came in."""
    if not Engine.objects.filter(pk=engine_id, epoch=epoch).update(**changes):
        return None
    publish_on_commit("engine", engine_id)
    return engine_task(engine_id)


def give_up(engine_id: int, epoch: int, error: str) -> bool:
    """A starting engine cannot fit, whatever is done: it is not tried again."""
    return change(
        Q(pk=engine_id, epoch=epoch, state=EngineState.STARTING),
        EngineState.FAILED,
        **NO_PROCESS,
        commanded_at=None,
        wanted=Wanted.STOPPED,
        stop_reason=StopReason.MISFIT,
        last_error=error[:MAX_ERROR_CHARS],
    )


def _age_s(engine_id: int) -> float | None:
    age = (
        Engine.objects.filter(pk=engine_id).annotate(age=Now() - F("state_since")).values_list("age", flat=True).first()
    )
    return None if age is None else max(age.total_seconds(), 0.0)


_WITH_MODEL = Engine.objects.select_related("host", "variant__model", "gpu").prefetch_related("variant__files")


def engine_task(engine_id: int) -> EngineTask | None:
    """One engine as its head handles it; None when the row is gone."""
    engine = _WITH_MODEL.filter(pk=engine_id).first()
    return None if engine is None else _engine_task(engine, store_rows.endpoint(engine.host.name))


def engine_tasks(host_name: str) -> list[EngineTask]:
    """All engines of a host as its head handles them."""
    engines = _WITH_MODEL.filter(host__name=host_name)
    store = store_rows.endpoint(host_name)
    return [_engine_task(engine, store) for engine in engines]


def _model_path(engine: Engine) -> str:
    """Where the variant's file lies on the engine's host, as far as anybody told."""
    own = (file.path for file in engine.variant.files.all() if file.host_id == engine.host_id)
    return next(own, engine.variant.path)


def _engine_task(engine: Engine, store: store_rows.StoreEndpoint | None) -> EngineTask:
    on_cuda = engine.gpu is not None and engine.gpu.kind == "cuda"
    model = engine.variant.model
    defaults = GenerationDefaults.from_dict(model.generation_defaults)
    parts: dict[str, object] = {f"default_{key}": value for key, value in asdict(defaults).items()}
    if store is not None:
        parts |= {"store_host": store.address, "store_port": store.port, "store_secret": store.secret}
    whole_rows = engine.whole_vocabulary_slots
    further = engine.further
    if on_cuda:
        form = residents.engine_form(engine)
        parts |= {"batch_tokens": CARD_BATCH_TOKENS, "micro_batch_tokens": form.micro_batch_tokens}
    parts |= further.values
    config = EngineConfig(
        model_path=_model_path(engine),
        model_name=model.name,
        host=engine.host.address,
        slots=engine.slots,
        context_tokens=engine.context_tokens,
        threads=engine.threads,
        # Its process sees no other card (launch.card_environment), so none has to be named.
        gpu_layers=(ALL_GPU_LAYERS if engine.gpu_layers is None else engine.gpu_layers) if on_cuda else 0,
        cpu_moe_layers=engine.cpu_moe_layers if on_cuda else 0,
        kv_type_k=engine.kv_type_k or model.kv_type_k,
        kv_type_v=engine.kv_type_v or model.kv_type_v,
        checkpoints=-1 if engine.checkpoints is None else engine.checkpoints,
        whole_vocabulary_slots=variant_facts(engine.variant).whole_row_slots if whole_rows is None else whole_rows,
        card_arch=engine.gpu.arch if on_cuda and engine.gpu is not None else "",
        chat_template=model.chat_template,
        pooling=model.pooling,
        speculation=model.speculation,
        draft_tokens=model.draft_tokens,
        projector_path="" if model.pooling else model.projector_path,
        kv_family=model.kv_family if model.shares_kv_family else "",
        max_body_bytes=settings.HYDRA_MAX_BODY_BYTES,
        engine_id=engine.pk,
        **parts,
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
        card_uuid=engine.gpu.uuid if on_cuda and engine.gpu is not None else "",
        on_demand=engine.on_demand,
        last_error=engine.last_error,
        refusal=further.refusal,
        ready_at=engine.ready_at,
        chose_micro_batch=on_cuda and not model.pooling and "micro_batch_tokens" not in further.values,
    )
