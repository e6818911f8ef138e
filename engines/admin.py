"""Engines and stores in the admin: what a person may ask for can be edited and commanded, what the head writes is shown.

Secrets are not shown.
"""

from typing import Any

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest
from unfold.admin import ModelAdmin

from engines import residents, services
from engines.models import Engine, Store, StoreSample
from engines.store_rows import SAMPLED
from pools.placement import describe, sized

RUNTIME_FIELDS = [
    "wanted",
    "state",
    "epoch",
    "pid",
    "pid_start_time",
    "http_port",
    "rpc_port",
    "restarts",
    "last_error",
    "commanded_at",
    "state_since",
    "last_seen_at",
    "ready_at",
    "on_demand",
    "stop_reason",
    "waits_for",
    "load_progress",
    "load_s",
    "last_used_at",
    "created_at",
]


@admin.register(Engine)
class EngineAdmin(ModelAdmin):
    list_display = [
        "name",
        "host",
        "gpu",
        "variant",
        "wanted",
        "state",
        "slots",
        "http_port",
        "restarts",
        "last_seen_at",
    ]
    list_filter = ["state", "wanted", "host"]
    search_fields = ["name", "variant__model__name"]
    list_select_related = ["host", "gpu__host", "variant__model"]
    readonly_fields = [*RUNTIME_FIELDS, "memory"]
    exclude = ["rpc_secret"]
    actions = ["start_engines", "stop_engines"]

    @admin.display(description="memory by its ledger")
    def memory(self, engine: Engine) -> str:
        """What it takes of its card and of its host, as it is placed."""
        if engine.variant_id is None:
            return ""
        ledger = residents.engine_ledger(engine)
        sides = (("card", ledger.device), ("host", ledger.host))
        parts = [
            f"{side} {sized(taken.total_bytes)} ({', '.join(f'{kind} {sized(size)}' for kind, size in taken.by_kind().items())})"
            for side, taken in sides
            if taken.total_bytes
        ]
        return f"{describe(residents.engine_form(engine))}: {'; '.join(parts)}"

    @admin.action(permissions=["change"], description="Start")
    def start_engines(self, request: HttpRequest, chosen: QuerySet[Engine]) -> None:
        refused = [engine.name for engine in chosen if not services.start(engine.pk)]
        if len(refused) < len(chosen):
            self.message_user(request, f"{len(chosen) - len(refused)} asked to start.", messages.SUCCESS)
        if refused:
            said = "not started: it, its card or its host is being emptied. Let that serve again first."
            self.message_user(request, f"{', '.join(refused)}: {said}", messages.WARNING)

    @admin.action(permissions=["change"], description="Stop")
    def stop_engines(self, request: HttpRequest, chosen: QuerySet[Engine]) -> None:
        count = sum(services.stop(engine.pk) for engine in chosen)
        self.message_user(request, f"{count} asked to stop.", messages.SUCCESS)

    def save_model(self, request: HttpRequest, obj: Engine, form: Any, change: bool) -> None:
        services.configure(obj, form.changed_data if change else None)
        if change and form.changed_data:
            self.message_user(request, "The new values count from the engine's next start.", messages.INFO)


class ReadOnlyAdmin(ModelAdmin):
    """Rows that a head writes."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


@admin.register(Store)
class StoreAdmin(ReadOnlyAdmin):
    list_display = [
        "host",
        "state",
        "capacity_bytes",
        "used_bytes",
        "stored_bytes",
        "logical_bytes",
        "ratio",
        "snapshots_stored",
        "hits",
        "misses",
        "evictions",
        "errors",
        "last_seen_at",
    ]
    list_filter = ["state"]
    list_select_related = ["host"]
    exclude = ["secret"]

    @admin.display(description="named per stored byte")
    def ratio(self, store: Store) -> float | None:
        return store.dedup_ratio


@admin.register(StoreSample)
class StoreSampleAdmin(ReadOnlyAdmin):
    list_display = ["store", "taken_at", *SAMPLED]
    list_filter = ["store"]
    list_select_related = ["store__host"]
    date_hierarchy = "taken_at"
