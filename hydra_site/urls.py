"""All addresses of the site."""

from django.contrib import admin
from django.urls import include, path

from hydra_site import health, joining
from sessions.api.urls import root_urlpatterns

handler404 = "hydra_site.views.not_found"

urlpatterns = [
    path("v1/health", health.health),
    path("v1/hosts/join", joining.join),
    path("v1/", include("sessions.api.urls")),
    *root_urlpatterns,
    path("health", health.health),
    path("healthz", health.healthz),
    path("readyz", health.readyz),
    path("admin/", admin.site.urls),
    path("", include("hydra_site.panel_urls")),
]
