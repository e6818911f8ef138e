"""One-time tokens, what they are exchanged for, and what a joined host may do with it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis
from django.contrib.auth import get_user_model
from django.db import connection
from django.db.models.functions import Now
from django.test import AsyncClient, Client
from django.urls import reverse
from psycopg.conninfo import make_conninfo

from engines.models import Engine
from hydra_site import host_grants, joining
from hydra_site.joinable import why_not_joinable
from hydra_site.supervisor.home import Services
from pools import host_access, host_services, join_tokens
from pools.choices import HostDuty
from pools.errors import HostNameTaken, JoinTokenInvalid, PoolNotJoinable
from pools.models import Host, JoinToken
from pools.release import this_release
from sessions import drains
from sessions.choices import DrainKind
from tests.rows import CPU, HOST, add_engine, add_model, set_ready
from tests.synthetic_gguf import SyntheticModel

OUTSIDE = ("postgresql://hydra:secret@db.lan/hydra", "redis://:secret@10.0.0.5:6379/0")


@pytest.fixture
def joinable(settings: Any) -> None:
    """As if DATABASE_URL and BROKER_URL named outside servers."""
    settings.HYDRA_NOT_JOINABLE = ""


def wish(token: str, /, **other: Any) -> dict[str, Any]:
    release = this_release()
    values = {"host_name": "second", "address": "10.0.0.7", "version": release.version, "schema_digest": release.schema}
    return {"token": token, **values} | other


async def post(values: Any, **headers: Any) -> tuple[int, dict[str, Any]]:
    body = values if isinstance(values, str) else json.dumps(values)
    answer = await AsyncClient().post("/v1/hosts/join", body, content_type="application/json", **headers)
    return answer.status_code, answer.json()


@pytest.mark.parametrize(
    ("database_url", "broker_url", "words"),
    [
        (None, OUTSIDE[1], "DATABASE_URL is not set"),
        (OUTSIDE[0], None, "BROKER_URL is not set"),
        ("postgresql://u:p@127.0.0.1/hydra", OUTSIDE[1], "127.0.0.1"),
        ("postgresql:///hydra?host=/run/postgresql", OUTSIDE[1], "/run/postgresql"),
        ("postgresql://u:p@db.lan,localhost/hydra", OUTSIDE[1], "localhost"),
        (OUTSIDE[0], "redis://:p@[::1]:6379/0", "::1"),
        (OUTSIDE[0], "redis://:p@0.0.0.0:6379/0", "0.0.0.0"),
    ],
)
def test_servers_that_others_cannot_reach_are_refused_with_their_name(
    database_url: str | None, broker_url: str | None, words: str
) -> None:
    assert words in why_not_joinable(database_url, broker_url)
    assert "p@" not in why_not_joinable(database_url, broker_url)
    assert why_not_joinable(*OUTSIDE) == ""


@pytest.mark.django_db
def test_embedded_servers_make_no_token_and_say_what_to_do(settings: Any) -> None:
    settings.HYDRA_NOT_JOINABLE = why_not_joinable(None, None)
    with pytest.raises(PoolNotJoinable, match="never leaves loopback") as caught:
        join_tokens.create()
    assert "docs/many-hosts.md" in caught.value.hint


@pytest.mark.django_db
def test_a_token_lets_one_machine_in_once(joinable: None) -> None:
    token_id, token = join_tokens.create("the one with the P100")
    assert token not in str(JoinToken.objects.values())
    host_id = join_tokens.redeem(token, "second", "10.0.0.7")
    host = Host.objects.get(pk=host_id)
    assert (host.name, host.address, host.state, host.duty) == ("second", "10.0.0.7", "lost", "active")
    with pytest.raises(JoinTokenInvalid):
        join_tokens.redeem(token, "third", "10.0.0.8")
    assert not Host.objects.filter(name="third").exists()
    (view,) = join_tokens.tokens()
    assert (view.id, view.used_by, view.is_open) == (token_id, "second", False)


@pytest.mark.django_db
def test_tokens_that_ended_or_were_revoked_let_nobody_in(joinable: None) -> None:
    first_id, first = join_tokens.create()
    _, second = join_tokens.create()
    assert join_tokens.revoke(first_id)
    assert not join_tokens.revoke(first_id)
    JoinToken.objects.filter(prefix=second[: join_tokens.PREFIX_CHARS]).update(expires_at=Now() - timedelta(seconds=1))
    for token in (first, second, "", "hydra-join-made-up"):
        with pytest.raises(JoinTokenInvalid):
            join_tokens.redeem(token, "second", "10.0.0.7")


@pytest.mark.django_db
def test_a_name_is_given_to_another_machine_only_when_its_host_is_gone(joinable: None) -> None:
    site = host_services.record_probe("first", HOST, [CPU])
    Host.objects.filter(pk=site).update(state="lost")
    with pytest.raises(HostNameTaken):
        join_tokens.redeem(join_tokens.create()[1], "first", "10.0.0.7")
    second = join_tokens.redeem(join_tokens.create()[1], "second", "10.0.0.7")
    host_access.record(second, database_role="r", broker_user="u", broker_password_digest="d")
    host_services.record_probe("second", HOST, [CPU])
    token = join_tokens.create()[1]
    with pytest.raises(HostNameTaken):
        join_tokens.redeem(token, "second", "10.0.0.8")
    Host.objects.filter(pk=second).update(state="lost")
    assert join_tokens.redeem(token, "second", "10.0.0.8") == second


@pytest.mark.django_db(transaction=True)
async def test_the_exchange_refuses_in_the_apis_own_shape_and_uses_no_token_up(settings: Any) -> None:
    settings.ALLOWED_HOSTS = ["testserver"]
    settings.HYDRA_NOT_JOINABLE = ""
    from pools.db import in_db

    _, token = await in_db(join_tokens.create)
    status, answer = await post(wish("hydra-join-no"))
    assert (status, answer["error"]["code"], answer["error"]["type"]) == (
        401,
        "join_token_invalid",
        "authentication_error",
    )
    status, answer = await post(wish(token, schema_digest="other"))
    assert (status, answer["error"]["code"]) == (409, "release_differs")
    settings.HYDRA_NOT_JOINABLE = why_not_joinable(None, None)
    status, answer = await post(wish(token))
    assert (status, answer["error"]["code"]) == (409, "pool_not_joinable")
    assert "docs/many-hosts.md" in answer["error"]["hint"]
    for field, value in (
        ("host_name", "Not A Name"),
        ("address", "0.0.0.0"),
        ("address", "db.lan"),
        ("token", 7),
        ("x", 1),
    ):
        assert (await post(wish(token, **{field: value})))[0] == 400, field
    assert (await post("[1"))[0] == 400
    assert (await post("[1]"))[0] == 400
    assert (await post(wish(token), headers={"Origin": "https://evil.example"}))[0] == 403
    assert (await in_db(join_tokens.tokens))[0].is_open
    assert await in_db(Host.objects.count) == 0


@pytest.fixture
def broker(servers: Services, monkeypatch: pytest.MonkeyPatch) -> Iterator[redis.Redis]:
    assert servers.broker_url is not None
    client = redis.Redis.from_url(servers.broker_url, decode_responses=True)
    yield client
    for user in client.execute_command("ACL", "USERS"):
        if user.startswith("hydra-host-"):
            client.execute_command("ACL", "DELUSER", user)
    client.close()


@pytest.fixture
def outside(joinable: None, servers: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded servers under their own URLs, as if an operator had set them."""
    monkeypatch.setenv("DATABASE_URL", servers.database_url + "?sslmode=prefer&sslcert=/site/only.pem&sslpassword=own")
    monkeypatch.setenv("BROKER_URL", str(servers.broker_url))


