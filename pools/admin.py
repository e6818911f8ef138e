"""Models in the admin. What a file says is shown, not edited. Hosts stand in host_admin, jobs in job_admin."""

from typing import Any

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest
from unfold.admin import ModelAdmin, TabularInline

from pools import host_admin, job_admin, services
from pools.fit_table import fit_table
from pools.host_admin import ReadOnlyAdmin
from pools.models import Model, Variant

__all__ = ["host_admin", "job_admin"]  # registers its pages by being imported


class VariantInline(TabularInline):
    """The quants of a model, as files."""

    model = Variant
    fields = ["quantization", "filename", "size_bytes", "source", "is_verified", "content_digest"]
    readonly_fields = fields
    extra = 0
    can_delete = False

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


@admin.register(Model)
class ModelAdminPage(ModelAdmin):
    list_display = [
        "name",
        "display_name",
        "is_default",
        "tags",
        "speculation",
        "run_mode",
        "shares_kv_family",
        "context_tokens",
    ]
    inlines = [VariantInline]
    list_filter = ["is_default", "pooling"]
    search_fields = ["name", "display_name"]
    readonly_fields = ["name", "is_default", "context_tokens", "created_at", "where_it_fits"]
    actions = ["make_default"]

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def get_queryset(self, request: HttpRequest) -> QuerySet[Model]:
        return super().get_queryset(request).prefetch_related("variants")

    @admin.display(description="tags")
    def tags(self, model: Model) -> str:
        variants = list(model.variants.all())
        return ", ".join(services.model_tags(model, variants[-1].header if variants else {}))

    @admin.display(description="where it fits now")
    def where_it_fits(self, model: Model) -> str:
        return fit_table(model.name)

    @admin.action(permissions=["change"], description="Serve requests that name no model with this one")
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
            draft_tokens=obj.draft_tokens,
            kv_family=obj.kv_family,
            shares_kv_family=obj.shares_kv_family,
            most_kv_loss=obj.most_kv_loss,
            run_mode=obj.run_mode,
            loading=services.LoadingChoices.of(obj),
        )


@admin.register(Variant)
class VariantAdmin(ReadOnlyAdmin):
    list_display = ["__str__", "filename", "architecture", "size_bytes", "is_verified", "source"]
    list_filter = ["architecture", "quantization", "model"]
    search_fields = ["filename", "content_digest", "model__name"]
    list_select_related = ["model"]
