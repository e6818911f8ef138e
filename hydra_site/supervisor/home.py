"""HYDRA_HOME: the one directory of all state, its lock, its secrets and the addresses of its running servers."""

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from engines.process import ProcessRecord, write_private
from hydra_site.supervisor.errors import DiskFull, HomeInUse, HomeUnusable

MIN_FREE_BYTES = 512 << 20
SECRET_BYTES = 32
_LOCK_ATTEMPTS = 20
_MAX_JSON_BYTES = 1 << 20


@dataclass(frozen=True)
class Secrets:
    """The secrets of one home, made once: hexadecimal text, safe inside URLs and configuration files."""

    django_secret_key: str
    postgres_password: str
    valkey_password: str
    node_secret: str


@dataclass(frozen=True)
class Services:
    """Where the servers of a run are reached; the URLs carry their passwords."""

    database_url: str
    broker_url: str | None


@dataclass(frozen=True)
class Home:
    """The layout of HYDRA_HOME. Paths only: nothing is made before `create`."""

    root: Path

    @property
    def run_dir(self) -> Path:
        return self.root / "run"

    @property
    def logs_dir(self) -> Path:
        return self.root / "logs"

    @property
    def models_dir(self) -> Path:
        return self.root / "models"

    @property
    def engines_dir(self) -> Path:
        return self.root / "engines"

    @property
    def store_dir(self) -> Path:
        return self.root / "store"

    @property
    def postgres_dir(self) -> Path:
        return self.root / "pg"

    @property
    def valkey_dir(self) -> Path:
        return self.root / "valkey"

    def run_file(self, child: str) -> Path:
        """Where the record of the running child `child` lies."""
        return self.run_dir / f"{child}.json"

    def log_file(self, child: str) -> Path:
        """Where the output of the child `child` goes."""
        return self.logs_dir / f"{child}.log"

    def create(self) -> None:
        """Make the directories that are missing, mode 0700; those that exist keep their mode. Raises HomeUnusable."""
        try:
            for directory in (
                self.root,
                self.run_dir,
                self.logs_dir,
                self.models_dir,
                self.engines_dir,
                self.valkey_dir,
            ):
                if not directory.is_dir():
                    # Only what is made here gets the mode: makedirs would give it to missing parents no less.
                    directory.parent.mkdir(parents=True, exist_ok=True)
                    directory.mkdir(mode=0o700, exist_ok=True)
            if not os.access(self.root, os.W_OK | os.X_OK):
                raise PermissionError(f"no permission to write {self.root}")
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DiskFull(f"no space is left where HYDRA_HOME ({self.root}) lies") from error
            raise HomeUnusable(f"HYDRA_HOME {self.root} cannot be used ({error.strerror or error})") from error

    def check_room(self) -> None:
        """Raise DiskFull when the disk under this home has less than 512 MB free."""
        existing = self.root
        while not existing.exists():
            existing = existing.parent
        free_bytes = shutil.disk_usage(existing).free
        if free_bytes < MIN_FREE_BYTES:
            raise DiskFull(
                f"only {free_bytes >> 20} MB are free where HYDRA_HOME ({self.root}) lies, {MIN_FREE_BYTES >> 20} MB are needed"
            )

    def secrets(self) -> Secrets:
        """The secrets of this home; made on the first call, the same ever after.

        Raises HomeUnusable when the file is damaged, or gone while a database needs its password.
        """
        path = self.root / "secrets.json"
        if not path.exists():
            if self.postgres_dir.exists() and any(self.postgres_dir.iterdir()):
                hint = "restore it, or move the database away to start over"
                raise HomeUnusable(
                    f"{path} is gone, and with it the password of the database in {self.postgres_dir}", hint=hint
                )
            draft = path.with_name(f"secrets-{os.getpid()}-{threading.get_ident()}.json")
            write_private(draft, json.dumps(asdict(Secrets(*(secrets.token_hex(SECRET_BYTES) for _ in range(4))))))
            # Several processes may come here at once; a link, unlike a rename, lets the first one win.
            with contextlib.suppress(FileExistsError):
                path.hardlink_to(draft)
            draft.unlink()
        try:
            with path.open("rb") as file:
                return Secrets(**json.loads(file.read(_MAX_JSON_BYTES)))
        except (ValueError, TypeError) as error:
            raise HomeUnusable(
                f"{path} is damaged", hint="restore it, or start over with another HYDRA_HOME"
            ) from error

    def write_services(self, services: Services) -> None:
        """Publish where the servers are, for every command of this home."""
        write_private(self.run_dir / "services.json", json.dumps(asdict(services)))

    def read_services(self) -> Services | None:
        """What `write_services` published last, whether or not it still runs; None when nothing (readable) is there."""
        try:
            with (self.run_dir / "services.json").open("rb") as file:
                fields = json.loads(file.read(_MAX_JSON_BYTES))
            return Services(str(fields["database_url"]), fields["broker_url"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    @contextmanager
    def lock(self, purpose: str) -> Iterator[None]:
        """Hold this home alone; raises HomeInUse with the holder's pid when somebody else does. The kernel frees it if
        we die.

        On the way out everything below run/ goes, the lock file itself last.
        """
        descriptor = self._acquire(purpose)
        try:
            ProcessRecord.of(os.getpid(), "supervisor", (purpose,)).to_file(self.run_file("supervisor"))
            yield
        finally:
            try:
                self._clear_run_dir()
            finally:
                os.close(descriptor)

    def _acquire(self, purpose: str) -> int:
        path = self.run_dir / "supervisor.lock"
        for _ in range(_LOCK_ATTEMPTS):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The last holder removes the file; a lock on a removed file guards nothing, so it is taken again.
                if os.fstat(descriptor).st_nlink:
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, f"{os.getpid()} {purpose}\n".encode())
                    return descriptor
            except BlockingIOError:
                holder = os.pread(descriptor, 200, 0).decode(errors="replace").split()
                os.close(descriptor)
                pid, who = (holder[0], " ".join(holder[1:])) if len(holder) > 1 else ("unknown", "another process")
                raise HomeInUse(f"{self.root} is in use by {who} (pid {pid})") from None
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
        raise HomeInUse(f"{self.root} is being taken and freed by other processes all the time")

    def _clear_run_dir(self) -> None:
        lock_file = self.run_dir / "supervisor.lock"
        for entry in self.run_dir.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry != lock_file:
                entry.unlink(missing_ok=True)
        lock_file.unlink(missing_ok=True)
