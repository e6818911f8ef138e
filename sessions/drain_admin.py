"""Draining from the admin: the actions of hosts, cards and engines that move conversations, and the drains themselves.

Hosts, cards and engines are registered by the apps below, which know nothing of conversations; here they get these actions.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from django.contrib import admin, messages
from django.db.models import QuerySet
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
from sessions.errors import DrainGoesOn
from sessions.models import Drain


class DrainActions(ModelAdmin):
    """For rows of one kind that can get empty. One that is chosen alone is previewed first."""

    drain_kind: DrainKind
    # Whether engines stop behind it where several are drained at once.
    drain_stops = False

    @admin.action(description="Drain: nothing new, its conversations move to other engines")
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

    @admin.action(description="Let it serve (again)")
    def activate(self, request: HttpRequest, chosen: QuerySet[Any]) -> None:
        for pk in chosen.values_list("pk", flat=True):
            subject = drains.subject_of(self.drain_kind, pk)
            if drains.serve_again(subject):
                self.message_user(request, f"{subject.name} takes requests again.", messages.SUCCESS)
            else:
                self.message_user(request, f"{subject.name} takes requests already, or has left.", messages.WARNING)


class DrainedHostAdmin(DrainActions, HostAdmin):
    drain_kind = DrainKind.HOST
    drain_stops = True

    @admin.action(description="Retire: drain, then give up its place in the pool")
    def retire(self, request: HttpRequest, chosen: QuerySet[Any]) -> None:
        super().retire(request, chosen)
        for pk in chosen.filter(duty=HostDuty.RETIRING).values_list("pk", flat=True):
            # Its engines end once they are idle; what they hold goes elsewhere before.
            with suppress(DrainGoesOn):
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

    @admin.display(description="moved")
    def moved(self, drain: Drain) -> str:
        """How many, with a way to each of them."""
        count = sum(move["outcome"] == "moved" for move in drain.moves)
        return format_html('<a href="{}">{} of {}</a>', reverse("drain", args=[drain.pk]), count, len(drain.moves))

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False
