"""`manage.py why`: why the last requests went where they went, and how that compares with what then happened."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from sessions import services
from sessions.why_here import MOST, described, summary


class Command(BaseCommand):
    help = "Print why the last requests went where they went: every engine, every term, and predicted against actual times."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--limit", type=int, default=10, help="how many requests, the newest last")

    def handle(self, *args: Any, **options: Any) -> None:
        turns = services.turn_views(None, max(1, min(MOST, options["limit"])))
        if not turns:
            self.stdout.write("No request yet.")
        for turn in reversed(turns):
            self.stdout.write(described(turn))
        if compared := summary((turn.first_token_s, turn.predicted_first_token_s) for turn in turns):
            self.stdout.write(compared)
