"""States and sources of conversations, with named groups where code asks about a set."""

from django.db import models


class ChatSource(models.TextChoices):
    API = "api", "API"
    PLAYGROUND = "playground", "playground"


class TurnState(models.TextChoices):
    RUNNING = "running", "running"
    DONE = "done", "done"
    FAILED = "failed", "failed"
    CANCELLED = "cancelled", "cancelled"


class DrainKind(models.TextChoices):
    """What gets empty."""

    ENGINE = "engine", "engine"
    CARD = "card", "card"
    HOST = "host", "host"


class DrainState(models.TextChoices):
    """running → done (nothing is left there), partial (some conversations stay) or ended (a person had it serve again, or it
    left the pool)."""

    RUNNING = "running", "goes on"
    DONE = "done", "empty"
    PARTIAL = "partial", "some stay"
    ENDED = "ended", "ended early"


class HandoffCause(models.TextChoices):
    """Why a conversation moves."""

    ASKED = "asked", "asked for"
    DRAIN = "drain", "its engine gets empty"
    SPLIT = "split", "one computes, another writes"


class HandoffState(models.TextChoices):
    PLANNED = "planned", "planned"
    RUNNING = "running", "running"
    COMMITTED = "committed", "committed"
    FAILED = "failed", "failed"


OPEN_MOVES = (HandoffState.PLANNED, HandoffState.RUNNING)
