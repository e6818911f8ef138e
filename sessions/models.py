"""Rows of conversations, their turns and API keys. Only `sessions.services` writes them. No message is ever stored."""

from django.conf import settings
from django.db import models
from django.db.models.functions import Now
from django.utils import timezone

from sessions.choices import ChatSource, DrainKind, DrainState, HandoffCause, HandoffState, TurnState


class ApiKey(models.Model):
    """What lets a program in. The key itself is shown once; the row keeps its SHA-256 and the first characters.

    A plain hash is right here: a key is 256 random bits, which nobody can guess from it.
    """

    name = models.CharField(max_length=100)
    prefix = models.CharField(max_length=16, db_index=True)
    key_hash = models.CharField(max_length=64, unique=True)
    created_by = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.SET_NULL, null=True, blank=True)
    created_at = models.DateTimeField(auto_now_add=True)
    last_used_at = models.DateTimeField(null=True, blank=True)
    expires_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["-created_at"]
        verbose_name = "API key"
        verbose_name_plural = "API keys"

    def __str__(self) -> str:
        return f"{self.name} ({self.prefix}…)"

    @property
    def is_valid(self) -> bool:
        """Whether the key opens the API now: neither revoked nor expired."""
        return self.revoked_at is None and (self.expires_at is None or self.expires_at > timezone.now())


class ChatSession(models.Model):
    """A conversation, recognised by `key_hash`, which already holds its owner: nobody can name another's.

    `scope` names the owner again, for lists; it stays when a key is deleted. `engine` answered last. A session that was moved by
    hand goes to `wanted_engine` for its next turn.
    """

    key_hash = models.CharField(max_length=64, unique=True)
    scope = models.CharField(max_length=40, blank=True, db_index=True)
    api_key = models.ForeignKey(ApiKey, on_delete=models.SET_NULL, null=True, blank=True, related_name="chats")
    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.SET_NULL, null=True, blank=True)
    title = models.CharField(max_length=120, blank=True)
    source = models.CharField(max_length=12, choices=ChatSource.choices, default=ChatSource.API)
    model_name = models.CharField(max_length=128)
    engine = models.ForeignKey("engines.Engine", on_delete=models.SET_NULL, null=True, blank=True, related_name="chats")
    wanted_engine = models.ForeignKey(
        "engines.Engine", on_delete=models.SET_NULL, null=True, blank=True, related_name="+"
    )
    turn_count = models.PositiveIntegerField(default=0)
    prompt_tokens = models.BigIntegerField(default=0)
    completion_tokens = models.BigIntegerField(default=0)
    created_at = models.DateTimeField(auto_now_add=True)
    last_active_at = models.DateTimeField(default=timezone.now, db_index=True)

    class Meta:
        ordering = ["-last_active_at"]
        verbose_name = "session"

    def __str__(self) -> str:
        return self.title or f"session {self.pk}"


class Turn(models.Model):
    """One request of a conversation. Times in seconds since it arrived; tokens as the engine counted them.

    `explanation` holds what the router weighed (`pools.router_plan.Explanation.to_dict`), `predicted_first_token_s` what it
    expected; `route` the form that it chose.
    """

    chat = models.ForeignKey(ChatSession, on_delete=models.CASCADE, related_name="turns")
    request_id = models.UUIDField(unique=True)
    model_name = models.CharField(max_length=128)
    engine = models.ForeignKey("engines.Engine", on_delete=models.SET_NULL, null=True, blank=True, related_name="turns")
    state = models.CharField(max_length=10, choices=TurnState.choices, default=TurnState.RUNNING)
    finish_reason = models.CharField(max_length=32, blank=True)
    prompt_tokens = models.PositiveIntegerField(default=0)
    cached_tokens = models.PositiveIntegerField(default=0)
    completion_tokens = models.PositiveIntegerField(default=0)
    queue_s = models.FloatField(null=True, blank=True)
    first_token_s = models.FloatField(null=True, blank=True)
    duration_s = models.FloatField(null=True, blank=True)
    tokens_per_s = models.FloatField(null=True, blank=True)
    error_code = models.CharField(max_length=64, blank=True)
    route = models.CharField(max_length=10, blank=True)
    is_background = models.BooleanField(default=False)
    predicted_first_token_s = models.FloatField(null=True, blank=True)
    explanation = models.JSONField(null=True, blank=True)
    request_bytes = models.BigIntegerField(default=0)
    answer_bytes = models.BigIntegerField(default=0)
    started_at = models.DateTimeField(default=timezone.now)
    ended_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["-started_at"]
        indexes = [
            models.Index(fields=["chat", "-started_at"], name="turn_by_chat"),
            models.Index(fields=["started_at"], name="turn_by_start"),
            models.Index(fields=["state"], condition=models.Q(state="running"), name="turn_running"),
        ]

    def __str__(self) -> str:
        return str(self.request_id)


