"""Django's handle on the sessions app."""

from django.apps import AppConfig


class SessionsConfig(AppConfig):
    name = "sessions"
    label = "hydra_sessions"  # Django's own app has the label "sessions".
    verbose_name = "Sessions"
    default_auto_field = "django.db.models.BigAutoField"
