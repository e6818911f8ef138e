"""Where this process finds its servers: those of the pool that its home has joined, else the environment, else what a running
supervisor of the same home published.
"""

from typing import Any
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from django.conf import settings
from django.db import connections
from psycopg.conninfo import conninfo_to_dict

from hydra_site import env
from hydra_site.supervisor.home import Home
from hydra_site.supervisor.joined import Joined

CONNECT_TIMEOUT_S = 5
# A query that takes longer is stuck; whoever waits for it gets an error instead.
STATEMENT_TIMEOUT_MS = 30_000
# A server that is gone without a word (its machine, its network) is found out in about half a minute, not in two hours.
_KEEPALIVES = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3, "tcp_user_timeout": 25_000}
CHANNEL_SOCKET_TIMEOUT_S = 15
CHANNEL_CAPACITY = 500
_DATABASE_FIELDS = {"dbname": "NAME", "user": "USER", "password": "PASSWORD", "host": "HOST", "port": "PORT"}


def database_url(home: Home) -> str | None:
    """The one of the pool that this home has joined, else DATABASE_URL, or the published address, or None: then only commands
    without a database can run.
    """
    if joined := Joined.of(home):
        return joined.database_url
    published = home.read_services()
    return env.database_url() or (published.database_url if published else None)


def broker_url(home: Home) -> str | None:
    """The one of the pool that this home has joined, else BROKER_URL, or the published address, or None: then nothing can be
    sent.
    """
    joined, published = Joined.of(home), home.read_services()
    url = (joined.broker_url if joined else None) or env.broker_url() or (published.broker_url if published else None)
    if url is None:
        return None
    # Celery and Channels know the protocol by its first name only.
    parts = urlsplit(url)
    scheme = {"valkey": "redis", "valkeys": "rediss"}.get(parts.scheme, parts.scheme)
    query = parts.query
    if scheme == "rediss" and "ssl_cert_reqs" not in dict(parse_qsl(query, keep_blank_values=True)):
        # Channels would check the certificate all the same, Celery would take any.
        query = "&".join(filter(None, (query, "ssl_cert_reqs=required")))
    return urlunsplit(parts._replace(scheme=scheme, query=query))


def database_settings(url: str | None) -> dict[str, Any]:
    """Django's settings of the database at `url`."""
    if url is None:
        return {"ENGINE": "hydra_site.no_database", "NAME": "hydra"}
    fields = {name: str(value) for name, value in conninfo_to_dict(url).items() if value is not None}
    known = {_DATABASE_FIELDS[name]: fields.pop(name) for name in list(fields) if name in _DATABASE_FIELDS}
    options: dict[str, Any] = {
        "connect_timeout": CONNECT_TIMEOUT_S,
        **_KEEPALIVES,
        "options": f"-c statement_timeout={STATEMENT_TIMEOUT_MS}",
        **fields,
    }
    return {
        "ENGINE": "django.db.backends.postgresql",
        "CONN_MAX_AGE": 0,
        # With a pool: a connection that died with its server is found out before it is used.
        "CONN_HEALTH_CHECKS": True,
        "OPTIONS": options,
        **known,
    }


def channel_layer_config(url: str) -> dict[str, Any]:
    """Channels' settings of the layer at `url`."""
    # redis-py gives up on a socket after 5 s, which is just how long the layer listens at a time.
    return {"hosts": [{"address": url, "socket_timeout": CHANNEL_SOCKET_TIMEOUT_S}], "capacity": CHANNEL_CAPACITY}


def use_database(url: str) -> None:
    """Have this process use the database at `url` from now on; for a command that borrows a server after Django is set up."""
    connections.close_all()
    for alias in connections:
        del connections[alias]
    settings.DATABASES["default"].clear()
    settings.DATABASES["default"].update(database_settings(url))
    # Django reads its settings once; this fills in the defaults of the new ones.
    connections.configure_settings(settings.DATABASES)
