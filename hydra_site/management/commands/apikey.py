"""`manage.py apikey create NAME | list | revoke PREFIX`: keys for the API, without the admin."""

from argparse import ArgumentParser
from datetime import timedelta
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.utils import timezone

from hydra_site.management.database import borrowed_database
from sessions import api_keys

MAX_DAYS = 36500


class Command(BaseCommand):
    help = "Make, list and revoke API keys. A key is printed once, when it is made."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True)
        create = actions.add_parser("create", help="make a key and print it")
        create.add_argument("name", help="what the key is for")
        create.add_argument("--expires-days", type=int, metavar="N", help="let it expire after N days")
        actions.add_parser("list", help="show all keys without their secrets")
        revoke = actions.add_parser("revoke", help="close a key for good")
        revoke.add_argument("prefix", help="its first characters, as `list` shows them")

    def handle(self, *args: Any, **options: Any) -> None:
        with borrowed_database():
            self._act(options)

    def _act(self, options: dict[str, Any]) -> None:
        if options["action"] == "create":
            self._create(options["name"], options["expires_days"])
        elif options["action"] == "revoke":
            self._revoke(options["prefix"])
        else:
            for key in api_keys.keys_by_prefix():
                state = "open" if key.is_valid else "revoked" if key.revoked_at else "expired"
                used = f"last used {key.last_used_at:%Y-%m-%d %H:%M}" if key.last_used_at else "never used"
                self.stdout.write(f"{key.prefix}…  {state:8}  {used:27}  {key.name}")

    def _create(self, name: str, days: int | None) -> None:
        if not name.strip() or len(name) > 100:
            raise CommandError("give a name of 1 to 100 characters")
        if days is not None and not 1 <= days <= MAX_DAYS:
            raise CommandError(f"--expires-days takes 1 to {MAX_DAYS}")
        expires_at = None if days is None else timezone.now() + timedelta(days=days)
        _, key = api_keys.create_key(name.strip(), expires_at=expires_at)
        self.stderr.write("This key is shown only this once:")
        self.stdout.write(key)

    def _revoke(self, prefix: str) -> None:
        found = [key for key in api_keys.keys_by_prefix(prefix) if key.revoked_at is None] if prefix else []
        if len(found) != 1:
            raise CommandError(f"{len(found) or 'no'} open keys begin with {prefix!r}; `apikey list` shows them")
        api_keys.revoke_keys([found[0].id])
        self.stdout.write(f"revoked {found[0].prefix}… ({found[0].name})")
