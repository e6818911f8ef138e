"""`manage.py drain`: moves all conversations off an engine or a host; without `--go` it only says what would move where."""

from __future__ import annotations

from typing import Any

from asgiref.sync import async_to_sync
from django.core.management.base import BaseCommand, CommandError, CommandParser

from engines import services as engines
from engines.choices import StopReason
from engines.client import close_client_session
from engines.errors import EngineError
from sessions import evacuation
from sessions.evacuation import PlannedMove

ROUNDS = 3


class Command(BaseCommand):
    help = "Preview, and with --go do, the move of all conversations off an engine (or all engines of --host)."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("engines", nargs="*", metavar="ENGINE")
        parser.add_argument("--host", help="all serving engines of this host")
        parser.add_argument("--go", action="store_true", help="move them, live")
        parser.add_argument("--stop", action="store_true", help="with --go: the engines stop once they are done")

    def handle(self, *args: Any, **options: Any) -> None:
        serving = engines.serving_engines(None)
        names = {*options["engines"], *(one.name for one in serving if one.host_name == options["host"])}
        if not names:
            raise CommandError("Name an engine, or a host that has some.")
        try:
            left = async_to_sync(self._moved)(names, options["go"])
        except EngineError as error:
            raise CommandError(error.message) from error
        if options["go"] and options["stop"]:
            for engine in serving:
                if engine.name in names:
                    engines.drain(engine.engine_id, StopReason.PERSON)
                    self.stdout.write(f"{engine.name} takes nothing new and stops when it is done.")
        if options["go"] and left:
            raise CommandError(f"{left} conversations stay.")

    async def _moved(self, names: set[str], go: bool) -> int:
        """How many stay. A conversation that comes while others move is seen by the next round."""
        try:
            left = 0
            for _ in range(ROUNDS if go else 1):
                planned = await evacuation.preview(names)
                if go:
                    planned = await evacuation.carry_out(planned)
                for move in planned:
                    self.stdout.write(described(move, done=go))
                left = sum(not move.target for move in planned)
                if not go or not planned or left == len(planned):
                    break
            if not planned and not left:
                self.stdout.write("No conversation is held there.")
            return left
        finally:
            await close_client_session()


def described(move: PlannedMove, *, done: bool) -> str:
    what = f"{move.session[:16]}  {move.tokens:>7} tokens  {move.source}"
    if not move.target:
        return f"{what}  stays: {move.reason}"
    size = "?" if move.foretold_bytes is None else f"{move.foretold_bytes / 1e6:.1f} MB"
    pause = "?" if move.foretold_pause_ms is None else f"{move.foretold_pause_ms:.1f} ms"
    return f"{what} → {move.target}  " + ("moved" if done else f"about {size}, pause {pause} if it runs")
