"""What the staff can ask of a host from the dashboard."""

from __future__ import annotations

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBadRequest
from django.shortcuts import redirect
from django.views.decorators.http import require_POST

from pools import services as pools
from pools.choices import HostDuty

_DUTIES = {"drain": HostDuty.DRAINING, "serve": HostDuty.ACTIVE}


@require_POST
@login_required
def duty(request: HttpRequest, host_id: int) -> HttpResponse:
    """Drain a host, or let it serve again: the form field `duty` says which. Its engines follow within seconds."""
    if not request.user.is_staff:
        raise PermissionDenied
    wanted = _DUTIES.get(request.POST.get("duty", ""))
    if wanted is None:
        return HttpResponseBadRequest("duty is one of: " + ", ".join(_DUTIES))
    name = next((host.name for host in pools.host_views() if host.id == host_id), None)
    if name is None:
        raise Http404
    if pools.change_duty(host_id, wanted):
        messages.success(request, f"{name} {wanted.label}.")
    else:
        messages.warning(request, f"{name} cannot be told that: it is so already, or it has left the pool.")
    return redirect("dashboard")
