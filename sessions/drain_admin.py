"""Draining from the admin: the actions of hosts, cards and engines that move conversations, and the drains themselves.

Hosts, cards and engines are registered by the apps below, which know nothing of conversations; here they get these actions.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from django.contrib import admin, messages
from django.contrib.auth import get_permission_codename
from django.db.models import Expression, F, Func, IntegerField, QuerySet, Value
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.utils.html import format_html
from unfold.admin import ModelAdmin

from engines.admin import EngineAdmin
from engines.errors import EngineError
from pools.choices import HostDuty
from pools.host_admin import GpuAdmin, HostAdmin
from sessions import drains
from sessions.choices import DrainKind
from sessions.errors import DrainGoesOn, DrainUnknown
from sessions.models import Drain


def _count_of(array: Expression | F) -> Func:
    return Func(array, function="jsonb_array_length", output_field=IntegerField())


class DrainActions(ModelAdmin):
    """For rows of one kind that can get empty. One that is chosen alone is previewed first."""

    drain_kind: DrainKind
    # Whether engines stop behind it where several are drained at once.
    drain_stops = False

    def has_command_permission(self, request: HttpRequest) -> bool:
        """Whoever may change such rows, also where nobody edits them: what a head writes is only shown."""
        change = get_permission_codename("change", self.opts)
        return bool(request.user.has_perm(f"{self.opts.app_label}.{change}"))

    @admin.action(permissions=["command"], description="Drain: nothing new, its conversations move to other engines")
    def drain(self, request: HttpRequest, chosen: QuerySet[Any]) -> HttpResponse | None:
        ids = list(chosen.values_list("pk", flat=True))
        if len(ids) == 1:
            return redirect("drain-preview", self.drain_kind, ids[0])
        for pk in ids:
            try:
                subject = drains.subject_of(self.drain_kind, pk)
                drain_id = drains.begin(subject, stops=self.drain_stops, user_id=request.user.pk)
            except EngineError as error:
                self.message_user(request, str(error), messages.WARNING)
            else:
                link = format_html(
                    '{} takes nothing new. <a href="{}">How far it is</a>',
                    subject.name,
                    reverse("drain", args=[drain_id]),
                )
                self.message_user(request, link, messages.SUCCESS)
        return None

    @admin.action(permissions=["command"], description="Let it serve (again)")
    def activate(self, request: HttpRequest, chosen: QuerySet[Any]) -> None:
        for pk in chosen.values_list("pk", flat=True):
            try:
                subject = drains.subject_of(self.drain_kind, pk)
                again = drains.serve_again(subject)
            except EngineError as error:
                self.message_user(request, str(error), messages.WARNING)
                continue
            if again:
                self.message_user(request, f"{subject.name} takes requests again.", messages.SUCCESS)
            else:
                self.message_user(request, f"{subject.name} takes requests already, or has left.", messages.WARNING)


class DrainedHostAdmin(DrainActions, HostAdmin):
    drain_kind = DrainKind.HOST
    drain_stops = True

    @admin.action(permissions=["command"], description="Retire: drain, then give up its place in the pool")
    def retire(self, request: HttpRequest, chosen: QuerySet[Any]) -> None:
        super().retire(request, chosen)
        for pk in chosen.filter(duty=HostDuty.RETIRING).values_list("pk", flat=True):
            # Its engines end once they are idle; what they hold goes elsewhere before.
            with suppress(DrainGoesOn, DrainUnknown):
                drains.begin(drains.subject_of(DrainKind.HOST, pk), stops=True, user_id=request.user.pk)


class DrainedGpuAdmin(DrainActions, GpuAdmin):
    drain_kind = DrainKind.CARD
    actions = ["drain", "activate"]


class DrainedEngineAdmin(DrainActions, EngineAdmin):
    drain_kind = DrainKind.ENGINE
    actions = [*EngineAdmin.actions, "drain", "activate"]


for _below, _here in ((HostAdmin, DrainedHostAdmin), (GpuAdmin, DrainedGpuAdmin), (EngineAdmin, DrainedEngineAdmin)):
    for _model in [model for model, one in admin.site._registry.items() if type(one) is _below]:
        admin.site.unregister(_model)
        admin.site.register(_model, _here)


@admin.register(Drain)
class DrainAdmin(ModelAdmin):
    """To be looked at, and deleted when they are of no use any more."""

    list_display = ["__str__", "kind", "state", "stops", "moved", "created_at", "ended_at", "begun_by"]
    list_filter = ["state", "kind"]
    search_fields = ["subject"]
    list_select_related = ["begun_by"]
    date_hierarchy = "created_at"

    def get_queryset(self, request: HttpRequest) -> QuerySet[Drain]:
        """With how many moved; what became of each is read on its own page only."""
        told = super().get_queryset(request).defer("moves")
        moved = Func(F("moves"), Value('$[*] ? (@.outcome == "moved")'), function="jsonb_path_query_array")
        return told.annotate(told_count=_count_of(F("moves")), moved_count=_count_of(moved))

    @admin.display(description="moved")
    def moved(self, drain: Drain) -> str:
        """How many, with a way to each of them."""
        counts = [getattr(drain, name) for name in ("moved_count", "told_count")]
        return format_html('<a href="{}">{} of {}</a>', reverse("drain", args=[drain.pk]), *counts)

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False
