"""Engines in the admin: what a person may ask for can be edited and commanded, what the head writes is shown."""

from typing import Any

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest
from unfold.admin import ModelAdmin

from engines import services
from engines.models import Engine

RUNTIME_FIELDS = [
    "wanted",
    "state",
    "epoch",
    "pid",
    "pid_start_time",
    "http_port",
    "restarts",
    "last_error",
    "commanded_at",
    "state_since",
    "last_seen_at",
    "ready_at",
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
    readonly_fields = RUNTIME_FIELDS
    actions = ["start_engines", "stop_engines"]

    @admin.action(description="Start")
    def start_engines(self, request: HttpRequest, chosen: QuerySet[Engine]) -> None:
        count = sum(services.start(engine.pk) for engine in chosen)
        self.message_user(request, f"{count} asked to start.", messages.SUCCESS)

    @admin.action(description="Stop")
    def stop_engines(self, request: HttpRequest, chosen: QuerySet[Engine]) -> None:
        count = sum(services.stop(engine.pk) for engine in chosen)
        self.message_user(request, f"{count} asked to stop.", messages.SUCCESS)

    def save_model(self, request: HttpRequest, obj: Engine, form: Any, change: bool) -> None:
        services.configure(obj, form.changed_data if change else None)
        if change and form.changed_data:
            self.message_user(request, "The new values count from the engine's next start.", messages.INFO)