@pytest.mark.django_db(transaction=True)
def test_a_host_gets_a_role_and_a_user_that_may_do_its_work_and_nothing_else(
    outside: None, broker: redis.Redis
) -> None:
    host_id = join_tokens.redeem(join_tokens.create()[1], "second", "10.0.0.7")
    granted = host_grants.grant(host_id, "second")
    try:
        assert "sslcert" not in granted.database_url and "sslpassword" not in granted.database_url
        assert "sslmode=prefer" in granted.database_url
        _check_database(granted.database_url)
        _check_broker(granted.broker_url)

        # A broker that restarted without an ACL file has forgotten the user; its password was never kept.
        broker.execute_command("ACL", "DELUSER", "hydra-host-second")
        assert host_grants.restore_broker_users() == 1
        assert host_grants.restore_broker_users() == 0
        with redis.Redis.from_url(granted.broker_url) as client:
            assert client.ping()

        # To join again means new passwords; the old ones are worth nothing.
        again = host_grants.grant(host_id, "second")
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(_test_database(granted.database_url))
        psycopg.connect(_test_database(again.database_url)).close()
    finally:
        assert host_grants.revoke(host_id)
    # Beat looks for users that the broker has lost: one that was taken back is none of them.
    assert host_grants.restore_broker_users() == 0
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(_test_database(again.database_url))
    with redis.Redis.from_url(again.broker_url) as client, pytest.raises(redis.AuthenticationError):
        client.ping()
    _drop_group()


