"""The panel's pages. Each renders a frame; what it shows arrives over its WebSocket."""

from __future__ import annotations

from django.contrib.auth import views as auth_views
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views import defaults
from django.views.decorators.http import require_safe

from sessions.api.answers import error_response
from sessions.errors import PathUnknown


@require_safe
@login_required
def dashboard(request: HttpRequest) -> HttpResponse:
    """The pool: machines, engines, slots, sessions, activity."""
    return render(request, "dashboard.html", {"page": "dashboard"})


@require_safe
@login_required
def playground(request: HttpRequest) -> HttpResponse:
    """A conversation with any model of the pool."""
    return render(request, "playground.html", {"page": "playground"})


def not_found(request: HttpRequest, exception: Exception) -> HttpResponse:
    """A page for a browser, which says that it wants one; a program gets the API's error, also for addresses of llama.cpp's."""
    if "text/html" in request.headers.get("Accept", ""):
        return defaults.page_not_found(request, exception)
    return error_response(PathUnknown(f"{request.path} is not served."), request)


class Login(auth_views.LoginView):
    template_name = "registration/login.html"
    redirect_authenticated_user = True


class Logout(auth_views.LogoutView):
    http_method_names = ["post", "options"]
