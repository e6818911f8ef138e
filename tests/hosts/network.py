"""Machines that share nothing but a wire: network namespaces on one bridge. Needs root and iproute2."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass


def missing() -> str | None:
    """Why this machine can make no namespaces, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need iproute2"
    probe = f"hydra-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"network namespaces cannot be made here: {made.stderr.strip()}"
    _ip("netns", "del", probe)
    return None


@dataclass(frozen=True)
class Machine:
    """A namespace with an address of its own."""

    namespace: str
    address: str

    def command(self, *argv: str) -> list[str]:
        """`argv` as a command that runs there."""
        return ["ip", "netns", "exec", self.namespace, *argv]


class Network:
    """A bridge and the machines on it, all gone at the end. The first machine holds the bridge. Use as a context manager."""

    def __init__(self, *names: str) -> None:
        mark = f"{os.getpid() % 100_000}"
        self._machines = [Machine(f"hy{mark}-{name}", f"10.213.77.{number}") for number, name in enumerate(names, 1)]

    def __enter__(self) -> tuple[Machine, ...]:
        first, *others = self._machines
        try:
            for machine in self._machines:
                _ip("netns", "add", machine.namespace)
                _ip("-n", machine.namespace, "link", "set", "lo", "up")
            _ip("-n", first.namespace, "link", "add", "br0", "type", "bridge")
            _ip("-n", first.namespace, "address", "add", f"{first.address}/24", "dev", "br0")
            _ip("-n", first.namespace, "link", "set", "br0", "up")
            for number, machine in enumerate(others, 1):
                port = f"port{number}"
                _ip(
                    "-n",
                    first.namespace,
                    "link",
                    "add",
                    port,
                    "type",
                    "veth",
                    "peer",
                    "name",
                    "eth0",
                    "netns",
                    machine.namespace,
                )
                _ip("-n", first.namespace, "link", "set", port, "master", "br0", "up")
                _ip("-n", machine.namespace, "address", "add", f"{machine.address}/24", "dev", "eth0")
                _ip("-n", machine.namespace, "link", "set", "eth0", "up")
        except BaseException:
            self.__exit__()
            raise
        return tuple(self._machines)

    def __exit__(self, *_: object) -> None:
        for machine in self._machines:
            subprocess.run(["ip", "netns", "del", machine.namespace], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
