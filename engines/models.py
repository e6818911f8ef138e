"""Rows of engines: what is wanted, what is, and which process it is. Only `engines.services` writes them."""

from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models
from django.utils import timezone

from engines.choices import EngineState, Wanted


class Engine(models.Model):
    """One process that serves one variant on one device.

    `epoch` grows with every command; a task that carries an older one does nothing. `pid`, `pid_start_time` (seconds since
    boot) and `http_port` name the process of the states LIVE. `restarts` counts failures since the engine last ran
    steadily or a person started it.
    """

    name = models.SlugField(max_length=63, unique=True)
    host = models.ForeignKey("pools.Host", on_delete=models.CASCADE, related_name="engines")
    gpu = models.ForeignKey("pools.Gpu", on_delete=models.SET_NULL, null=True, blank=True, related_name="engines")
    variant = models.ForeignKey("pools.Variant", on_delete=models.CASCADE, related_name="engines")
    wanted = models.CharField(max_length=8, choices=Wanted.choices, default=Wanted.STOPPED)
    slots = models.PositiveSmallIntegerField(default=4, validators=[MinValueValidator(1), MaxValueValidator(64)])
    context_tokens = models.PositiveIntegerField(default=4096, validators=[MinValueValidator(16)])
    threads = models.PositiveSmallIntegerField(default=0, help_text="0 = all cores but one.")
    state = models.CharField(max_length=10, choices=EngineState.choices, default=EngineState.STOPPED)
    epoch = models.PositiveIntegerField(default=0)
    pid = models.PositiveIntegerField(null=True, blank=True)
    pid_start_time = models.FloatField(null=True, blank=True)
    http_port = models.PositiveIntegerField(null=True, blank=True)
    restarts = models.PositiveIntegerField(default=0)
    last_error = models.TextField(blank=True)
    commanded_at = models.DateTimeField(null=True, blank=True)
    state_since = models.DateTimeField(default=timezone.now)
    last_seen_at = models.DateTimeField(null=True, blank=True)
    ready_at = models.DateTimeField(null=True, blank=True)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name

    @property
    def base_url(self) -> str | None:
        """Where its process listens; None while there is none."""
        return None if self.http_port is None else f"http://127.0.0.1:{self.http_port}"
