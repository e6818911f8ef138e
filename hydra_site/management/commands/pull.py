"""`manage.py pull REFERENCE`: brings a model to this host, or to another one, and makes it known to the pool."""

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from hydra_site.addresses import use_database
from hydra_site.management.database import borrowed_database
from hydra_site.supervisor.borrow import services as borrowed_services
from hydra_site.supervisor.errors import SupervisorError
from pools import catalogue, fetch, job_runner, jobs
from pools.catalogue import CATALOGUE, MAX_NAME_CHARS
from pools.choices import JobKind
from pools.errors import PoolError
from pools.fetch import Fetched
from pools.gguf_header import describe
from pools.hub_catalogue import HUB_MODELS
from pools.model_tags import is_projector


class Command(BaseCommand):
    help = (
        "Get a model: by a name of the catalogue, hf:owner/repository/file.gguf, hf:owner/repository:QUANT, a URL, or the "
        "path of a GGUF that is here. A projector (mmproj) is given to the model that --name says."
    )
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "model", metavar="NAME|hf:…|URL|PATH", nargs="?", help="what to get; nothing: show the catalogue"
        )
        parser.add_argument(
            "--name", default="", help="the name that users ask for; unset = the catalogue's, or the file's own"
        )
        parser.add_argument("--host", default="", help="let another host of the running pool get it")

    def handle(self, *args: Any, **options: Any) -> None:
        console = Console(highlight=False)
        wanted, name = options["model"], options["name"]
        if not wanted:
            _show_catalogue(console)
            return
        if not name.isprintable() or len(name) > MAX_NAME_CHARS:
            raise CommandError(f"--name takes up to {MAX_NAME_CHARS} printable characters")
        try:
            if options["host"]:
                self._ask(wanted, name, options["host"])
                return
            models_dir = Path(settings.HYDRA_HOME) / "models"
            with _progress(console, wanted) as report:
                fetched = fetch.fetch(wanted, models_dir, report)
            _show(console, fetched, models_dir)
            self._register(fetched, name, models_dir)
        except PoolError as error:
            raise CommandError(f"{error.message}. {error.hint}") from error

    def _register(self, fetched: Fetched, name: str, models_dir: Path) -> None:
        try:
            with borrowed_database():
                name = job_runner.register(fetched, settings.HYDRA_HOST_NAME, name, models_dir)
        except CommandError as error:
            raise CommandError(f"The file is here, but could not be registered: {error}") from error
        self.stdout.write(f"{name} is registered.")

    def _ask(self, wanted: str, name: str, host_name: str) -> None:
        fetch.reference_of(wanted)
        try:
            with borrowed_services(Path(settings.HYDRA_HOME)) as (database_url, broker_url):
                use_database(database_url)
                if broker_url is None:
                    raise CommandError("Hydra does not run, so no other host can be asked: make run")
                job_id = jobs.enqueue(host_name, JobKind.DOWNLOAD, wanted, name)
        except SupervisorError as error:
            raise CommandError(error.line()) from error
        self.stdout.write(f"{host_name} was asked: job {job_id}; the admin shows how far it is.")


def _show_catalogue(console: Console) -> None:
    table = Table("name", "file", "about", "for", title="the catalogue", title_justify="left", box=None)
    for entry in CATALOGUE:
        table.add_row(entry.name, entry.file_name, f"{entry.size_bytes / 1e9:.1f} GB", "any CPU; verified")
    for model in HUB_MODELS:
        for variant in model.variants:
            about = f"{variant.about_bytes / 1e9:.1f} GB" if variant.about_bytes else ""
            table.add_row(f"{model.name}:{variant.quant}", variant.file, about, f"{variant.note}; unverified")
    console.print(table)


def _show(console: Console, fetched: Fetched, models_dir: Path) -> None:
    path = Path(fetched.path)
    table = Table(title=path.name, show_header=False, title_justify="left", box=None)
    if not is_projector(path):
        for label, value in describe(catalogue.inspect(path, models_dir).header):
            table.add_row(label, value)
    table.add_row("sha256", fetched.sha256)
    if fetched.source:
        table.add_row("source", fetched.source)
        table.add_row("verified", "yes" if fetched.verified else "no: its source tells no SHA-256")
    console.print(table)


class _progress:
    """A progress bar on a terminal, silence elsewhere. Entering it gives the function that reports (stage, done, total)."""

    def __init__(self, console: Console, title: str) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._title = title

    def __enter__(self) -> Any:
        self._bar.start()
        task = self._bar.add_task(self._title, total=None)
        return lambda stage, done, total: self._bar.update(
            task, description=f"{self._title}: {stage}", completed=done, total=total or None
        )

    def __exit__(self, *error: object) -> None:
        self._bar.stop()
