"""Rows of hosts, their devices, and the models they could run. Only `pools.services` writes them."""

from typing import Any

from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator, MinValueValidator, RegexValidator
from django.db import models
from django.db.models.functions import Now

from pools.chat_template import MAX_TEMPLATE_CHARS, TemplateUnreadable, template_abilities
from pools.choices import (
    OPEN_JOBS,
    GpuKind,
    HostDuty,
    HostState,
    JobKind,
    JobState,
    KvType,
    Pooling,
    RunMode,
    Speculation,
)
from pools.generation_defaults import GenerationDefaults
from pools.model_reference import without_query

# As EngineConfig takes them.
MAX_DRAFT_TOKENS = 16


class Host(models.Model):
    """A machine of the pool, as its head last described it. `agent_epoch` grows each time the host (re)joins.

    `state` says whether it is heard of, `duty` what is wanted of it. `address` is where its engines and its store listen.
    `version` and `schema` are its release (`pools.release`). `clock_offset_s` is its clock less the database's.
    `problem` and `problem_hint` say what is wrong with its devices as a whole.
    """

    name = models.SlugField(max_length=63, unique=True)
    state = models.CharField(max_length=8, choices=HostState.choices, default=HostState.UP)
    duty = models.CharField(max_length=8, choices=HostDuty.choices, default=HostDuty.ACTIVE)
    duty_since = models.DateTimeField(null=True, blank=True)
    address = models.CharField(max_length=64, default="127.0.0.1")
    version = models.CharField(max_length=64, blank=True)
    schema = models.CharField(max_length=16, blank=True)
    clock_offset_s = models.FloatField(null=True, blank=True)
    driver_version = models.CharField(max_length=32, blank=True)
    cuda_version = models.CharField(max_length=16, blank=True, help_text="The newest CUDA that the driver can run.")
    problem = models.CharField(max_length=300, blank=True)
    problem_hint = models.CharField(max_length=300, blank=True)
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
    """A device of a host that an engine can be placed on. The host's CPU is one, with the host's memory as its own.

    What a device does not tell is null. While `problem` says that it cannot be read, its numbers are those of `last_seen_at`.
    `processes` are those that hold its memory: a list of {"pid", "name", "memory_bytes"}.
    """

    host = models.ForeignKey(Host, on_delete=models.CASCADE, related_name="gpus")
    kind = models.CharField(max_length=8, choices=GpuKind.choices)
    index = models.PositiveSmallIntegerField(default=0)
    uuid = models.CharField(max_length=80)
    name = models.CharField(max_length=200)
    arch = models.CharField(max_length=32, help_text="What code must be built for: sm_90, x86-64.")
    memory_total_bytes = models.BigIntegerField(default=0)
    memory_used_bytes = models.BigIntegerField(null=True, blank=True)
    temperature_c = models.FloatField(null=True, blank=True)
    utilization_percent = models.FloatField(null=True, blank=True)
    power_w = models.FloatField(null=True, blank=True)
    power_limit_w = models.FloatField(null=True, blank=True)
    clock_mhz = models.PositiveIntegerField(null=True, blank=True)
    clock_max_mhz = models.PositiveIntegerField(null=True, blank=True)
    pcie_generation = models.PositiveSmallIntegerField(null=True, blank=True)
    pcie_generation_max = models.PositiveSmallIntegerField(null=True, blank=True)
    pcie_width = models.PositiveSmallIntegerField(null=True, blank=True)
    pcie_width_max = models.PositiveSmallIntegerField(null=True, blank=True)
    processes = models.JSONField(default=list, blank=True)
    memory_limit_bytes = models.BigIntegerField(
        default=0,
        validators=[MinValueValidator(0)],
        help_text="What engines may take of it together, for those started on demand; 0: all that is free.",
    )
    problem = models.CharField(max_length=300, blank=True)
    problem_hint = models.CharField(max_length=300, blank=True)
    last_seen_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["host", "kind", "index"]
        verbose_name = "GPU"
        constraints = [models.UniqueConstraint(fields=["host", "uuid"], name="one_gpu_per_host_and_uuid")]

    def __str__(self) -> str:
        return f"{self.host.name}/{self.kind}{self.index}"


