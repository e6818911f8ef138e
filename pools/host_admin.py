"""Hosts, devices, tokens and reservations in the admin. What a probe reads is shown, not edited; duties are asked for."""

from typing import Any

from django import forms
from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest
from unfold.admin import ModelAdmin, TabularInline

from pools import device_limits, gpu_minutes, host_services, join_tokens, services
from pools.choices import HostDuty
from pools.errors import PoolError
from pools.models import Gpu, GpuMinute, Host, JoinToken, Reservation
from pools.release import this_release

SHOWN_MINUTES = 60


class ReadOnlyAdmin(ModelAdmin):
    """Rows that processes write: to be looked at, and deleted when they are of no use any more."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


class GpuInline(TabularInline):
    model = Gpu
    fields = ["kind", "index", "name", "arch", "memory_total_bytes", "memory_used_bytes", "problem", "last_seen_at"]
    readonly_fields = fields
    extra = 0
    can_delete = False

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


@admin.register(Host)
class HostAdmin(ReadOnlyAdmin):
    list_display = ["name", "state", "duty", "address", "release", "cpu_count", "load_1m", "problem", "last_seen_at"]
    list_filter = ["state", "duty"]
    search_fields = ["name", "address"]
    inlines = [GpuInline]
    actions = ["drain", "activate", "retire"]

    def has_delete_permission(self, request: HttpRequest, obj: Host | None = None) -> bool:
        """Only what can let nobody in any more: a host's role and broker user go when it retires, not with its row."""
        allowed = super().has_delete_permission(request, obj)
        return allowed and obj is not None and host_services.may_be_deleted(obj.pk)

    @admin.display(description="release")
    def release(self, host: Host) -> str:
        if not host.version or host.version == this_release().version:
            return host.version
        return f"{host.version}, not this site's {this_release().version}"

    @admin.action(description="Drain: nothing new, engines end when they are idle")
    def drain(self, request: HttpRequest, chosen: QuerySet[Host]) -> None:
        self._change(request, chosen, HostDuty.DRAINING)

    @admin.action(description="Let it serve (again)")
    def activate(self, request: HttpRequest, chosen: QuerySet[Host]) -> None:
        self._change(request, chosen, HostDuty.ACTIVE)

    @admin.action(description="Retire: drain, then give up its place in the pool")
    def retire(self, request: HttpRequest, chosen: QuerySet[Host]) -> None:
        self._change(request, chosen, HostDuty.RETIRING)

    def _change(self, request: HttpRequest, chosen: QuerySet[Host], duty: HostDuty) -> None:
        for host in chosen:
            if services.change_duty(host.pk, duty):
                self.message_user(request, f"{host.name}: {duty.label}.", messages.SUCCESS)
            else:
                words = f"{host.name} cannot be told that: it is so already, has left, or never joined (the site's own host)."
                self.message_user(request, words, messages.WARNING)


class MinuteInline(TabularInline):
    """What a device did lately."""

    model = GpuMinute
    fields = list(gpu_minutes.MinuteView.__dataclass_fields__)
    readonly_fields = fields
    ordering = ["-began_at"]
    extra = 0
    can_delete = False
    verbose_name_plural = f"the last {SHOWN_MINUTES} minutes"

    def get_queryset(self, request: HttpRequest) -> QuerySet[GpuMinute]:
        rows: QuerySet[GpuMinute] = super().get_queryset(request)
        gpu_id = request.resolver_match.kwargs.get("object_id") if request.resolver_match else None
        if gpu_id is None or not str(gpu_id).isdecimal():
            return rows.none()
        # An inline filters what it is given, which a slice does not allow.
        latest = rows.filter(gpu_id=int(gpu_id)).order_by("-began_at").values_list("pk", flat=True)[:SHOWN_MINUTES]
        return rows.filter(pk__in=list(latest))

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


@admin.register(Gpu)
class GpuAdmin(ReadOnlyAdmin):
    list_display = [
        "__str__",
        "name",
        "arch",
        "memory_total_bytes",
        "memory_used_bytes",
        "utilization_percent",
        "temperature_c",
        "power_w",
        "problem",
        "last_seen_at",
    ]
    list_filter = ["kind", "arch", "host"]
    search_fields = ["name", "uuid"]
    list_select_related = ["host"]
    inlines = [MinuteInline]

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Its limit can be changed; all else is read from it."""
        return ModelAdmin.has_change_permission(self, request, obj)

    def get_readonly_fields(self, request: HttpRequest, obj: Gpu | None = None) -> list[str]:
        return [field.name for field in Gpu._meta.fields if field.name != "memory_limit_bytes"]

    def save_model(self, request: HttpRequest, obj: Gpu, form: Any, change: bool) -> None:
        device_limits.set_memory_limit(obj.pk, obj.memory_limit_bytes)


class JoinTokenForm(forms.ModelForm):  # type: ignore[type-arg]
    """What a new token is for, and how long it lives."""

    minutes = forms.IntegerField(
        min_value=1,
        max_value=join_tokens.MAX_MINUTES,
        initial=join_tokens.DEFAULT_MINUTES,
        help_text="It can be used once within so many minutes.",
    )

    class Meta:
        model = JoinToken
        fields = ["note"]

    def clean(self) -> dict[str, Any]:
        values: dict[str, Any] = super().clean() or {}
        try:
            join_tokens.check_joinable()
        except PoolError as error:
            raise forms.ValidationError(f"{error.message} {error.hint}") from error
        return values


@admin.register(JoinToken)
class JoinTokenAdmin(ModelAdmin):
    form = JoinTokenForm
    list_display = ["prefix", "note", "created_at", "expires_at", "used_at", "used_by"]
    list_select_related = ["used_by"]
    actions = ["revoke"]

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    @admin.action(description="Revoke", permissions=["delete"])
    def revoke(self, request: HttpRequest, chosen: QuerySet[JoinToken]) -> None:
        count = sum(join_tokens.revoke(token.pk) for token in chosen)
        self.message_user(request, f"{count} can no longer be used.", messages.SUCCESS)

    def save_model(self, request: HttpRequest, obj: JoinToken, form: Any, change: bool) -> None:
        obj.pk, token = join_tokens.create(obj.note, form.cleaned_data["minutes"])
        obj.refresh_from_db()
        site = request.build_absolute_uri("/").rstrip("/")
        self.message_user(request, f"Shown only now: manage.py head --join {site} --token {token}", messages.WARNING)


@admin.register(Reservation)
class ReservationAdmin(ReadOnlyAdmin):
    list_display = ["resource", "owner", "purpose", "reserved_at", "expires_at"]
    search_fields = ["resource", "owner"]