def _drop_group() -> None:
    """Nothing of the test stays in the cluster that the whole run shares."""
    with connection.cursor() as cursor:
        cursor.execute(f'DROP OWNED BY "{host_grants._group_name()}"; DROP ROLE "{host_grants._group_name()}"')


def _test_database(url: str) -> str:
    return make_conninfo(url, dbname=connection.settings_dict["NAME"], sslmode="disable")


def _check_database(url: str) -> None:
    with psycopg.connect(_test_database(url), autocommit=True) as database:
        database.execute("UPDATE pools_host SET load_1m = 1 WHERE name = 'second'")
        database.execute(
            "INSERT INTO pools_reservation (resource, owner, purpose, reserved_at, expires_at) "
            "VALUES ('x', 'y', '', now(), now())"
        )
        database.execute("DELETE FROM pools_reservation")
        database.execute("SELECT * FROM engines_engine")
        # What heads do with conversations: find them by key, lock them, write where they are; never read what they are about.
        database.execute("SELECT key_hash, engine_id FROM hydra_sessions_chatsession FOR NO KEY UPDATE")
        database.execute("UPDATE hydra_sessions_chatsession SET wanted_engine_id = NULL WHERE key_hash = 'x'")
        for forbidden in (
            "SELECT title FROM hydra_sessions_chatsession",
            "SELECT * FROM hydra_sessions_chatsession",
            "UPDATE hydra_sessions_chatsession SET title = ''",
            "SELECT * FROM auth_user",
            "SELECT * FROM hydra_sessions_apikey",
            "SELECT * FROM hydra_sessions_turn",
            "SELECT * FROM django_session",
            "SELECT * FROM pools_jointoken",
            "SELECT * FROM pools_hostaccess",
            "DELETE FROM pools_host",
            "INSERT INTO engines_engine (name) VALUES ('x')",
            "CREATE TABLE mine (id int)",
            "CREATE ROLE another",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                database.execute(forbidden)


def _check_broker(url: str) -> None:
    with redis.Redis.from_url(url, decode_responses=True) as client:
        client.lpush("host.second.fast", "a task")
        assert client.brpop(["host.second.fast"], timeout=1)
        client.hset("unacked.second.messages", "1", "x")
        client.delete("unacked.second.messages")
        client.lpush("control", "a task")
        for forbidden in (
            lambda: client.lrange("control", 0, -1),
            lambda: client.lpush("host.first.fast", "a task"),
            lambda: client.lpush("host.second2.fast", "a task"),
            lambda: client.hgetall("unacked.first.messages"),
            lambda: client.keys("*"),
            client.flushall,
            lambda: client.config_get("requirepass"),
            lambda: client.execute_command("ACL", "LIST"),
        ):
            with pytest.raises(redis.exceptions.NoPermissionError):
                forbidden()
    with (
        redis.Redis.from_url(url.replace("hydra-host-second", "default")) as client,
        pytest.raises(redis.AuthenticationError),
    ):
        client.ping()


@pytest.mark.django_db
def test_a_host_leaves_in_steps_that_only_lead_forward_once_it_retires(joinable: None) -> None:
    own = host_services.record_probe("first", HOST, [CPU])
    assert host_services.change_duty(own, HostDuty.DRAINING)
    assert not host_services.change_duty(own, HostDuty.DRAINING)
    assert not host_services.change_duty(own, HostDuty.RETIRING), "the site's own host has nothing to give back"
    assert host_services.change_duty(own, HostDuty.ACTIVE)
    joined = join_tokens.redeem(join_tokens.create()[1], "second", "10.0.0.7")
    host_access.record(joined, database_role="r", broker_user="u", broker_password_digest="d")
    assert not host_services.finish_retirement(joined)
    assert host_services.change_duty(joined, HostDuty.RETIRING)
    assert not host_services.change_duty(joined, HostDuty.DRAINING), "it leaves, whatever an older page says"
    assert set(host_services.leaving_host_ages_s()) == {"second"}
    # Its role and broker user go when it retires; with its row they would only be forgotten.
    Host.objects.filter(pk=joined).update(state="lost")
    assert not host_services.may_be_deleted(joined)
    assert host_services.finish_retirement(joined)
    assert host_services.may_be_deleted(joined) and not host_services.may_be_deleted(own)
    assert not host_services.change_duty(joined, HostDuty.ACTIVE)
    assert host_services.host_names() == ["first"]
    with pytest.raises(ValueError, match="retired"):
        host_services.change_duty(own, HostDuty.RETIRED)


@pytest.mark.django_db(transaction=True)
def test_a_host_that_was_lost_while_it_drained_serves_when_it_joins_again(
    outside: None, broker: redis.Redis, tmp_path: Path, tiny_model: Callable[..., SyntheticModel]
) -> None:
    engine = add_engine(add_model(tiny_model("llama").path, tmp_path), host_name="second")
    set_ready(engine, 1)
    host_access.record(engine.host_id, database_role="r", broker_user="u", broker_password_digest="d")
    drain_id = drains.begin(drains.subject_of(DrainKind.HOST, engine.host_id), stops=True, send=False)
    Host.objects.update(state="lost")
    assert not Engine.objects.get().takes_new
    try:
        joining.admit(joining.JoinBody(**wish(join_tokens.create()[1])))
        assert (Host.objects.get().duty, Engine.objects.get().takes_new) == ("active", True)
        assert not drains.view(drain_id).is_open
    finally:
        host_grants.revoke(engine.host_id)
        _drop_group()


@pytest.mark.django_db
def test_the_admin_shows_a_token_once_and_says_how_to_use_it(client: Client, settings: Any) -> None:
    settings.ALLOWED_HOSTS = ["testserver"]
    settings.HYDRA_NOT_JOINABLE = why_not_joinable(None, None)
    client.force_login(get_user_model().objects.create_superuser("admin", password="a password"))
    form = {"note": "the one with the P100", "minutes": "30"}
    answer = client.post(reverse("admin:pools_jointoken_add"), form)
    assert "never leaves loopback" in answer.content.decode()
    settings.HYDRA_NOT_JOINABLE = ""
    answer = client.post(reverse("admin:pools_jointoken_add"), form, follow=True)
    text = answer.content.decode()
    assert "manage.py head --join http://testserver --token hydra-join-" in text
    token = text.partition("--token ")[2].split("<")[0].strip()
    row = JoinToken.objects.get()
    assert row.digest == hashlib.sha256(token.encode()).hexdigest()
    assert token not in client.get(reverse("admin:pools_jointoken_changelist")).content.decode()
