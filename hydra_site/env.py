"""The settings a user makes through the environment: one table, and typed readers that refuse what they cannot use.

Free of Django, so that the supervisor, the settings module and the documentation test read the same rows.
"""

import ipaddress
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pools.download_reach import REACHES

Kind = Literal["path", "port", "address", "count", "bytes", "text", "secret", "database_url", "broker_url", "log_level"]

PROJECT_DIR = Path(__file__).resolve().parent.parent
# The store's share of /dev/shm, unless told otherwise, and what it can work with.
STORE_SHARE = 4
MIN_STORE_BYTES = 16 << 20
MAX_STORE_BYTES = 1 << 46
MAX_RETENTION_DAYS = 3650
NATIVE_BUILDS = ("auto", "off")
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
DATABASE_SCHEMES = ("postgres", "postgresql")
BROKER_SCHEMES = ("redis", "rediss", "valkey", "valkeys")


@dataclass(frozen=True)
class Setting:
    """One environment variable: its name, its default as text (empty = unset), what kind of value it takes, its
    meaning.
    """

    name: str
    default: str
    kind: Kind
    help: str


SETTINGS: tuple[Setting, ...] = (
    Setting("HYDRA_HOME", "./var", "path", "Directory of all state; the default lies beside manage.py."),
    Setting("HYDRA_PORT", "9000", "port", "Port of the panel and the API; every other port is chosen among free ones."),
    Setting("HYDRA_BIND", "127.0.0.1", "address", "Address the site listens on; any but loopback needs an API key."),
    Setting(
        "HYDRA_ADMIN_PASSWORD", "", "secret", "Password of the first admin user; unset = made up and printed once."
    ),
    Setting("DATABASE_URL", "", "database_url", "An outside PostgreSQL (postgresql://…) instead of the embedded one."),
    Setting("BROKER_URL", "", "broker_url", "An outside Valkey or Redis (redis://…) instead of the embedded one."),
    Setting("HYDRA_MAX_BODY_BYTES", "33554432", "bytes", "Largest request body; a larger one is answered with 413."),
    Setting("HYDRA_HOST_NAME", "", "text", "Name of this host in the pool; unset = the machine's short host name."),
    Setting(
        "HYDRA_ENGINE_HOST",
        "127.0.0.1",
        "address",
        "Address at which other machines reach this host's engines and store; in a pool of one host, loopback.",
    ),
    Setting("HYDRA_DEFAULT_MODEL", "smollm2-135m", "text", "Model that serves requests which name none."),
    Setting("HYDRA_ENGINE_THREADS", "0", "count", "Threads of a CPU engine; 0 = all cores but one."),
    Setting("HYDRA_ENGINE_SLOTS", "4", "count", "Requests an engine decodes at once."),
    Setting("HYDRA_ENGINE_CONTEXT", "8192", "count", "Tokens of context each request may use."),
    Setting(
        "HYDRA_STORE_BYTES",
        "",
        "bytes",
        "Memory on /dev/shm of this host's store; 0 = no store; unset = a quarter of it, or of the machine's if less.",
    ),
    Setting(
        "HYDRA_STORE_DISK_BYTES", "0", "bytes", "Disk below HYDRA_HOME for the store's latest snapshots; 0 = none."
    ),
    Setting(
        "HYDRA_SESSION_RETENTION",
        "7",
        "count",
        "Days after its last use that a session and its snapshots are kept, and after its end what is known of a request.",
    ),
    Setting(
        "HYDRA_DOWNLOAD_FROM",
        "lan",
        "text",
        "Where models may be downloaded from by URL: public; lan = private networks, too; any = this machine, too.",
    ),
    Setting(
        "HYDRA_NATIVE_BUILDS",
        "auto",
        "text",
        "Whether a start asks for llama.cpp built for this host's CPU and cards, once for each release: auto, or off.",
    ),
    Setting("HYDRA_SOURCE_URL", "", "text", "Where this site's source is offered (AGPL); unset = a page of the site."),
    Setting("HYDRA_LOG_LEVEL", "INFO", "log_level", "How much the logs tell: DEBUG, INFO, WARNING, ERROR or CRITICAL."),
)
# Settings of which 0 says something of its own.
_MAY_BE_ZERO = frozenset({"HYDRA_ENGINE_THREADS", "HYDRA_STORE_BYTES", "HYDRA_STORE_DISK_BYTES"})
_BY_NAME = {setting.name: setting for setting in SETTINGS}