class Snapshot(models.Model):
    """A conversation's KV state in a host's store, enough to go on there or to be fetched from there.

    The store's manifest is the truth, this row its shadow: `sessions.snapshots` lists the manifests of each store and brings
    the rows in line. `saved_at` is the store's word; a row that no listing has shown since it was made may be gone already.
    """

    chat = models.ForeignKey(ChatSession, on_delete=models.CASCADE, related_name="snapshots")
    store = models.ForeignKey("engines.Store", on_delete=models.CASCADE, related_name="snapshots")
    name = models.CharField(max_length=1024, help_text="The manifest's name in its store.")
    fingerprint = models.CharField(max_length=128, blank=True, help_text="What an engine must share to use it.")
    tokens = models.PositiveIntegerField(default=0)
    size_bytes = models.BigIntegerField(default=0, help_text="As named; other snapshots may share most of it.")
    has_checkpoint = models.BooleanField(default=False)
    saved_at = models.DateTimeField()
    created_at = models.DateTimeField(auto_now_add=True)
    last_seen_at = models.DateTimeField(db_index=True)

    class Meta:
        ordering = ["-saved_at"]
        constraints = [models.UniqueConstraint(fields=["store", "name"], name="one_snapshot_per_store_and_name")]
        indexes = [models.Index(fields=["chat", "-saved_at"], name="snapshot_by_chat")]

    def __str__(self) -> str:
        return f"{self.tokens} tokens of {self.chat_id} in store {self.store_id}"


class SlotLease(models.Model):
    """A place on an engine that a running request has, whichever replica of the site serves it.

    `owner` is the process that prolongs it while the request runs. Only `sessions.leases` writes these rows.
    """

    request_id = models.UUIDField(primary_key=True)
    session = models.CharField(max_length=64, blank=True, db_index=True)
    engine = models.ForeignKey("engines.Engine", on_delete=models.CASCADE, related_name="leases")
    owner = models.CharField(max_length=80, db_index=True)
    idempotency = models.CharField(max_length=64, blank=True, db_index=True)
    created_at = models.DateTimeField(default=timezone.now)
    expires_at = models.DateTimeField(db_index=True)

    class Meta:
        ordering = ["created_at"]
        verbose_name = "lease"

    def __str__(self) -> str:
        return str(self.request_id)


