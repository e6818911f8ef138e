"""`manage.py bootstrap`: brings the database of a home to where this release and the settings want it.

Runs at every start, before anything else writes. Its last line of output is one JSON object: `admin_created`,
`admin_password` (only when it was made up here), `api_keys` (how many open the API) and `notes` (lines for who starts it).
"""

import json
import secrets
import string
from pathlib import Path
from typing import Any

from django.conf import settings
from django.contrib.auth import get_user_model
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError

from engines import services as engines
from hydra_site import env, host_grants
from hydra_site.host_start import start_host
from hydra_site.native_builds import ask_for_builds
from pools import catalogue, fetch, job_runner
from pools import services as pools
from pools.errors import ModelUnknown, PoolError
from pools.probe import read_gpus, read_host
from pools.services import VariantView
from sessions import api_keys
from sessions import services as sessions

ADMIN_NAME = "admin"
PASSWORD_CHARS = 20
# Without these, nothing can be misread when the password is copied by hand.
PASSWORD_ALPHABET = "".join(c for c in string.ascii_letters + string.digits if c not in "0O1lI")


class Command(BaseCommand):
    help = "Migrate, and write the admin user, this host, the default model and its engine."
    requires_system_checks: list[str] = []

    def handle(self, *args: Any, **options: Any) -> None:
        call_command("migrate", interactive=False, verbosity=0)
        host_grants.refresh_grants()
        created, password = make_admin()
        devices = read_gpus()
        pools.record_probe(settings.HYDRA_HOST_NAME, read_host(), devices)
        host_id = pools.join_host(settings.HYDRA_HOST_NAME, settings.HYDRA_ENGINE_HOST)
        make_engine(host_id, register_default_model())
        sessions.sweep_turns()
        start_host()
        notes = ask_for_builds(settings.HYDRA_HOST_NAME, Path(settings.HYDRA_HOME), devices)
        admin = {"admin_created": created, "admin_password": password}
        self.stdout.write(json.dumps({**admin, "api_keys": api_keys.count_valid_keys(), "notes": notes}))


def make_admin() -> tuple[bool, str | None]:
    """Make the first admin user, if there is none yet. Returns whether it was made, and the password if it was made up."""
    users = get_user_model().objects
    if users.filter(is_superuser=True).exists():
        return False, None
    given = env.text("HYDRA_ADMIN_PASSWORD")
    password = given or "".join(secrets.choice(PASSWORD_ALPHABET) for _ in range(PASSWORD_CHARS))
    users.create_superuser(ADMIN_NAME, password=password)
    return True, None if given else password


def register_default_model() -> VariantView:
    """Write the default model's row from its file in models/, or find it among those registered by path."""
    name = env.text("HYDRA_DEFAULT_MODEL")
    models_dir = Path(settings.HYDRA_HOME) / "models"
    try:
        entry = catalogue.lookup(name)
        model = catalogue.inspect(catalogue.ensure_entry(entry, models_dir), models_dir)
    except ModelUnknown as error:
        return _model_of_a_hub(name, models_dir) if fetch.is_known(name) else _registered(name, error)
    except PoolError as error:
        raise CommandError(f"{error.message} ({error.hint})") from error
    return pools.register_gguf(
        name,
        model.header.path,
        header=model.header,
        content_digest=model.sha256,
        display_name=entry.display_name,
        defaults=entry.defaults,
        make_default=True,
        source=entry.name,
        is_verified=True,
        host_name=settings.HYDRA_HOST_NAME,
    )


def _model_of_a_hub(name: str, models_dir: Path) -> VariantView:
    """A model of the catalogue that a hub has: as it was registered before, else by the file that was just fetched."""
    model_name = fetch.default_name(name)
    variant = pools.find_variant(model_name)
    if variant is None:
        try:
            fetched = fetch.fetch(name, models_dir, lambda stage, done, total: None)
            job_runner.register(fetched, settings.HYDRA_HOST_NAME, model_name, models_dir)
        except PoolError as error:
            raise CommandError(f"{error.message} ({error.hint})") from error
        variant = pools.find_variant(model_name)
        assert variant is not None
    pools.set_default_model(model_name)
    return variant


def _registered(name: str, error: ModelUnknown) -> VariantView:
    variant = pools.find_variant(name)
    if variant is None:
        raise CommandError(f"HYDRA_DEFAULT_MODEL={name}: {error}") from error
    pools.set_default_model(name)
    return variant


def make_engine(host_id: int, variant: VariantView) -> None:
    """Write this host's CPU engine for the default model, as the settings want it."""
    wished = env.count("HYDRA_ENGINE_CONTEXT", minimum=16)
    cpu = pools.cpu_of(settings.HYDRA_HOST_NAME)
    engines.ensure_engine(
        engines.default_engine_name(host_id, settings.HYDRA_HOST_NAME),
        host_id=host_id,
        gpu_id=None if cpu is None else cpu[1],
        variant_id=variant.variant_id,
        slots=env.count("HYDRA_ENGINE_SLOTS", minimum=1),
        context_tokens=min(wished, variant.context_train_tokens or wished),
        threads=env.engine_threads(),
    )
