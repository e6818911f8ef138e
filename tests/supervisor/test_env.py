"""The settings table and its readers."""

import os
from pathlib import Path

import pytest

from hydra_site import env


def test_the_defaults_are_usable() -> None:
    env.check_all({})
    assert env.port("HYDRA_PORT", {}) == 9000
    assert env.address("HYDRA_BIND", {}) == "127.0.0.1"
    assert env.path("HYDRA_HOME", {}) == env.PROJECT_DIR / "var"
    assert env.count("HYDRA_MAX_BODY_BYTES", {}) == 32 << 20
    assert env.database_url({}) is None
    assert env.broker_url({}) is None
    assert env.engine_threads({}) >= 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HYDRA_PORT", "0"),
        ("HYDRA_PORT", "65536"),
        ("HYDRA_PORT", "9000x"),
        ("HYDRA_PORT", "-1"),
        ("HYDRA_BIND", "example.org"),
        ("HYDRA_MAX_BODY_BYTES", "32M"),
        ("HYDRA_ENGINE_SLOTS", "0"),
        ("HYDRA_ENGINE_CONTEXT", "1e4"),
        ("HYDRA_ENGINE_THREADS", "-2"),
        ("HYDRA_STORE_BYTES", "1000"),
        ("HYDRA_STORE_BYTES", "6G"),
        ("HYDRA_STORE_DISK_BYTES", "-1"),
        ("HYDRA_SESSION_RETENTION", "0"),
        ("HYDRA_SESSION_RETENTION", "36500"),
        ("HYDRA_LOG_LEVEL", "LOUD"),
        ("HYDRA_HOST_NAME", "***"),
        ("DATABASE_URL", "mysql://u:secret@h/d"),
        ("DATABASE_URL", "postgresql://u:secret@h:99999/d"),
        ("BROKER_URL", "amqp://u:secret@h"),
        ("BROKER_URL", "redis://"),
    ],
)
def test_a_value_that_cannot_be_used_is_named_with_a_hint(name: str, value: str) -> None:
    with pytest.raises(env.SettingError) as caught:
        env.check_all({name: value})
    assert caught.value.name == name
    assert caught.value.hint
    assert "secret" not in str(caught.value)


def test_readers_give_values_of_their_kind() -> None:
    assert env.path("HYDRA_HOME", {"HYDRA_HOME": "/srv/hydra/../h"}) == Path("/srv/h")
    assert env.address("HYDRA_BIND", {"HYDRA_BIND": "[::1]"}) == "::1"
    assert env.address("HYDRA_BIND", {"HYDRA_BIND": "localhost"}) == "127.0.0.1"
    assert env.log_level("HYDRA_LOG_LEVEL", {"HYDRA_LOG_LEVEL": "debug"}) == "DEBUG"
    assert env.host_name({"HYDRA_HOST_NAME": "Gpu Box_1.lan"}) == "gpu-box-1-lan"
    assert env.engine_threads({"HYDRA_ENGINE_THREADS": "3"}) == 3
    assert env.text("HYDRA_DEFAULT_MODEL", {"HYDRA_DEFAULT_MODEL": "  "}) == "smollm2-135m"


def test_a_store_has_a_share_of_the_memory_unless_told_otherwise() -> None:
    shared = os.statvfs("/dev/shm")
    assert 0 <= env.store_bytes({}) <= shared.f_frsize * shared.f_blocks // env.STORE_SHARE
    assert env.store_bytes({"HYDRA_STORE_BYTES": "0"}) == 0
    assert env.store_bytes({"HYDRA_STORE_BYTES": str(1 << 30)}) == 1 << 30


def test_a_name_outside_the_table_is_a_mistake_of_ours() -> None:
    with pytest.raises(KeyError):
        env.text("HYDRA_NOTHING", {})
