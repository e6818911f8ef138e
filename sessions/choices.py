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


class HandoffState(models.TextChoices):
    PLANNED = "planned", "planned"
    RUNNING = "running", "running"
    COMMITTED = "committed", "committed"
    FAILED = "failed", "failed"
