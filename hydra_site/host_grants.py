"""What a joined host may do in PostgreSQL and in the broker: a role and a user of its own, made and taken back by the site.

All host roles are members of one group role per database, which holds the grants: rows of hardware and engines, the snapshots
that heads write, and nothing of users, API keys, logins or answers. A host's broker user has its own two queues, the keys of its
own unacknowledged messages and the channel layer, and may only write to the queue `control`.
"""

import hashlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

import redis
from django.apps import apps
from django.conf import settings
from django.db import DatabaseError, connection, transaction
from django.db.models import Model
from psycopg import sql

from hydra_site import addresses, env
from hydra_site.supervisor.home import Home
from pools import host_access, join_tokens
from pools.errors import AccessNotGranted, PoolNotJoinable

PASSWORD_BYTES = 32
CONNECTION_LIMIT = 48
BROKER_TIMEOUT_S = 5
MAX_CA_BYTES = 1 << 18
# A path means something on one machine only, so a certificate travels as its text.
DATABASE_CA = "sslrootcert"
BROKER_CA = "ssl_ca_certs"
# The site's own files, and what opens them.
_OWN_FILES = frozenset(
    {
        *(
            "sslcert",
            "sslkey",
            "sslpassword",
            "sslcrl",
            "sslcrldir",
            "sslkeylogfile",
            "passfile",
            "service",
            "servicefile",
        ),
        *("ssl_certfile", "ssl_keyfile", "ssl_password", "ssl_ca_path", "ssl_ca_data"),
        *("user", "username", "password"),
    }
)

_READ, _WRITE, _ALL = "SELECT", "SELECT, INSERT, UPDATE", "SELECT, INSERT, UPDATE, DELETE"
# By app label: what stands under "" holds for the models that are not named; without it they are closed.
_GRANTS: dict[str, dict[str, str]] = {
    "pools": {
        "": _WRITE,
        "Reservation": _ALL,
        "GpuMinute": _ALL,
        "VariantFile": _ALL,
        "Job": _ALL,
        "JoinToken": "",
        "HostAccess": "",
    },
    "engines": {"": _ALL, "Engine": "SELECT, UPDATE"},
    "hydra_sessions": {"Snapshot": _ALL, "ChatSession": "SELECT, UPDATE", "Handoff": "SELECT, UPDATE"},
}
# Columns that no host sees: what people talk about is none of its business.
_HIDDEN = {"ChatSession": frozenset({"title"})}
_COMMANDS = ("+@all", "-@admin", "-@dangerous")


@dataclass(frozen=True)
class Granted:
    """How a host reaches its servers. The `…_ca` are certificates in PEM that its connections must be checked against, or ""."""

    database_url: str = field(repr=False)
    broker_url: str = field(repr=False)
    database_ca: str = ""
    broker_ca: str = ""


def grant(host_id: int, host_name: str) -> Granted:
    """Make (or make anew) a host's role and user, within the caller's transaction. Raises PoolNotJoinable, AccessNotGranted."""
    join_tokens.check_joinable()
    role, user = _role_name(host_name), f"hydra-host-{host_name}"
    database_password, broker_password = (secrets.token_hex(PASSWORD_BYTES) for _ in range(2))
    digest = hashlib.sha256(broker_password.encode()).hexdigest()
    try:
        with transaction.atomic():
            refresh_grants(make=True)
            _make_role(role, database_password)
    except DatabaseError as error:
        raise AccessNotGranted(f"PostgreSQL did not make the role {role}: {_first_line(error)}") from error
    host_access.record(host_id, database_role=role, broker_user=user, broker_password_digest=digest)
    _set_broker_user(user, host_name, digest)
    database_url, database_ca = _for_host(env.database_url() or "", role, database_password, DATABASE_CA)
    broker_url, broker_ca = _for_host(env.broker_url() or "", user, broker_password, BROKER_CA)
    return Granted(database_url, broker_url, database_ca, broker_ca)


