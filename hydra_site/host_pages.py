"""What the staff can ask of a host from the dashboard."""

from __future__ import annotations

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBadRequest
from django.shortcuts import redirect
from django.views.decorators.http import require_POST

from hydra_site.drain_rights import may_drain, require
from pools.choices import HostDuty
from sessions import drains
from sessions.choices import DrainKind
from sessions.errors import DrainGoesOn, DrainUnknown

_DUTIES = {"drain": HostDuty.DRAINING, "serve": HostDuty.ACTIVE}


@require_POST
@login_required
def duty(request: HttpRequest, host_id: int) -> HttpResponse:
    """Drain a host, or let it serve again: the form field `duty` says which. Its conversations and engines follow. For those of
    the staff who may change hosts."""
    require(may_drain(request.user, DrainKind.HOST))
    wanted = _DUTIES.get(request.POST.get("duty", ""))
    if wanted is None:
        return HttpResponseBadRequest("duty is one of: " + ", ".join(_DUTIES))
    try:
        subject = drains.subject_of(DrainKind.HOST, host_id)
    except DrainUnknown as error:
        raise Http404 from error
    if _changed(subject, wanted, request.user.pk):
        messages.success(request, f"{subject.name} {wanted.label}.")
    else:
        messages.warning(request, f"{subject.name} cannot be told that: it is so already, or it has left the pool.")
    return redirect("dashboard")


def _changed(subject: drains.Subject, wanted: HostDuty, user_id: int) -> bool:
    if wanted == HostDuty.ACTIVE:
        return drains.serve_again(subject)
    if subject.duty != HostDuty.ACTIVE:
        return False
    try:
        return bool(drains.begin(subject, stops=True, user_id=user_id))
    except DrainGoesOn:
        return False
