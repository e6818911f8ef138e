"""`manage.py jointoken create | list | revoke PREFIX`: one-time tokens with which machines join this pool."""

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from hydra_site.management.database import borrowed_database
from pools import join_tokens
from pools.errors import JoinError


class Command(BaseCommand):
    help = "Make, list and revoke one-time tokens for hosts that join. A token is printed once, when it is made."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True)
        create = actions.add_parser("create", help="make a token and print it")
        create.add_argument("--note", default="", help="what it is for")
        create.add_argument(
            "--minutes",
            type=int,
            default=join_tokens.DEFAULT_MINUTES,
            metavar="N",
            help=f"let it end after N minutes (default {join_tokens.DEFAULT_MINUTES})",
        )
        actions.add_parser("list", help="show all tokens without their secrets")
        revoke = actions.add_parser("revoke", help="make a token useless that nobody has used")
        revoke.add_argument("prefix", help="its first characters, as `list` shows them")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            with borrowed_database():
                self._act(options)
        except JoinError as error:
            raise CommandError(f"{error.message} {error.hint}") from error

    def _act(self, options: dict[str, Any]) -> None:
        if options["action"] == "create":
            self._create(options["note"], options["minutes"])
        elif options["action"] == "revoke":
            self._revoke(options["prefix"])
        else:
            for token in join_tokens.tokens():
                state = f"used by {token.used_by}" if token.used_at else "open" if token.is_open else "ended"
                self.stdout.write(f"{token.prefix}…  {state:24}  ends {token.expires_at:%Y-%m-%d %H:%M}  {token.note}")

    def _create(self, note: str, minutes: int) -> None:
        try:
            _, token = join_tokens.create(note, minutes)
        except ValueError as error:
            raise CommandError(str(error)) from error
        self.stderr.write("This token is shown only this once, and lets one machine in:")
        self.stdout.write(token)

    def _revoke(self, prefix: str) -> None:
        found = [token for token in join_tokens.tokens() if token.is_open and token.prefix.startswith(prefix[:16])]
        if len(found) != 1 or not prefix:
            raise CommandError(f"{len(found) or 'no'} open tokens begin with {prefix!r}; `jointoken list` shows them")
        join_tokens.revoke(found[0].id)
        self.stdout.write(f"revoked {found[0].prefix}…")