def refresh_grants(*, make: bool = False) -> None:
    """Give the group role what this release's tables need; runs after every migration. Without hosts there is no group."""
    group = _group_name()
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", [group])
        if cursor.fetchone() is None:
            if not make:
                return
            cursor.execute(sql.SQL("CREATE ROLE {} NOLOGIN").format(sql.Identifier(group)))
        who, database = sql.Identifier(group), sql.Identifier(_database_name())
        cursor.execute(sql.SQL("GRANT CONNECT ON DATABASE {} TO {}").format(database, who))
        cursor.execute(sql.SQL("GRANT USAGE ON SCHEMA public TO {}").format(who))
        # What an earlier release gave and this one does not is taken back.
        cursor.execute(sql.SQL("REVOKE ALL ON ALL TABLES IN SCHEMA public FROM {}").format(who))
        for table, privileges in _table_grants():
            statement = sql.SQL("GRANT {} ON TABLE {} TO {}")
            cursor.execute(statement.format(sql.SQL(privileges), sql.Identifier(table), who))
            if "INSERT" in privileges:
                cursor.execute("SELECT pg_get_serial_sequence(%s, 'id')", [f'"{table}"'])
                if (found := cursor.fetchone()) and found[0]:
                    sequence = sql.Identifier(*found[0].replace('"', "").split("."))
                    cursor.execute(sql.SQL("GRANT USAGE ON SEQUENCE {} TO {}").format(sequence, who))


def restore_broker_users() -> int:
    """Make the broker users again that a restart of the broker has forgotten; returns how many."""
    wanted = [access for access in host_access.accesses() if access.broker_password_digest]
    if not wanted:
        return 0
    with _broker() as broker:
        known = {name.decode() if isinstance(name, bytes) else name for name in broker.execute_command("ACL", "USERS")}
    restored = 0
    for missing in [access for access in wanted if access.broker_user not in known]:
        with host_access.granted(missing.host_id) as access:
            if access is not None:  # else the host has left since
                _set_broker_user(access.broker_user, access.host_name, access.broker_password_digest)
                restored += 1
    return restored


def revoke(host_id: int) -> bool:
    """Take a host's role and user back and end its connections; False when it has none. Raises AccessNotGranted."""
    access = host_access.access_of(host_id)
    if access is None:
        return False
    try:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", [access.database_role])
            if cursor.fetchone() is not None:
                role = sql.Identifier(access.database_role)
                cursor.execute(sql.SQL("ALTER ROLE {} NOLOGIN").format(role))
                _end_connections(cursor, access.database_role)
                cursor.execute(sql.SQL("DROP ROLE {}").format(role))
    except DatabaseError as error:
        raise AccessNotGranted(
            f"PostgreSQL did not drop the role {access.database_role}: {_first_line(error)}"
        ) from error
    # First, or the next look at the broker would find the user missing and make it again.
    host_access.take_back(host_id)
    try:
        with _broker() as broker:
            broker.execute_command("ACL", "DELUSER", access.broker_user)
    except redis.RedisError as error:
        raise AccessNotGranted(f"The broker did not delete the user {access.broker_user}: {error}") from error
    return True


def broker_rules(host_name: str, password_digest: str) -> list[str]:
    """The ACL of a host's broker user, as `ACL SETUSER` takes it."""
    queues = [f"host.{host_name}.{speed}" for speed in ("fast", "slow")]
    keys = [
        *(f"~{queue}*" for queue in queues),
        *(f"~_kombu.binding*.{queue}" for queue in queues),
        # To send to `control`, a producer declares it; what waits there it cannot read.
        "~_kombu.binding*.control",
        "%W~control",
        # A worker tells that it began, to whoever may listen.
        "~_kombu.binding*.celeryev",
        f"~{unacked_prefix(host_name)}*",
        "~asgi*",
    ]
    return ["reset", "on", f"#{password_digest}", *keys, "resetchannels", "&/*.celeryev/*", *_COMMANDS]


def unacked_prefix(host_name: str) -> str:
    """What the keys begin with under which a host's workers keep messages that they have not finished."""
    return f"unacked.{host_name}."


def _table_grants() -> Iterator[tuple[str, str]]:
    yield "django_migrations", _READ
    for label, by_name in _GRANTS.items():
        for model in apps.get_app_config(label).get_models(include_auto_created=True):
            privileges = by_name.get(model.__name__, by_name.get("", ""))
            if privileges:
                yield model._meta.db_table, _without(privileges, model, _HIDDEN.get(model.__name__, frozenset()))


