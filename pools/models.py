"""Rows of hosts, their devices, and the models they could run. Only `pools.services` writes them."""

from typing import Any

from django.core.exceptions import ValidationError
from django.db import models

from pools.chat_template import MAX_TEMPLATE_CHARS, TemplateUnreadable, template_abilities
from pools.choices import GpuKind, HostState, Pooling, Speculation
from pools.generation_defaults import GenerationDefaults


class Host(models.Model):
    """A machine of the pool, as its head last described it. `agent_epoch` grows each time the host (re)joins."""

    name = models.SlugField(max_length=63, unique=True)
    state = models.CharField(max_length=8, choices=HostState.choices, default=HostState.UP)
    cpu_model = models.CharField(max_length=200, blank=True)
    cpu_count = models.PositiveIntegerField(default=0)
    memory_total_bytes = models.BigIntegerField(default=0)
    memory_available_bytes = models.BigIntegerField(default=0)
    load_1m = models.FloatField(default=0.0)
    agent_epoch = models.PositiveIntegerField(default=0)
    last_seen_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name


class Gpu(models.Model):
    """A device of a host that an engine can be placed on. The host's CPU is one, with the host's memory as its own."""

    host = models.ForeignKey(Host, on_delete=models.CASCADE, related_name="gpus")
    kind = models.CharField(max_length=8, choices=GpuKind.choices)
    index = models.PositiveSmallIntegerField(default=0)
    uuid = models.CharField(max_length=80)
    name = models.CharField(max_length=200)
    arch = models.CharField(max_length=32, help_text="What code must be built for: sm_90, x86-64.")
    memory_total_bytes = models.BigIntegerField(default=0)
    memory_used_bytes = models.BigIntegerField(default=0)
    temperature_c = models.FloatField(null=True, blank=True)
    utilization_percent = models.FloatField(null=True, blank=True)
    power_w = models.FloatField(null=True, blank=True)
    last_seen_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["host", "kind", "index"]
        verbose_name = "GPU"
        constraints = [models.UniqueConstraint(fields=["host", "uuid"], name="one_gpu_per_host_and_uuid")]

    def __str__(self) -> str:
        return f"{self.host.name}/{self.kind}{self.index}"


def check_generation_defaults(value: Any) -> None:
    """A validator of Model.generation_defaults."""
    if not isinstance(value, dict):
        raise ValidationError("This must be a JSON object.")
    try:
        GenerationDefaults.from_dict(value)
    except ValueError as error:
        raise ValidationError(str(error)) from error


def check_chat_template(value: str) -> None:
    """A validator of Model.chat_template."""
    try:
        template_abilities(value)
    except TemplateUnreadable as error:
        raise ValidationError(str(error)) from error


class Model(models.Model):
    """A name that users ask for. At most one is the default, which serves requests that name none."""

    name = models.CharField(max_length=128, unique=True)
    display_name = models.CharField(max_length=200, blank=True)
    is_default = models.BooleanField(default=False)
    context_tokens = models.PositiveIntegerField(default=0, help_text="Longest context any variant was trained for.")
    generation_defaults = models.JSONField(
        default=dict,
        blank=True,
        validators=[check_generation_defaults],
        help_text="What requests that do not say get: max_tokens, temperature, top_p, top_k, min_p. Read at an engine's start.",
    )
    chat_template = models.TextField(
        blank=True,
        max_length=MAX_TEMPLATE_CHARS,
        validators=[check_chat_template],
        help_text="A Jinja template instead of the model file's own. Read at an engine's start.",
    )
    pooling = models.CharField(
        max_length=8,
        blank=True,
        default=Pooling.NONE,
        choices=Pooling.choices,
        help_text="What its engines do: generate text, or embed or score what they are given. Read at an engine's start.",
    )
    projector_path = models.CharField(
        max_length=4096,
        blank=True,
        help_text="The projector (mmproj GGUF) for images: a path on its engines' host. Read at an engine's start.",
    )
    speculation = models.CharField(
        max_length=8,
        default=Speculation.NONE,
        choices=Speculation.choices,
        help_text="Who drafts tokens for its engines. On a hybrid model drafts take memory. Read at an engine's start.",
    )
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["name"]
        constraints = [
            models.UniqueConstraint(
                fields=["is_default"], condition=models.Q(is_default=True), name="at_most_one_default_model"
            )
        ]

    def __str__(self) -> str:
        return self.name


class Variant(models.Model):
    """One GGUF file of a model. `content_digest` names its bytes, `header` holds what the file says of itself."""

    model = models.ForeignKey(Model, on_delete=models.CASCADE, related_name="variants")
    path = models.CharField(max_length=4096)
    filename = models.CharField(max_length=255)
    size_bytes = models.BigIntegerField()
    content_digest = models.CharField(max_length=80, help_text="SHA-256 of the file, in hexadecimal digits.")
    architecture = models.CharField(max_length=64)
    quantization = models.CharField(max_length=32)
    parameter_count = models.BigIntegerField(default=0)
    context_train_tokens = models.PositiveIntegerField(default=0)
    header = models.JSONField(default=dict)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["model", "quantization"]
        constraints = [models.UniqueConstraint(fields=["model", "content_digest"], name="one_variant_per_content")]

    def __str__(self) -> str:
        return f"{self.model.name} {self.quantization}"
