"""Django's handle on the engines app."""

from django.apps import AppConfig


class EnginesConfig(AppConfig):
    name = "engines"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from engines import residents
        from pools import fit

        fit.use_books(residents.rooms)
