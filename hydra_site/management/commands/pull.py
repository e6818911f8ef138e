"""`manage.py pull NAME|PATH`: gets a model out of the catalogue, or takes a local GGUF, and makes it known to the pool."""

import re
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from hydra_site.addresses import use_database
from hydra_site.supervisor.borrow import services as borrowed_services
from hydra_site.supervisor.errors import SupervisorError
from pools import catalogue, services
from pools.catalogue import CATALOGUE, CatalogueEntry, InspectedModel
from pools.errors import PoolError
from pools.gguf_header import describe

MAX_NAME_CHARS = 128


class Command(BaseCommand):
    help = "Get a model by its catalogue name, or register a local GGUF by its path."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        names = ", ".join(entry.name for entry in CATALOGUE)
        parser.add_argument("model", metavar="NAME|PATH", help=f"a name of the catalogue ({names}), or a GGUF file")
        parser.add_argument("--name", help="the name that users ask for; unset = the catalogue's, or the file's own")

    def handle(self, *args: Any, **options: Any) -> None:
        console = Console(highlight=False)
        models_dir = Path(settings.HYDRA_HOME) / "models"
        wanted: str = options["model"]
        by_path = "/" in wanted or wanted.endswith(".gguf") or Path(wanted).is_file()
        try:
            with _progress(console, f"{wanted}") as report:
                path = Path(wanted) if by_path else catalogue.ensure(wanted, models_dir, report)
                model = catalogue.inspect(path, models_dir, report)
        except PoolError as error:
            raise CommandError(f"{error.message}. {error.hint}") from error
        name = options["name"] or (_name_of(model) if by_path else wanted)
        if not name.isprintable() or not 1 <= len(name) <= MAX_NAME_CHARS:
            raise CommandError(f"--name takes 1 to {MAX_NAME_CHARS} printable characters")
        _show(console, name, model)
        self._register(name, model, None if by_path else catalogue.lookup(wanted))

    def _register(self, name: str, model: InspectedModel, entry: CatalogueEntry | None) -> None:
        try:
            with borrowed_services(Path(settings.HYDRA_HOME)) as (database_url, _):
                use_database(database_url)
                # The database of a home that never ran is empty.
                call_command("migrate", interactive=False, verbosity=0)
                services.register_gguf(
                    name,
                    model.header.path,
                    header=model.header,
                    content_digest=model.sha256,
                    display_name=entry.display_name if entry else "",
                    defaults=entry.defaults if entry else None,
                )
        except SupervisorError as error:
            self.stderr.write(f"The file is here, but could not be registered: {error.line()}")
            raise SystemExit(1) from error
        self.stdout.write(f"{name} is registered.")


def _name_of(model: InspectedModel) -> str:
    """A model name out of what the file calls itself, else out of its file name: lower case, dashes for blanks."""
    own = model.header.name or model.header.path.stem
    return re.sub(r"[^a-z0-9._-]+", "-", own.lower()).strip("-.")[:MAX_NAME_CHARS] or "model"


def _show(console: Console, name: str, model: InspectedModel) -> None:
    table = Table(title=name, show_header=False, title_justify="left", box=None)
    for label, value in describe(model.header):
        table.add_row(label, value)
    table.add_row("sha256", model.sha256)
    console.print(table)


class _progress:
    """A progress bar on a terminal, silence elsewhere. Entering it gives the function that reports (done, total) bytes."""

    def __init__(self, console: Console, title: str) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._title = title

    def __enter__(self) -> Any:
        self._bar.start()
        task = self._bar.add_task(self._title, total=None)
        return lambda done_bytes, total_bytes: self._bar.update(task, completed=done_bytes, total=total_bytes)

    def __exit__(self, *error: object) -> None:
        self._bar.stop()
