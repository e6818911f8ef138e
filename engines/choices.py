"""The states of an engine, with named groups where code asks about a set."""

from django.db import models


class Wanted(models.TextChoices):
    """What a person (or the default set-up) asked for; reconcile works towards it."""

    RUNNING = "running", "running"
    STOPPED = "stopped", "stopped"


class EngineState(models.TextChoices):
    """What is: stopped → starting → ready ⇄ unhealthy → stopping → stopped, and failed from anywhere but stopped."""

    STOPPED = "stopped", "stopped"
    STARTING = "starting", "starting"
    READY = "ready", "ready"
    UNHEALTHY = "unhealthy", "unhealthy"
    STOPPING = "stopping", "stopping"
    FAILED = "failed", "failed"


# A process of it may exist.
LIVE = frozenset({EngineState.STARTING, EngineState.READY, EngineState.UNHEALTHY, EngineState.STOPPING})
# Requests may be sent to it.
SERVING = frozenset({EngineState.READY})
# No process of it is meant to exist; a start may be claimed from here.
TERMINAL = frozenset({EngineState.STOPPED, EngineState.FAILED})
