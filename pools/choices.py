"""The states and kinds of hardware, with named groups where code asks about a set."""

from django.db import models


class HostState(models.TextChoices):
    UP = "up", "up"
    LOST = "lost", "lost"


class GpuKind(models.TextChoices):
    CPU = "cpu", "CPU"
    CUDA = "cuda", "CUDA"