class SettingError(Exception):
    """A setting holds a value that cannot be used. `name`, `value` (hidden for secrets and URLs) and `hint` say which,
    what and what to do.
    """

    def __init__(self, name: str, value: str, hint: str) -> None:
        self.name = name
        self.value = value
        self.hint = hint
        super().__init__(f"{name}={value!r} cannot be used: {hint}")


def raw(name: str, environ: Mapping[str, str] | None = None) -> str:
    """The text of setting `name`: from the environment when set and not blank, else the table's default. KeyError for a
    name outside the table.
    """
    setting = _BY_NAME[name]
    value = (os.environ if environ is None else environ).get(name, "").strip()
    return value or setting.default


def text(name: str, environ: Mapping[str, str] | None = None) -> str:
    """The value of a text or secret setting, "" when unset."""
    return raw(name, environ)


def count(name: str, environ: Mapping[str, str] | None = None, *, minimum: int = 0) -> int:
    """The value of a count or bytes setting: a whole number of at least `minimum`. Raises SettingError."""
    value = raw(name, environ)
    if not re.fullmatch(r"[0-9]{1,18}", value) or int(value) < minimum:
        raise SettingError(name, value, f"give a whole number of at least {minimum}")
    return int(value)


def port(name: str = "HYDRA_PORT", environ: Mapping[str, str] | None = None) -> int:
    """The value of a port setting, 1 to 65535. Raises SettingError."""
    value = raw(name, environ)
    if not re.fullmatch(r"[0-9]{1,5}", value) or not 1 <= int(value) <= 65535:
        raise SettingError(name, value, "give a port between 1 and 65535")
    return int(value)


def address(name: str = "HYDRA_BIND", environ: Mapping[str, str] | None = None) -> str:
    """The value of an address setting: an IPv4 or IPv6 address, `localhost` read as 127.0.0.1. Raises SettingError."""
    value = raw(name, environ)
    if value == "localhost":
        return "127.0.0.1"
    try:
        return str(ipaddress.ip_address(value.strip("[]")))
    except ValueError:
        raise SettingError(name, value, "give an IP address, such as 127.0.0.1 or 0.0.0.0") from None


def path(name: str = "HYDRA_HOME", environ: Mapping[str, str] | None = None) -> Path:
    """The value of a path setting, absolute. A default lies beside manage.py, so that it does not move with the working
    directory.
    """
    setting = _BY_NAME[name]
    value = raw(name, environ)
    if "\0" in value:
        raise SettingError(name, value, "give a path without NUL bytes")
    if value == setting.default:
        return (PROJECT_DIR / value).resolve()
    return Path(value).expanduser().resolve()


def database_url(environ: Mapping[str, str] | None = None) -> str | None:
    """DATABASE_URL, or None when unset (= the embedded PostgreSQL). Raises SettingError."""
    return _url("DATABASE_URL", DATABASE_SCHEMES, environ)


def broker_url(environ: Mapping[str, str] | None = None) -> str | None:
    """BROKER_URL, or None when unset (= the embedded Valkey). Raises SettingError."""
    return _url("BROKER_URL", BROKER_SCHEMES, environ)


def log_level(name: str = "HYDRA_LOG_LEVEL", environ: Mapping[str, str] | None = None) -> str:
    """The value of the log level setting, in capitals. Raises SettingError."""
    value = raw(name, environ)
    if value.upper() not in LOG_LEVELS:
        raise SettingError(name, value, f"give one of {', '.join(LOG_LEVELS)}")
    return value.upper()


def host_name(environ: Mapping[str, str] | None = None) -> str:
    """This host's name in the pool: lower-case letters, digits and dashes, at most 63, so that it fits queue names and
    URLs.
    """
    given = raw("HYDRA_HOST_NAME", environ)
    name = (
        re.sub(r"[^a-z0-9-]+", "-", (given or socket.gethostname().split(".")[0]).lower()).strip("-")[:63].rstrip("-")
    )
    if given and not name:
        raise SettingError("HYDRA_HOST_NAME", given, "give a name with at least one letter or digit")
    return name or "host"