def _without(privileges: str, model: type[Model], hidden: frozenset[str]) -> str:
    """The privileges column by column, the `hidden` ones left out."""
    if not hidden:
        return privileges
    columns = ", ".join(f'"{field.column}"' for field in model._meta.concrete_fields if field.name not in hidden)
    return ", ".join(f"{privilege} ({columns})" for privilege in privileges.split(", "))


def _make_role(role: str, password: str) -> None:
    with connection.cursor() as cursor:
        # Only a verifier goes over the wire and into the server's log, never the password.
        pgconn = connection.connection.pgconn
        verifier = pgconn.encrypt_password(password.encode(), role.encode(), b"scram-sha-256").decode()
        cursor.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", [role])
        exists = cursor.fetchone() is not None
        statement = (
            "ALTER ROLE {} LOGIN PASSWORD {} CONNECTION LIMIT {}"
            if exists
            else ("CREATE ROLE {} LOGIN PASSWORD {} CONNECTION LIMIT {}")
        )
        values = sql.Identifier(role), sql.Literal(verifier), sql.Literal(CONNECTION_LIMIT)
        cursor.execute(sql.SQL(statement).format(*values))
        cursor.execute(sql.SQL("GRANT {} TO {}").format(sql.Identifier(_group_name()), sql.Identifier(role)))
        if exists:
            _end_connections(cursor, role)


def _end_connections(cursor: Any, role: str) -> None:
    """End what an earlier holder of the role still has open. Needs the right to; without, NOLOGIN and a new password must do."""
    try:
        with transaction.atomic():
            cursor.execute(sql.SQL("GRANT {} TO CURRENT_USER").format(sql.Identifier(role)))
            cursor.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s", [role])
            cursor.execute(sql.SQL("REVOKE {} FROM CURRENT_USER").format(sql.Identifier(role)))
    except DatabaseError as error:
        raise AccessNotGranted(f"PostgreSQL did not end the connections of {role}: {_first_line(error)}") from error


def _set_broker_user(user: str, host_name: str, password_digest: str) -> None:
    try:
        with _broker() as broker:
            broker.execute_command("ACL", "SETUSER", user, *broker_rules(host_name, password_digest))
    except redis.RedisError as error:
        raise AccessNotGranted(f"The broker did not make the user {user}: {error}") from error


def _broker() -> redis.Redis:
    url = addresses.broker_url(Home(settings.HYDRA_HOME))
    if url is None:
        raise PoolNotJoinable("This site knows no broker.")
    return redis.Redis.from_url(url, socket_timeout=BROKER_TIMEOUT_S, socket_connect_timeout=BROKER_TIMEOUT_S)


def _for_host(url: str, user: str, password: str, ca_key: str) -> tuple[str, str]:
    """`url` with a host's own user and password, without paths of this machine; and the certificate that one of them named."""
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    ca_path = query.pop(ca_key, "")
    kept = {key: value for key, value in query.items() if key not in _OWN_FILES}
    place = parts.netloc.rpartition("@")[2]
    netloc = f"{quote(user, safe='')}:{quote(password, safe='')}@{place}"
    return urlunsplit(parts._replace(netloc=netloc, query=urlencode(kept))), _certificate(ca_path)


def _certificate(path: str) -> str:
    if not path or path == "system":
        return ""
    try:
        with Path(path).open(encoding="ascii") as file:
            return file.read(MAX_CA_BYTES)
    except (OSError, ValueError) as error:
        raise AccessNotGranted(f"The certificate {path} cannot be read: {error}") from error


def _database_name() -> str:
    return str(connection.settings_dict["NAME"])


def _group_name() -> str:
    return f"hydra_hosts_{_database_name()}"[:63]


def _role_name(host_name: str) -> str:
    # Names longer than PostgreSQL's 63 bytes would be cut, and two of them could become one.
    tail = hashlib.sha256(f"{_database_name()}/{host_name}".encode()).hexdigest()[:8]
    return f"hydra_host_{host_name[:40]}_{tail}"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
