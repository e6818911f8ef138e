"""`manage.py build-native --arch sm_86`: llama.cpp for this host's cards or CPU, used from an engine's next start."""

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand

from native import build_native


class Command(BaseCommand):
    help = (
        "Build llama.cpp's libraries for a card (sm_60, sm_86, sm_90, sm_120 and others) or for the CPU, out of the source "
        "inside the pinned bindings. Engines on such a card use the newest build from their next start on."
    )
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        build_native.add_arguments(parser)
        parser.set_defaults(home=Path(settings.HYDRA_HOME))

    def handle(self, *args: Any, **options: Any) -> None:
        raise SystemExit(build_native.run_options(options))