class GpuMinute(models.Model):
    """What a device did in one minute, out of its samples of every second; kept for `host_services.KEPT_MINUTES`."""

    gpu = models.ForeignKey(Gpu, on_delete=models.CASCADE, related_name="minutes")
    began_at = models.DateTimeField()
    samples = models.PositiveSmallIntegerField()
    utilization_mean_percent = models.FloatField(null=True)
    utilization_max_percent = models.FloatField(null=True)
    memory_used_max_bytes = models.BigIntegerField(null=True)
    temperature_max_c = models.FloatField(null=True)
    power_mean_w = models.FloatField(null=True)
    power_max_w = models.FloatField(null=True)

    class Meta:
        ordering = ["gpu", "-began_at"]
        constraints = [models.UniqueConstraint(fields=["gpu", "began_at"], name="one_row_per_gpu_and_minute")]
        indexes = [models.Index(fields=["began_at"], name="gpu_minutes_by_time")]

    def __str__(self) -> str:
        return f"{self.gpu_id} {self.began_at:%Y-%m-%d %H:%M}"


class JoinToken(models.Model):
    """Lets one machine join the pool once. Only its SHA-256 digest is kept; `prefix` is what it is told apart by."""

    digest = models.CharField(max_length=64, unique=True)
    prefix = models.CharField(max_length=16)
    note = models.CharField(max_length=100, blank=True, help_text="What it is for.")
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField()
    used_at = models.DateTimeField(null=True, blank=True)
    used_by = models.ForeignKey(Host, on_delete=models.SET_NULL, null=True, blank=True, related_name="join_tokens")

    class Meta:
        ordering = ["-created_at"]

    def __str__(self) -> str:
        return f"{self.prefix}…"


class HostAccess(models.Model):
    """The database role and the broker's user that were made for a joined host, without their passwords.

    The broker forgets its users when it restarts without an ACL file; the digest is what makes them again.
    """

    host = models.OneToOneField(Host, on_delete=models.CASCADE, related_name="access")
    database_role = models.CharField(max_length=63)
    broker_user = models.CharField(max_length=63)
    broker_password_digest = models.CharField(max_length=64)
    granted_at = models.DateTimeField()

    class Meta:
        verbose_name_plural = "host accesses"

    def __str__(self) -> str:
        return self.database_role


class Reservation(models.Model):
    """Something exclusive, and who has it until when. Each owner gets a row of its own, so the key grows and fences old ones.

    `pools.reservation` reads and writes it; times are those of the database's clock.
    """

    resource = models.CharField(max_length=128, unique=True)
    owner = models.CharField(max_length=128, db_index=True)
    purpose = models.CharField(max_length=200, blank=True)
    reserved_at = models.DateTimeField()
    expires_at = models.DateTimeField(db_index=True)

    class Meta:
        ordering = ["resource"]

    def __str__(self) -> str:
        return f"{self.resource} by {self.owner}"


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
    draft_tokens = models.PositiveSmallIntegerField(
        default=2,
        db_default=2,
        validators=[MinValueValidator(1), MaxValueValidator(MAX_DRAFT_TOKENS)],
        verbose_name="longest draft",
        help_text="Tokens that may be drafted for one step; how many are is measured. On a hybrid model each takes memory.",
    )
    kv_family = models.CharField(
        max_length=64,
        blank=True,
        validators=[RegexValidator(r"^[\w.-]*$", "Letters, digits, '.', '_' and '-' only.")],
        help_text="A name for quants of this model that are near enough to read each other's KV. Declared by the catalogue.",
    )
    shares_kv_family = models.BooleanField(
        default=False,
        verbose_name="share KV within the family",
        help_text="Let engines of different quants of it take over each other's KV, at some loss. Read at an engine's start.",
    )
    most_kv_loss = models.FloatField(
        default=0.1,
        validators=[MinValueValidator(0.0), MaxValueValidator(20.0)],
        verbose_name="most loss within the family",
        help_text="KL divergence in nats, as measured for each pair of quants; a request is never split over a pair above it.",
    )
    run_mode = models.CharField(
        max_length=12,
        default=RunMode.AUTO,
        choices=RunMode.choices,
        help_text="Whether one engine may compute a long prompt for another, which then writes the answer.",
    )
    load_on_demand = models.BooleanField(
        default=True, help_text="A request that finds no engine of it has one started where it fits."
    )
    pinned = models.BooleanField(
        default=False, help_text="Its engines stay loaded: they make way for no other model, however idle."
    )
    idle_unload_s = models.PositiveIntegerField(
        default=0, help_text="Seconds without a request after which its engines are unloaded; 0: never."
    )
    load_slots = models.PositiveSmallIntegerField(
        default=0,
        validators=[MaxValueValidator(64)],
        help_text="Slots of an engine that is started on demand; 0: the usual number, fewer if only they fit.",
    )
    load_context_tokens = models.PositiveIntegerField(
        default=0, help_text="Tokens of one request there; 0: as usual, fewer if only they fit."
    )
    kv_type_k = models.CharField(max_length=8, default=KvType.F16, choices=KvType.choices, verbose_name="K cache")
    kv_type_v = models.CharField(max_length=8, default=KvType.F16, choices=KvType.choices, verbose_name="V cache")
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
    source = models.CharField(
        max_length=2048,
        blank=True,
        help_text="Where it was fetched from: hf:owner/repository/file.gguf@commit, or a URL.",
    )
    is_verified = models.BooleanField(
        default=False, help_text="Its SHA-256 is the one that its source or the catalogue told beforehand."
    )
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["model", "quantization"]
        constraints = [models.UniqueConstraint(fields=["model", "content_digest"], name="one_variant_per_content")]

    def __str__(self) -> str:
        return f"{self.model.name} {self.quantization}"


