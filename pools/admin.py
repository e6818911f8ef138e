"""Hosts, devices and models in the admin. What a probe reads or a file says is shown, not edited."""

from typing import Any

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest
from unfold.admin import ModelAdmin, TabularInline

from pools import services
from pools.models import Gpu, Host, Model, Variant


class ReadOnlyAdmin(ModelAdmin):
    """Rows that processes write: to be looked at, and deleted when they are of no use any more."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


class GpuInline(TabularInline):
    model = Gpu
    fields = ["kind", "index", "name", "arch", "memory_total_bytes", "memory_used_bytes", "last_seen_at"]
    readonly_fields = fields
    extra = 0
    can_delete = False

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


@admin.register(Host)
class HostAdmin(ReadOnlyAdmin):
    list_display = ["name", "state", "cpu_model", "cpu_count", "memory_available_bytes", "load_1m", "last_seen_at"]
    list_filter = ["state"]
    search_fields = ["name"]
    inlines = [GpuInline]


@admin.register(Gpu)
class GpuAdmin(ReadOnlyAdmin):
    list_display = [
        "__str__",
        "name",
        "arch",
        "memory_total_bytes",
        "memory_used_bytes",
        "temperature_c",
        "last_seen_at",
    ]
    list_filter = ["kind", "arch", "host"]
    search_fields = ["name", "uuid"]
    list_select_related = ["host"]


@admin.register(Model)
class ModelAdminPage(ModelAdmin):
    list_display = ["name", "display_name", "is_default", "pooling", "speculation", "context_tokens", "created_at"]
    list_filter = ["is_default", "pooling"]
    search_fields = ["name", "display_name"]
    readonly_fields = ["name", "is_default", "context_tokens", "created_at"]
    actions = ["make_default"]

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    @admin.action(description="Serve requests that name no model with this one")
    def make_default(self, request: HttpRequest, chosen: QuerySet[Model]) -> None:
        names = [model.name for model in chosen]
        if len(names) != 1:
            self.message_user(request, "Choose exactly one model.", messages.ERROR)
            return
        services.set_default_model(names[0])
        self.message_user(request, f"{names[0]} is the default model now.", messages.SUCCESS)

    def save_model(self, request: HttpRequest, obj: Model, form: Any, change: bool) -> None:
        services.change_model(
            obj.pk,
            display_name=obj.display_name,
            generation_defaults=obj.generation_defaults,
            chat_template=obj.chat_template,
            pooling=obj.pooling,
            speculation=obj.speculation,
            projector_path=obj.projector_path,
        )


@admin.register(Variant)
class VariantAdmin(ReadOnlyAdmin):
    list_display = ["__str__", "filename", "architecture", "size_bytes", "parameter_count", "context_train_tokens"]
    list_filter = ["architecture", "quantization", "model"]
    search_fields = ["filename", "content_digest", "model__name"]
    list_select_related = ["model"]
