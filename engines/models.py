"""Rows of engines and of hosts' stores: what is wanted, what is, and which process it is.

Only `engines.services`, `engines.engine_rows`, `engines.emptying` and `engines.store_rows` write them.
"""

from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models
from django.utils import timezone

from engines import further_settings
from engines.addresses import http_url
from engines.choices import EngineState, StopReason, StoreState, Wanted
from engines.config import ConfigInvalid
from engines.further_settings import Further


class Engine(models.Model):
    """One process that serves one variant on one device.

    `epoch` grows with every command; a task that carries an older one does nothing. `pid`, `pid_start_time` (seconds since
    boot), `http_port` and `rpc_port` name the process of the states LIVE; whoever has `rpc_secret` may use its binary
    protocol. `restarts` counts failures since the engine last ran steadily or a person started it. One that was asked for on
    demand and `waits_for` others starts when they are gone; `load_progress` is the loaded share while it is `starting`.
    One that does not `takes_new` requests is being emptied, or was; until `held_until` nobody stops it for being idle.
    """

    name = models.SlugField(max_length=63, unique=True)
    host = models.ForeignKey("pools.Host", on_delete=models.CASCADE, related_name="engines")
    gpu = models.ForeignKey("pools.Gpu", on_delete=models.SET_NULL, null=True, blank=True, related_name="engines")
    variant = models.ForeignKey("pools.Variant", on_delete=models.CASCADE, related_name="engines")
    wanted = models.CharField(max_length=8, choices=Wanted.choices, default=Wanted.STOPPED)
    slots = models.PositiveSmallIntegerField(default=4, validators=[MinValueValidator(1), MaxValueValidator(64)])
    context_tokens = models.PositiveIntegerField(default=4096, validators=[MinValueValidator(16)])
    threads = models.PositiveSmallIntegerField(default=0, help_text="0 = all cores but one.")
    gpu_layers = models.IntegerField(
        null=True, blank=True, help_text="Layers on the card, -1 for all; empty: all on a card, none on a CPU."
    )
    cpu_moe_layers = models.PositiveSmallIntegerField(
        default=0, help_text="So many layers from the first keep their experts in the host's memory."
    )
    kv_type_k = models.CharField(max_length=8, blank=True, help_text="Of the K cache; empty: the model's.")
    kv_type_v = models.CharField(max_length=8, blank=True, help_text="Of the V cache; empty: the model's.")
    checkpoints = models.PositiveSmallIntegerField(
        null=True,
        blank=True,
        validators=[MaxValueValidator(128)],
        help_text="Kept states of models that cannot drop a suffix; empty: one for each slot, and two.",
    )
    whole_vocabulary_slots = models.PositiveSmallIntegerField(
        null=True,
        blank=True,
        validators=[MaxValueValidator(64)],
        help_text="On a card: so many slots at once for requests that need whole rows of logits (log probabilities, top_k 0); "
        "empty: all, or a quarter where each takes a recurrent state.",
    )
    further_settings = models.JSONField(
        default=dict,
        blank=True,
        help_text='Other keys of its configuration (docs/engine.md), like {"micro_batch_tokens": 1024}. '
        "Of tensor_overrides and tensor_split the memory below knows nothing.",
    )
    placed_micro_batch_tokens = models.PositiveIntegerField(
        null=True,
        blank=True,
        editable=False,
        help_text="Tokens computed at once on a card, as many as there was room for; empty: as many as suit its card.",
    )
    state = models.CharField(max_length=10, choices=EngineState.choices, default=EngineState.STOPPED)
    on_demand = models.BooleanField(default=False, help_text="A request had it made; nobody set it up.")
    stop_reason = models.CharField(max_length=8, choices=StopReason.choices, default=StopReason.NONE, blank=True)
    waits_for = models.JSONField(
        default=list, blank=True, help_text="Engines that must be gone before it starts, by their ids."
    )
    load_progress = models.FloatField(null=True, blank=True)
    load_s = models.FloatField(null=True, blank=True, help_text="How long its last start took.")
    last_used_at = models.DateTimeField(null=True, blank=True)
    takes_new = models.BooleanField(default=True, db_default=True, editable=False)
    held_until = models.DateTimeField(null=True, blank=True, editable=False)
    epoch = models.PositiveIntegerField(default=0)
    pid = models.PositiveIntegerField(null=True, blank=True)
    pid_start_time = models.FloatField(null=True, blank=True)
    http_port = models.PositiveIntegerField(null=True, blank=True)
    rpc_port = models.PositiveIntegerField(null=True, blank=True)
    rpc_secret = models.CharField(max_length=64, blank=True)
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

    def clean(self) -> None:
        if self.further_settings is None:
            self.further_settings = {}
        try:
            further_settings.checked(self.further_settings, **self._row_settings)
        except ConfigInvalid as error:
            raise ValidationError({"further_settings": f"{str(error)[:1].upper()}{str(error)[1:]}."}) from error

    @property
    def further(self) -> Further:
        """The further settings as its configuration takes them."""
        return further_settings.usable(self.further_settings, **self._row_settings)

    @property
    def _row_settings(self) -> dict[str, int]:
        return {"slots": self.slots, "context_tokens": self.context_tokens}

    @property
    def base_url(self) -> str | None:
        """Where its process listens; None while there is none."""
        return None if self.http_port is None else http_url(self.host.address, self.http_port)