class VariantFile(models.Model):
    """Where a variant's file lies on one host; a variant's own `path` is that of the host that had it first."""

    variant = models.ForeignKey(Variant, on_delete=models.CASCADE, related_name="files")
    host = models.ForeignKey(Host, on_delete=models.CASCADE, related_name="variant_files")
    path = models.CharField(max_length=4096)
    checked_at = models.DateTimeField(help_text="When its SHA-256 was last known to be the variant's.")

    class Meta:
        ordering = ["variant", "host"]
        constraints = [models.UniqueConstraint(fields=["variant", "host"], name="one_file_per_variant_and_host")]

    def __str__(self) -> str:
        return f"{self.variant_id} on {self.host_id}"


class Job(models.Model):
    """Work that takes long, on one host's slow queue: a native build, or a download. `pools.jobs` writes it.

    `subject` says what: architectures ("sm_86 sm_120"), or a reference ("hf:owner/repository/file.gguf"). `name` is the model's
    that a download is for ("": the file's own). `done` of `total` counts steps of a build, bytes of a download; `seen_at` is when
    its process last told. Times are those of the database's clock.
    """

    host = models.ForeignKey(Host, on_delete=models.CASCADE, related_name="jobs")
    kind = models.CharField(max_length=8, choices=JobKind.choices)
    subject = models.CharField(max_length=600)
    name = models.CharField(max_length=128, blank=True)
    state = models.CharField(max_length=9, choices=JobState.choices, default=JobState.QUEUED)
    stage = models.CharField(max_length=40, blank=True)
    done = models.BigIntegerField(default=0)
    total = models.BigIntegerField(default=0)
    attempts = models.PositiveSmallIntegerField(default=0)
    message = models.TextField(blank=True)
    hint = models.CharField(max_length=500, blank=True)
    result = models.JSONField(default=dict, blank=True)
    created_at = models.DateTimeField(db_default=Now())
    sent_at = models.DateTimeField(null=True, blank=True)
    started_at = models.DateTimeField(null=True, blank=True)
    seen_at = models.DateTimeField(null=True, blank=True)
    ended_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["-pk"]
        constraints = [
            models.UniqueConstraint(
                fields=["host", "kind", "subject"],
                condition=models.Q(state__in=OPEN_JOBS),
                name="one_open_job_per_host_and_subject",
            )
        ]

    def __str__(self) -> str:
        return f"{self.get_kind_display()} {without_query(self.subject)}"
