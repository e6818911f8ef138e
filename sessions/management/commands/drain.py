"""`manage.py drain`: moves all conversations off engines, a card or a host; without `--go` it only says what would move where."""

from __future__ import annotations

from typing import Any

from asgiref.sync import async_to_sync
from django.core.management.base import BaseCommand, CommandError, CommandParser

from engines.client import close_client_session
from engines.errors import EngineError
from pools.db import in_db
from sessions import drain_moves, drains, evacuation
from sessions.choices import DrainKind
from sessions.drains import DrainView, Moved, Subject
from sessions.evacuation import PlannedMove


class Command(BaseCommand):
    help = "Preview, and with --go do, the move of all conversations off engines, a --card or a --host, which take nothing new."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("engines", nargs="*", metavar="ENGINE")
        parser.add_argument("--card", metavar="HOST/cuda0", help="all engines of this card; its uuid does too")
        parser.add_argument("--host", help="all engines of this host")
        parser.add_argument("--go", action="store_true", help="send nothing new there and move them, live")
        parser.add_argument("--stop", action="store_true", help="with --go: the engines stop once they are done")
        parser.add_argument("--serve", action="store_true", help="have them take requests again instead")

    def handle(self, *args: Any, **options: Any) -> None:
        asked = [(DrainKind.ENGINE, name) for name in options["engines"]]
        asked += [(kind, options[kind]) for kind in (DrainKind.CARD, DrainKind.HOST) if options[kind]]
        if not asked:
            raise CommandError("Name an engine, a card or a host.")
        try:
            subjects = [drains.named(kind, name) for kind, name in asked]
            if options["serve"]:
                for subject in subjects:
                    again = drains.serve_again(subject)
                    self.stdout.write(f"{subject.name} {'takes' if again else 'takes already'} requests.")
            elif options["go"]:
                self._go(subjects, options["stop"])
            else:
                async_to_sync(self._preview)(subjects)
        except EngineError as error:
            raise CommandError(error.message) from error

    async def _preview(self, subjects: list[Subject]) -> None:
        try:
            seen = await evacuation.preview({engine_id for subject in subjects for engine_id in subject.engine_ids})
        finally:
            await close_client_session()
        for move in seen.moves:
            self.stdout.write(foretold(move))
        for name in seen.silent:
            self.stdout.write(f"{name}: {drain_moves.SILENT}")
        if not seen.moves and not seen.silent:
            self.stdout.write("No conversation is held there.")

    def _go(self, subjects: list[Subject], stops: bool) -> None:
        # All are closed before anything moves, so that nothing moves from one to another.
        begun = [drains.begin(subject, stops=stops, send=False) for subject in subjects]
        ended = [async_to_sync(self._carried_on)(drain_id) for drain_id in begun]
        for drain in ended:
            then = "and stops when it is done" if drain.stops else "until it is told to --serve"
            self.stdout.write(f"{drain.subject}: {len(drain.of('moved'))} moved; it takes nothing new {then}.")
        left = sum(len(drain.of("stays")) for drain in ended)
        if left:
            raise CommandError(f"{left} stay.")

    async def _carried_on(self, drain_id: int) -> DrainView:
        try:
            await drain_moves.carry_on(drain_id, tell=lambda moved: self.stdout.write(said(moved)))
            return await in_db(drains.view, drain_id)
        finally:
            await close_client_session()


def foretold(move: PlannedMove) -> str:
    what = f"{move.session[:16]}  {move.tokens:>7} tokens  {move.source}"
    if not move.target:
        return f"{what}  stays: {move.reason}"
    size = "?" if move.foretold_bytes is None else f"{move.foretold_bytes / 1e6:.1f} MB"
    pause = "?" if move.foretold_pause_ms is None else f"{move.foretold_pause_ms:.1f} ms"
    return f"{what} → {move.target}  about {size}, " + (f"pause {pause}" if move.running else "idle")


def said(moved: Moved) -> str:
    what = f"{moved.session[:16]}  {moved.tokens:>7} tokens  {moved.source}"
    if moved.outcome == "saved":
        return f"{what} → {moved.target}"
    if moved.outcome != "moved":
        return f"{what}  stays: {moved.reason}"
    pause = "" if moved.pause_ms is None or moved.kind == "idle" else f", pause {moved.pause_ms:.1f} ms"
    return f"{what} → {moved.target}  moved: {moved.sent_bytes / 1e6:.1f} MB sent{pause}"