class Store(models.Model):
    """The store of one host, which its head starts and watches; it is wanted unless the host's settings give it no room.

    `pid` and `pid_start_time` (seconds since boot) name the process of the states STORE_LIVE. `port` stays the same over
    restarts, since engines are told it when they start; whoever has `secret` may use the store. `restarts` counts failures
    since it last ran steadily. The figures are those of `last_seen_at`; the counters among them begin with its process.
    """

    host = models.OneToOneField("pools.Host", on_delete=models.CASCADE, related_name="store")
    state = models.CharField(max_length=10, choices=StoreState.choices, default=StoreState.OFF)
    instance = models.CharField(max_length=64, blank=True)
    address = models.CharField(max_length=64, blank=True)
    port = models.PositiveIntegerField(null=True, blank=True)
    http_port = models.PositiveIntegerField(null=True, blank=True)
    secret = models.CharField(max_length=64, blank=True)
    pid = models.PositiveIntegerField(null=True, blank=True)
    pid_start_time = models.FloatField(null=True, blank=True)
    version = models.CharField(max_length=32, blank=True)
    capacity_bytes = models.BigIntegerField(default=0)
    used_bytes = models.BigIntegerField(default=0, help_text="Memory that it has taken on tmpfs.")
    stored_bytes = models.BigIntegerField(default=0, help_text="Objects, each once.")
    logical_bytes = models.BigIntegerField(default=0, help_text="What snapshots name, as often as they do.")
    objects_stored = models.BigIntegerField(default=0)
    snapshots_stored = models.BigIntegerField(default=0)
    sessions_stored = models.BigIntegerField(default=0)
    hits = models.BigIntegerField(default=0)
    misses = models.BigIntegerField(default=0)
    evictions = models.BigIntegerField(default=0)
    errors = models.BigIntegerField(default=0, help_text="Damaged objects, refused writes, failed copies to disk.")
    restarts = models.PositiveIntegerField(default=0)
    last_error = models.TextField(blank=True)
    state_since = models.DateTimeField(default=timezone.now)
    last_seen_at = models.DateTimeField(null=True, blank=True)
    swept_at = models.DateTimeField(null=True, blank=True, help_text="When its snapshots were last listed whole.")

    class Meta:
        ordering = ["host"]

    def __str__(self) -> str:
        return f"store of {self.host.name}"

    @property
    def dedup_ratio(self) -> float | None:
        """Bytes that snapshots name for each byte stored; None while nothing is."""
        return round(self.logical_bytes / self.stored_bytes, 2) if self.stored_bytes else None


class StoreSample(models.Model):
    """What a store held and did in one minute. `slot` is the minute within a ring of `store_rows.RING_MINUTES`, so that a
    store has never more rows than that. `hits` to `errors` count since the process that began at `process_start_time`.
    """

    store = models.ForeignKey(Store, on_delete=models.CASCADE, related_name="samples")
    slot = models.PositiveSmallIntegerField()
    taken_at = models.DateTimeField()
    process_start_time = models.FloatField()
    used_bytes = models.BigIntegerField()
    stored_bytes = models.BigIntegerField()
    logical_bytes = models.BigIntegerField()
    snapshots_stored = models.BigIntegerField()
    hits = models.BigIntegerField()
    misses = models.BigIntegerField()
    evictions = models.BigIntegerField()
    errors = models.BigIntegerField()

    class Meta:
        ordering = ["store", "-taken_at"]
        constraints = [models.UniqueConstraint(fields=["store", "slot"], name="one_sample_per_store_and_slot")]

    def __str__(self) -> str:
        return f"{self.store_id} {self.taken_at:%Y-%m-%d %H:%M}"
