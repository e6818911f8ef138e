"""What a machine keeps that has joined another machine's pool: who it is there, and how it reaches the pool's servers."""

import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from engines.process import write_private
from hydra_site.supervisor.errors import HomeUnusable
from hydra_site.supervisor.home import Home

MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True)
class Joined:
    """A host of the pool at `site_url`. The URLs carry passwords of this host's own; `token_digest` names the token it used."""

    site_url: str
    host_name: str
    address: str
    database_url: str = field(repr=False)
    broker_url: str = field(repr=False)
    token_digest: str
    site_version: str

    @classmethod
    def of(cls, home: Home) -> "Joined | None":
        """What `home` has joined, None if nothing. Raises HomeUnusable for a file that is damaged."""
        path = _file(home)
        if not path.exists():
            return None
        try:
            with path.open("rb") as file:
                return cls(**json.loads(file.read(MAX_FILE_BYTES)))
        except (ValueError, TypeError) as error:
            raise HomeUnusable(f"{path} is damaged", hint="join again with a new token") from error

    def write(self, home: Home) -> None:
        """Keep it, readable by this user alone."""
        _file(home).parent.mkdir(mode=0o700, exist_ok=True)
        write_private(_file(home), json.dumps(asdict(self), indent=1))

    def with_certificates(self, home: Home, database_ca: str, broker_ca: str) -> "Joined":
        """The same with the certificates written beside it and named in the URLs; those that are "" are not."""
        database_url = _with_file(self.database_url, home, "database-ca.pem", database_ca, "sslrootcert")
        broker_url = _with_file(self.broker_url, home, "broker-ca.pem", broker_ca, "ssl_ca_certs")
        return Joined(**{**asdict(self), "database_url": database_url, "broker_url": broker_url})


def leave(home: Home) -> None:
    """Forget what `home` has joined."""
    shutil.rmtree(_file(home).parent, ignore_errors=True)


def _file(home: Home) -> Path:
    return home.root / "host" / "joined.json"


def _with_file(url: str, home: Home, name: str, content: str, key: str) -> str:
    if not content:
        return url
    path = _file(home).parent / name
    path.parent.mkdir(mode=0o700, exist_ok=True)
    write_private(path, content)
    parts = urlsplit(url)
    return urlunsplit(parts._replace(query=urlencode([*parse_qsl(parts.query), (key, str(path))])))
