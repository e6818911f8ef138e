"""`manage.py drain`: moves all conversations off engines, a card or a host; without `--go` it only says what would move where."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from asgiref.sync import async_to_sync
from django.core.management.base import BaseCommand, CommandError, CommandParser

from engines.client import close_client_session
from engines.errors import EngineError
from pools.db import in_db
from sessions import drain_moves, drains, evacuation
from sessions.choices import DrainKind, DrainState
from sessions.drains import DrainView, Moved, Subject
from sessions.evacuation import PlannedMove

# Where a worker has taken a drain up, it is waited for; nobody is for longer.
LOOK_S = 1.0
PATIENCE_S = 3600.0


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
        for model in seen.unserved:
            self.stdout.write(f"No other engine serves {model}: its requests wait for a load elsewhere, or get 503.")
        if not seen.moves and not seen.silent:
            self.stdout.write("No conversation is held there.")

    def _go(self, subjects: list[Subject], stops: bool) -> None:
        # All are closed before anything moves, so that nothing moves from one to another.
        begun = drains.begin_all(subjects, stops=stops)
        ended = [async_to_sync(self._carried_on)(drain_id) for drain_id in begun]
        for drain in ended:
            then = "and stops when it is done" if drain.stops else "until it is told to --serve"
            then = f"it takes nothing new {then}"
            if drain.state == DrainState.ENDED:
                then = "somebody else ended its drain"
            self.stdout.write(f"{drain.subject}: {len(drain.of('moved'))} moved; {then}.")
        left = sum(len(drain.of("stays")) for drain in ended)
        kept = sum(len(drain.of("saved")) for drain in ended if drain.kind == DrainKind.HOST)
        if left:
            raise CommandError(f"{left} stay.")
        if kept:
            raise CommandError(f"{kept} are saved in their own host's store only.")

    async def _carried_on(self, drain_id: int) -> DrainView:
        told: set[str] = set()

        def tell(moved: Moved) -> None:
            told.add(moved.session)
            self.stdout.write(said(moved))

        until = time.monotonic() + PATIENCE_S
        try:
            # Another process may be at it: it is done when it is over, whoever did it.
            while not await drain_moves.carry_on(drain_id, tell=tell):
                if time.monotonic() > until:
                    raise CommandError(f"Drain {drain_id} still goes on; its page tells how far it is.")
                await asyncio.sleep(LOOK_S)
            drain = await in_db(drains.view, drain_id)
        finally:
            await close_client_session()
        for moved in drain.moves:
            if moved.session not in told:
                self.stdout.write(said(moved))
        return drain


def foretold(move: PlannedMove) -> str:
    what = f"{move.session[:16]}  {move.tokens:>7} tokens  {move.source}"
    if move.choices > 1:
        what += f"  {move.choices} choices"
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
