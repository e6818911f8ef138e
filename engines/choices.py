"""The states of an engine, with named groups where code asks about a set."""

from django.db import models


class Wanted(models.TextChoices):
    """What a person (or the default set-up) asked for; reconcile works towards it."""

    RUNNING = "running", "running"
    STOPPED = "stopped", "stopped"


class EngineState(models.TextChoices):
    """What is: stopped → starting → ready ⇄ unhealthy → (draining →) stopping → stopped, failed from anywhere but stopped."""

    STOPPED = "stopped", "stopped"
    STARTING = "starting", "starting"
    READY = "ready", "ready"
    UNHEALTHY = "unhealthy", "unhealthy"
    DRAINING = "draining", "finishes what it has"
    STOPPING = "stopping", "stopping"
    FAILED = "failed", "failed"


class StopReason(models.TextChoices):
    """Why an engine is wanted stopped; what a person stopped is not started on demand."""

    NONE = "", "none"
    PERSON = "person", "a person stopped it"
    IDLE = "idle", "nobody asked for it"
    SWAP = "swap", "it made way for another model"
    MISFIT = "misfit", "its model does not fit"


class StoreState(models.TextChoices):
    """What a host's store is: off (the host has none), starting → ready ⇄ unhealthy, failed until its next start."""

    OFF = "off", "off"
    STARTING = "starting", "starting"
    READY = "ready", "ready"
    UNHEALTHY = "unhealthy", "unhealthy"
    FAILED = "failed", "failed"


# A process of the store may exist.
STORE_LIVE = frozenset({StoreState.STARTING, StoreState.READY, StoreState.UNHEALTHY})

# A process of it may exist.
LIVE = frozenset(
    {EngineState.STARTING, EngineState.READY, EngineState.UNHEALTHY, EngineState.DRAINING, EngineState.STOPPING}
)
# Requests may be sent to it.
SERVING = frozenset({EngineState.READY})
# Its conversations may leave for another engine.
HANDING_OVER = frozenset({EngineState.READY, EngineState.DRAINING})
# Its process may hold conversations, also where it does not answer just now.
MAY_HOLD = HANDING_OVER | {EngineState.UNHEALTHY}
# No process of it is meant to exist; a start may be claimed from here.
TERMINAL = frozenset({EngineState.STOPPED, EngineState.FAILED})
