"""What the tests of pools share: small file systems that fill up."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SmallFileSystem = Callable[[int], Path]


@pytest.fixture
def small_file_system(tmp_path: Path) -> Iterator[SmallFileSystem]:
    """Mounts a tmpfs of a given number of bytes, unmounted after the test."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    mounted: list[Path] = []

    def mount(size_bytes: int) -> Path:
        directory = tmp_path / f"small-{len(mounted)}"
        directory.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(directory)], check=True)
        mounted.append(directory)
        return directory

    yield mount
    for directory in reversed(mounted):
        subprocess.run(["umount", str(directory)], check=True)
