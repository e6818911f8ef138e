"""Addresses of the panel's pages."""

from __future__ import annotations

from django.urls import path

from hydra_site import drain_pages, host_pages, session_pages, source, views

urlpatterns = [
    path("", views.dashboard, name="dashboard"),
    path("playground/", views.playground, name="playground"),
    path("hosts/<int:host_id>/duty/", host_pages.duty, name="host-duty"),
    path("drain/<str:kind>/<int:subject_id>/", drain_pages.preview, name="drain-preview"),
    path("drain/<str:kind>/<int:subject_id>/serve/", drain_pages.serve, name="drain-serve"),
    path("drains/<int:drain_id>/", drain_pages.drain, name="drain"),
    path("sessions/", session_pages.sessions, name="sessions"),
    path("sessions/<str:key>/", session_pages.session, name="session"),
    path("sessions/<str:key>/<str:name>/", session_pages.act, name="session-act"),
    path("login/", views.Login.as_view(), name="login"),
    path("source.tar.gz", source.source_archive, name="source"),
    path("logout/", views.Logout.as_view(), name="logout"),
]
