"""Addresses of the API, below /v1/."""

from __future__ import annotations

from django.urls import path, re_path

from sessions.api import views

urlpatterns = [
    path("chat/completions", views.chat_completions),
    path("chat/completions/", views.chat_completions),
    path("models", views.models),
    path("models/", views.models),
    path("models/<path:name>", views.model),
    re_path(r"^(?P<path>.*)$", views.unknown),
]
