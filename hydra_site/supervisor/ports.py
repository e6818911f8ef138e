"""TCP ports: one that is free for a server of ours, and whether the site's own can be had."""

import errno
import random
import socket

import psutil

from hydra_site.supervisor.errors import PortUnavailable, ServerFailed

# Below the range from which Linux gives ports to outgoing connections, so that none of those takes a port between our
# look and the server's bind.
LOWEST_PORT = 20_000
HIGHEST_PORT = 32_000
CONNECT_WAIT_S = 1.0
_ATTEMPTS = 200


def free_port() -> int:
    """A TCP port on 127.0.0.1 on which nothing listens. Raises ServerFailed when none is found."""
    for _ in range(_ATTEMPTS):
        port = random.randint(LOWEST_PORT, HIGHEST_PORT)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise ServerFailed(f"no free port was found between {LOWEST_PORT} and {HIGHEST_PORT}")


def listens(address: str, port: int) -> bool:
    """Whether something accepts connections on `address`:`port`."""
    try:
        with socket.create_connection((address, port), timeout=CONNECT_WAIT_S):
            return True
    except OSError:
        return False


def check_available(address: str, port: int) -> None:
    """Raise PortUnavailable, in words a user understands, when `address`:`port` cannot be listened on."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
            probe.listen(1)
        except OSError as error:
            raise _explained(error, address, port) from error


def _explained(error: OSError, address: str, port: int) -> PortUnavailable:
    if error.errno == errno.EADDRINUSE:
        other = port + 1 if port < 65535 else port - 1
        hint = f"stop what uses it, or choose another port, as in HYDRA_PORT={other}"
        return PortUnavailable(f"port {port} on {address} is in use{_user_of(port)}", hint=hint)
    if error.errno == errno.EACCES:
        return PortUnavailable(
            f"port {port} needs rights this user lacks", hint="choose one above 1023 with HYDRA_PORT"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return PortUnavailable(f"this machine has no address {address}", hint="choose one it has with HYDRA_BIND")
    return PortUnavailable(f"port {port} on {address} cannot be listened on ({error.strerror})")


def _user_of(port: int) -> str:
    """` by pid N (name)`, when this user may know."""
    try:
        for connection in psutil.net_connections("tcp"):
            if (
                connection.status == psutil.CONN_LISTEN
                and connection.laddr
                and connection.laddr.port == port
                and connection.pid
            ):
                return f" by pid {connection.pid} ({psutil.Process(connection.pid).name()})"
    except psutil.Error:
        return ""
    return ""
