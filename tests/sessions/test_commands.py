"""`manage.py bootstrap`, `apikey` and `pull`: of each one run as a person or the supervisor runs it, the others in here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.contrib.auth import get_user_model
from django.core.management import CommandError, call_command
from django.db import connection, connections

from engines.models import Engine
from hydra_site.supervisor.home import Services
from pools.hub_catalogue import HUB_MODELS
from pools.models import Gpu, Host, Model
from sessions import api_keys
from tests.conftest import PulledModel
from tests.local_hub import LocalHub
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db(transaction=True)

ROOT = Path(__file__).resolve().parent.parent.parent
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def manage(db: None, servers: Services, tmp_path: Path) -> Run:
    """Runs `manage.py` with the test database and a home of its own."""
    url, _, _ = servers.database_url.rpartition("/")
    environ = {
        **os.environ,
        "HYDRA_HOME": str(tmp_path / "home"),
        "HYDRA_HOST_NAME": "here",
        "DATABASE_URL": f"{url}/{connection.settings_dict['NAME']}",
        "BROKER_URL": str(servers.broker_url),
    }

    def run(*argv: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "manage.py", *argv]
        return subprocess.run(
            command, cwd=ROOT, env={**environ, **more}, capture_output=True, text=True, timeout=120, check=False
        )

    return run


@pytest.fixture
def call(
    manage: Run, servers: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., str]]:
    """Runs a command in this process, which has the test database as its DATABASE_URL; returns its standard output."""
    kept, values = connections["default"], dict(settings.DATABASES["default"])
    url, _, _ = servers.database_url.rpartition("/")
    monkeypatch.setenv("DATABASE_URL", f"{url}/{values['NAME']}")
    monkeypatch.setattr(settings, "HYDRA_HOME", tmp_path / "home")

    def run(*argv: str) -> str:
        said = StringIO()
        call_command(*argv, stdout=said, stderr=StringIO())
        return said.getvalue()

    yield run
    connections["default"].close()
    settings.DATABASES["default"].clear()
    settings.DATABASES["default"].update(values)
    connections["default"] = kept


def outcome(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    values: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return values


def test_bootstrap_writes_admin_host_model_and_engine_and_can_be_repeated(
    manage: Run, pulled_smollm2: PulledModel, tmp_path: Path
) -> None:
    shutil.copytree(pulled_smollm2.models_dir, tmp_path / "home" / "models", copy_function=os.link)
    first = outcome(manage("bootstrap", HYDRA_ENGINE_CONTEXT="100000", HYDRA_ENGINE_SLOTS="3"))
    assert (first["admin_created"], first["api_keys"]) == (True, 0)
    admin = get_user_model().objects.get()
    assert admin.check_password(first["admin_password"])
    engine = Engine.objects.get()
    assert (engine.name, engine.wanted, engine.slots, engine.epoch) == ("cpu-0", "running", 3, 1)
    assert engine.context_tokens == 8192, "clipped to what the model was trained for"
    assert (engine.host.name, engine.gpu, Host.objects.count()) == ("here", Gpu.objects.get(kind="cpu"), 1)
    assert (Model.objects.get().name, Model.objects.get().is_default) == ("smollm2-135m", True)

    second = outcome(manage("bootstrap", HYDRA_ENGINE_CONTEXT="512", HYDRA_ADMIN_PASSWORD="other"))
    assert second == {"admin_created": False, "admin_password": None, "api_keys": 0, "notes": []}
    assert Engine.objects.get().context_tokens == 512
    admin.refresh_from_db()
    assert not admin.check_password("other")


@pytest.mark.soak
def test_bootstrap_takes_the_given_password_and_a_model_that_was_pulled_by_path(
    manage: Run, tiny_model: Callable[..., SyntheticModel]
) -> None:
    unknown = manage("bootstrap", HYDRA_DEFAULT_MODEL="mine")
    assert unknown.returncode == 1
    assert "HYDRA_DEFAULT_MODEL=mine" in unknown.stderr
    get_user_model().objects.all().delete()
    assert manage("pull", str(tiny_model("llama").path), "--name", "mine").returncode == 0
    done = outcome(manage("bootstrap", HYDRA_DEFAULT_MODEL="mine", HYDRA_ADMIN_PASSWORD="a password"))
    assert (done["admin_created"], done["admin_password"]) == (True, None)
    assert get_user_model().objects.get().check_password("a password")
    assert Engine.objects.get().variant.model.name == "mine"


@pytest.mark.soak
def test_the_default_model_may_come_from_a_hub_which_is_asked_only_once(
    manage: Run, tiny_model: Callable[..., SyntheticModel], tmp_path: Path
) -> None:
    entry = HUB_MODELS[0]
    name, file = f"{entry.name}:{entry.variants[0].quant}", entry.variants[0].file
    models = tmp_path / "home" / "models"
    fetch = [sys.executable, "-m", "hydra_site.supervisor.pull", name, str(models)]
    with LocalHub(files={(entry.repo, file): tiny_model("llama").path.read_bytes()}) as hub:
        asked = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}
        subprocess.run(fetch, cwd=ROOT, env={**os.environ, **asked}, check=True, stdout=subprocess.DEVNULL, timeout=60)
        outcome(manage("bootstrap", HYDRA_DEFAULT_MODEL=name, **asked))
    model = Model.objects.get()
    assert (model.name, model.is_default, model.kv_family) == (entry.name, True, entry.kv_family)
    assert Engine.objects.get().variant.is_verified
    gone = {"HF_ENDPOINT": "http://127.0.0.1:1"}
    subprocess.run(fetch, cwd=ROOT, env={**os.environ, **gone}, check=True, timeout=60)
    outcome(manage("bootstrap", HYDRA_DEFAULT_MODEL=name, **gone))


def test_pull_shows_the_header_and_registers_a_local_file(
    manage: Run, tiny_model: Callable[..., SyntheticModel]
) -> None:
    done = manage("pull", str(tiny_model("llama").path), "--name", "mine")
    assert done.returncode == 0, done.stderr
    assert "llama" in done.stdout
    assert "mine is registered." in done.stdout
    assert Model.objects.get().name == "mine"


@pytest.mark.parametrize("argument", ["no-such-model", "/no/such/file.gguf", "manage.py/"])
def test_pull_says_in_one_line_what_is_wrong(call: Callable[..., str], argument: str) -> None:
    with pytest.raises(CommandError) as refused:
        call("pull", argument)
    assert len(str(refused.value).splitlines()) == 1
    assert not Model.objects.exists()


def test_a_key_is_made_listed_and_revoked(manage: Run, call: Callable[..., str]) -> None:
    key = manage("apikey", "create", "laptop", "--expires-days", "1").stdout.strip()
    found = api_keys.find_key(key)
    assert found is not None
    assert found.is_valid
    assert found.expires_at is not None
    listed = call("apikey", "list")
    assert "laptop" in listed
    assert key not in listed
    call("apikey", "revoke", found.prefix)
    again = api_keys.find_key(key)
    assert again is not None
    assert not again.is_valid
    with pytest.raises(CommandError, match="no open keys begin with"):
        call("apikey", "revoke", found.prefix)


def test_without_a_database_commands_that_need_none_work_and_others_say_what_to_do(manage: Run) -> None:
    lonely = {"DATABASE_URL": "", "BROKER_URL": ""}
    assert manage("check", **lonely).returncode == 0
    refused = manage("showmigrations", **lonely)
    assert refused.returncode == 1
    assert "no database is known: start Hydra with `make run`" in refused.stderr
