"""Many hosts at once: nobody is lost and no engine is misjudged. How far each period's work is from its next is printed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.hosts import scale
from tests.rows import add_model
from tests.synthetic_gguf import SyntheticModel

SERVERS = ("postgres", "valkey-server")


def servers_cpu_s() -> float:
    """Processor time of the embedded servers so far; they are children of this process."""
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True) if child.name() in SERVERS]
    # A connection's process that ended counts among its parent's children.
    return sum(time.user + time.system + time.children_user + time.children_system for time in times)


def pool_of(hosts: int, gpus: int, seconds: float, path: Path, folder: Path) -> dict[str, scale.Work]:
    variant = add_model(path, folder)
    servers_s = servers_cpu_s()
    measured = scale.run(hosts, gpus, seconds, variant)
    print(f"\nPostgreSQL and Valkey took {servers_cpu_s() - servers_s:.1f} s of a processor, making the rows included")
    print(f"{hosts} hosts, {hosts * gpus} GPUs, {seconds:g} s, {os.cpu_count()} cores:")
    for name, work in measured.items():
        print(work.line(name))
    return measured


@pytest.mark.django_db(transaction=True)
def test_a_few_hosts_work_side_by_side(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path, settings: Any
) -> None:
    settings.HYDRA_HOME = tmp_path
    measured = pool_of(4, 2, 3.0, tiny_model("llama").path, tmp_path)
    assert all(work.took_s for work in measured.values())


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.django_db(transaction=True)
def test_fifty_hosts_and_two_hundred_gpus(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path, settings: Any
) -> None:
    settings.HYDRA_HOME = tmp_path
    measured = pool_of(50, 4, 60.0, tiny_model("llama").path, tmp_path)
    # Each host's pulse and probe ran again and again; that none was late is for who reads the figures, on an idle machine.
    assert len(measured["pulse of a host"].took_s) > 50
    assert len(measured["probe of a host"].took_s) > 50
