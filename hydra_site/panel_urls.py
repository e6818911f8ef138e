"""Addresses of the panel's pages."""

from __future__ import annotations

from django.urls import path

from hydra_site import source, views

urlpatterns = [
    path("", views.dashboard, name="dashboard"),
    path("playground/", views.playground, name="playground"),
    path("login/", views.Login.as_view(), name="login"),
    path("source.tar.gz", source.source_archive, name="source"),
    path("logout/", views.Logout.as_view(), name="logout"),
]
