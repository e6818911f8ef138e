"""`manage.py up`: the whole of Hydra on this host."""

from typing import Any

from django.core.management.base import BaseCommand

from hydra_site.supervisor.run import main


class Command(BaseCommand):
    """Starts everything and stays until Ctrl-C; the supervisor does the work and knows nothing of Django."""

    help = "Start Hydra on this host: servers, site, workers and engines. Ctrl-C stops all of it."
    # Checks want a database, which is only about to start.
    requires_system_checks = []
    requires_migrations_checks = False

    def handle(self, *args: Any, **options: Any) -> None:
        raise SystemExit(main())