def engine_threads(environ: Mapping[str, str] | None = None) -> int:
    """Threads of a CPU engine: HYDRA_ENGINE_THREADS, where 0 stands for all usable cores but one, never fewer than one."""
    threads = count("HYDRA_ENGINE_THREADS", environ)
    return threads or max(1, len(os.sched_getaffinity(0)) - 1)


def store_bytes(environ: Mapping[str, str] | None = None) -> int:
    """Memory of this host's store, 0 for none. Unset: a share of what tmpfs and the machine have. Raises SettingError."""
    if not raw("HYDRA_STORE_BYTES", environ):
        share = _shared_memory_bytes() // STORE_SHARE
        return share if share >= MIN_STORE_BYTES else 0
    given = count("HYDRA_STORE_BYTES", environ)
    if given and not MIN_STORE_BYTES <= given <= MAX_STORE_BYTES:
        hint = f"give 0, or between {MIN_STORE_BYTES} and {MAX_STORE_BYTES} bytes"
        raise SettingError("HYDRA_STORE_BYTES", str(given), hint)
    return given


def session_retention_days(environ: Mapping[str, str] | None = None) -> int:
    """Days that an unused session is kept. Raises SettingError."""
    days = count("HYDRA_SESSION_RETENTION", environ, minimum=1)
    if days > MAX_RETENTION_DAYS:
        raise SettingError("HYDRA_SESSION_RETENTION", str(days), f"give between 1 and {MAX_RETENTION_DAYS} days")
    return days


def download_from(environ: Mapping[str, str] | None = None) -> str:
    """How far downloads by URL may reach. Raises SettingError."""
    value = raw("HYDRA_DOWNLOAD_FROM", environ)
    if value not in REACHES:
        raise SettingError("HYDRA_DOWNLOAD_FROM", value, f"give one of {', '.join(REACHES)}")
    return value


def native_builds(environ: Mapping[str, str] | None = None) -> str:
    """Whether builds of llama.cpp are asked for at a start. Raises SettingError."""
    value = raw("HYDRA_NATIVE_BUILDS", environ)
    if value not in NATIVE_BUILDS:
        raise SettingError("HYDRA_NATIVE_BUILDS", value, f"give one of {', '.join(NATIVE_BUILDS)}")
    return value


def _shared_memory_bytes() -> int:
    """What /dev/shm may hold, or the machine's memory if that is less; 0 where there is no /dev/shm."""
    try:
        shared = os.statvfs("/dev/shm")
    except OSError:
        return 0
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(shared.f_frsize * shared.f_blocks, memory)


def check_all(environ: Mapping[str, str] | None = None) -> None:
    """Read every setting of the table once, so that a bad one is told at the start and not in the middle. Raises
    SettingError.
    """
    for setting in SETTINGS:
        if setting.kind in ("count", "bytes"):
            if raw(setting.name, environ):
                count(setting.name, environ, minimum=0 if setting.name in _MAY_BE_ZERO else 1)
        elif setting.kind == "port":
            port(setting.name, environ)
        elif setting.kind == "address":
            address(setting.name, environ)
            _refuse_unspecified(setting.name, environ)
        elif setting.kind == "path":
            path(setting.name, environ)
        elif setting.kind == "log_level":
            log_level(setting.name, environ)
    database_url(environ)
    broker_url(environ)
    host_name(environ)
    store_bytes(environ)
    session_retention_days(environ)
    download_from(environ)
    native_builds(environ)


def engine_host(environ: Mapping[str, str] | None = None) -> str:
    """Where this host's engines and store listen, and where others reach them. Raises SettingError."""
    _refuse_unspecified("HYDRA_ENGINE_HOST", environ)
    return address("HYDRA_ENGINE_HOST", environ)


def _refuse_unspecified(name: str, environ: Mapping[str, str] | None) -> None:
    value = address(name, environ)
    if name == "HYDRA_ENGINE_HOST" and ipaddress.ip_address(value).is_unspecified:
        raise SettingError(name, value, "give the one address by which others reach this machine")


def _url(name: str, schemes: tuple[str, ...], environ: Mapping[str, str] | None) -> str | None:
    value = raw(name, environ)
    if not value:
        return None
    # The value may carry a password, so the error never repeats it.
    try:
        parts = urlsplit(value)
        usable = parts.scheme in schemes and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable:
        raise SettingError(name, "…", f"give a URL such as {schemes[0]}://user:password@host:port/name")
    return value
