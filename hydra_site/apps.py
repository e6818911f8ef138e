"""Django's handle on the site itself."""

from django.apps import AppConfig


class HydraSiteConfig(AppConfig):
    name = "hydra_site"

    def ready(self) -> None:
        # Whoever sends a task needs our Celery application to be the current one.
        from hydra_site.celery import app

        app.set_default()
