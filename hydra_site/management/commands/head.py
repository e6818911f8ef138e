"""`manage.py head [--join URL --token TOKEN]`: this machine as a GPU host of another machine's pool."""

import json
import sys
from argparse import SUPPRESS, ArgumentParser
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from django.db import DatabaseError, connection
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.recorder import MigrationRecorder
from kombu import Connection
from kombu.exceptions import OperationalError as BrokerError
from redis.exceptions import RedisError

from hydra_site import env
from hydra_site.host_start import start_host
from hydra_site.native_builds import ask_for_builds
from hydra_site.supervisor.console import Console
from hydra_site.supervisor.errors import SupervisorError
from hydra_site.supervisor.head import HeadSupervisor, options_of
from hydra_site.supervisor.home import Home
from hydra_site.supervisor.join import Wish, check_home, join
from pools import services as pools
from pools.probe import read_inventory

OUR_APPS = frozenset({"pools", "engines", "hydra_sessions"})


class Command(BaseCommand):
    help = "Serve a pool as one of its hosts: join it once with a one-time token, later just start. Ctrl-C stops."
    # Checks want a database, which the host knows only once it has joined.
    requires_system_checks = []
    requires_migrations_checks = False

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--join", metavar="URL", help="address of the pool's site, such as http://10.0.0.1:9000")
        parser.add_argument("--token", help="a one-time token; the admin and `manage.py jointoken create` make them")
        parser.add_argument("--name", help="this host's name in the pool (default: HYDRA_HOST_NAME, or the machine's)")
        parser.add_argument(
            "--address", default="", help="IP address for its engines and its store (default: the one towards the site)"
        )
        parser.add_argument("--prepare", action="store_true", help=SUPPRESS)

    def handle(self, *args: Any, **options: Any) -> None:
        if options["prepare"]:
            self._prepare()
            return
        home = Home(settings.HYDRA_HOME)
        try:
            if bool(options["join"]) != bool(options["token"]):
                raise CommandError("--join and --token belong together")
            joined = join(home, self._wish(options)) if options["join"] else check_home(home)
            HeadSupervisor(options_of(home, joined), Console(), joined).run()
        except (SupervisorError, env.SettingError) as error:
            line = error.line() if isinstance(error, SupervisorError) else str(error)
            print(*filter(None, (getattr(error, "log_tail", ""), f"Host stopped: {line}")), sep="\n", file=sys.stderr)
            raise SystemExit(1) from error

    def _wish(self, options: dict[str, Any]) -> Wish:
        given = {"HYDRA_HOST_NAME": options["name"]} if options["name"] else None
        return Wish(options["join"], options["token"], env.host_name(given), options["address"])

    def _prepare(self) -> None:
        """What a host does before its workers start. What keeps it from working is told as one JSON line on standard output."""
        try:
            _check_tables()
            _check_broker()
        except (_NotYet, DatabaseError, BrokerError, RedisError, OSError) as error:
            self.stdout.write(json.dumps({"error": _told(error)}))
            raise SystemExit(1) from error
        pools.join_host(settings.HYDRA_HOST_NAME, settings.HYDRA_ENGINE_HOST)
        start_host()
        inventory = read_inventory()
        pools.record_probe(settings.HYDRA_HOST_NAME, inventory.host, inventory.gpus, inventory.unreadable)
        ask_for_builds(settings.HYDRA_HOST_NAME, Path(settings.HYDRA_HOME), inventory.gpus)


class _NotYet(Exception):
    """This host cannot work with its pool as they are."""


def _check_tables() -> None:
    executor = MigrationExecutor(connection)
    applied = {key for key in MigrationRecorder(connection).applied_migrations() if key[0] in OUR_APPS}
    known = {key for key in executor.loader.graph.nodes if key[0] in OUR_APPS}
    if applied - known:
        raise _NotYet("the pool's site runs a newer release than this host: bring this machine to the same one")
    if known - applied:
        raise _NotYet("this host runs a newer release than the pool's site: update the site first")


def _check_broker() -> None:
    with Connection(settings.CELERY_BROKER_URL, connect_timeout=5) as broker:
        broker.ensure_connection(max_retries=1, interval_start=0.2)
        broker.default_channel.client.ping()


def _told(error: Exception) -> str:
    if isinstance(error, _NotYet):
        return str(error)
    what = "database" if isinstance(error, DatabaseError) else "broker"
    reason = " ".join(str(error).split()) or type(error).__name__
    return f"the pool's {what} does not let this host in ({reason}): see docs/many-hosts.md"
