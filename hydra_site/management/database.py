"""The database of a home for one management command, whether or not Hydra runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from django.conf import settings
from django.core.management import call_command
from django.core.management.base import CommandError

from hydra_site.addresses import use_database
from hydra_site.supervisor.borrow import services
from hydra_site.supervisor.errors import SupervisorError


@contextmanager
def borrowed_database() -> Iterator[None]:
    """This process uses the database of HYDRA_HOME, brought to this release, started for the duration if need be.

    Raises CommandError with one line when it cannot be had.
    """
    try:
        with services(Path(settings.HYDRA_HOME)) as (database_url, _):
            use_database(database_url)
            # The database of a home that never ran is empty.
            call_command("migrate", interactive=False, verbosity=0)
            yield
    except SupervisorError as error:
        raise CommandError(error.line()) from error