class Handoff(models.Model):
    """A conversation's move from one engine to another. Its key is the number under which the engines were granted it.

    `kind` is live (a request ran) or idle. `pause_ms` is from the source's last step until the target had everything. The source
    gives up `deadline_s` after `started_at`. Only `sessions.handoffs` writes these rows.
    """

    chat = models.ForeignKey(ChatSession, on_delete=models.CASCADE, related_name="handoffs")
    source = models.ForeignKey("engines.Engine", on_delete=models.SET_NULL, null=True, related_name="+")
    target = models.ForeignKey("engines.Engine", on_delete=models.SET_NULL, null=True, related_name="+")
    state = models.CharField(max_length=10, choices=HandoffState.choices, default=HandoffState.PLANNED)
    # A site of an older release, which runs beside this one during an update, does not name what has a `db_default`.
    cause = models.CharField(
        max_length=8, choices=HandoffCause.choices, default=HandoffCause.ASKED, db_default=HandoffCause.ASKED
    )
    kind = models.CharField(max_length=8, blank=True)
    request_id = models.CharField(max_length=64, blank=True)
    reason = models.CharField(max_length=200, blank=True, help_text="Why it failed.")
    hint = models.CharField(max_length=200, blank=True, db_default="", help_text="What would help.")
    deadline_s = models.FloatField(default=60.0, db_default=60.0)
    tokens = models.PositiveIntegerField(default=0)
    sent_bytes = models.BigIntegerField(default=0)
    skipped_bytes = models.BigIntegerField(default=0)
    mb_per_s = models.FloatField(null=True, blank=True)
    pause_ms = models.FloatField(null=True, blank=True)
    pause_steps = models.FloatField(null=True, blank=True)
    duration_s = models.FloatField(null=True, blank=True)
    created_at = models.DateTimeField(default=timezone.now)
    started_at = models.DateTimeField(null=True, blank=True)
    ended_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["-pk"]
        indexes = [models.Index(fields=["ended_at"], name="handoff_by_end")]
        constraints = [
            models.UniqueConstraint(
                fields=["chat"], condition=models.Q(state__in=["planned", "running"]), name="one_open_handoff_per_chat"
            )
        ]

    def __str__(self) -> str:
        return f"handoff {self.pk}"


class Drain(models.Model):
    """An engine, a card or a host that gets empty: it takes nothing new, then its conversations move away one after the other.

    `subject_id` is the key of that row. `moves` tells of each conversation what became of it, as `sessions.drains.Moved`. Who
    moves them, one of a name of its own each time, is the `mover`, and says at `beat_at` that it lives; nobody is while none is
    named. With `stops` its engines stop once they are done. Only `sessions.drains` writes these rows.
    """

    kind = models.CharField(max_length=8, choices=DrainKind.choices)
    subject_id = models.BigIntegerField()
    subject = models.CharField(max_length=160)
    stops = models.BooleanField(default=False)
    state = models.CharField(max_length=8, choices=DrainState.choices, default=DrainState.RUNNING)
    moves = models.JSONField(default=list, blank=True)
    begun_by = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.SET_NULL, null=True, blank=True)
    created_at = models.DateTimeField(db_default=Now())
    moving_since = models.DateTimeField(null=True, blank=True)
    mover = models.UUIDField(null=True, blank=True)
    beat_at = models.DateTimeField(null=True, blank=True)
    ended_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["-pk"]
        constraints = [
            models.UniqueConstraint(
                fields=["kind", "subject_id"], condition=models.Q(state="running"), name="one_open_drain_per_subject"
            )
        ]

    def __str__(self) -> str:
        return f"drain of {self.subject}"


class KvLoss(models.Model):
    """What is lost where one quant of a model goes on with KV that another one computed.

    The KL divergence (nats) of the next token's distribution over that KV from the one over the decoder's own, at `places` of a
    probe text, of which `same_top` had the same likeliest token. Only `sessions.kv_losses` writes these rows; `tried_at` is when
    somebody last began to measure.
    """

    prefill_variant = models.ForeignKey("pools.Variant", on_delete=models.CASCADE, related_name="+")
    decode_variant = models.ForeignKey("pools.Variant", on_delete=models.CASCADE, related_name="+")
    kl_mean = models.FloatField(null=True, blank=True)
    kl_max = models.FloatField(null=True, blank=True)
    places = models.PositiveSmallIntegerField(default=0)
    same_top = models.PositiveSmallIntegerField(default=0)
    probe_tokens = models.PositiveIntegerField(default=0)
    problem = models.CharField(max_length=300, blank=True, help_text="Why it could not be measured.")
    tried_at = models.DateTimeField(null=True, blank=True)
    measured_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["prefill_variant", "decode_variant"]
        verbose_name = "KV loss"
        verbose_name_plural = "KV losses"
        constraints = [
            models.UniqueConstraint(fields=["prefill_variant", "decode_variant"], name="one_kv_loss_per_pair"),
        ]

    def __str__(self) -> str:
        return f"{self.prefill_variant_id} → {self.decode_variant_id}"
