"""llama.cpp's source as the pinned bindings carry it: where it comes from, and what names its content."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tarfile
from pathlib import Path

DOWNLOAD_TIMEOUT_S = 600
# What the libraries are made of; the rest of the tree (docs, models, other backends) does not change them.
_BUILT = re.compile(
    r"CMakeLists\.txt|cmake/.+|include/.+|src/.+|vendor/.+|"
    r"ggml/(CMakeLists\.txt|cmake/.+|include/.+|src/([^/]+|ggml-(cpu|cuda|rpc)/.+))|tools/mtmd/.+"
)


def pinned(requirements: Path) -> str:
    """`name==version` of llama-cpp-python as the lock file pins it."""
    match = re.search(r"^(llama-cpp-python==\S+)", requirements.read_text(), re.MULTILINE)
    if match is None:
        raise SystemExit(f"{requirements} pins no llama-cpp-python")
    return match[1]


def fetch_source(pin: str, folder: Path) -> Path:
    """The unpacked llama.cpp of the pinned sdist."""
    downloads = folder / "sdist"
    downloads.mkdir(parents=True, exist_ok=True)
    # Of this package alone: pip asks its build backend for its name, which must not be compiled for that, nor CMake.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", pin.partition("==")[0]]
    subprocess.run([*command, "--dest", str(downloads), pin], check=True, timeout=DOWNLOAD_TIMEOUT_S)
    (archive,) = downloads.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder / "source", filter="data")
    (tree,) = (folder / "source").glob("*/vendor/llama.cpp")
    return tree


def source_digest(tree: Path) -> str:
    """SHA-256 (hex) over the names and contents of all files that the libraries are built from."""
    total = hashlib.sha256()
    names = (path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file())
    for name in sorted(name for name in names if _BUILT.fullmatch(name)):
        content = hashlib.sha256((tree / name).read_bytes()).hexdigest()
        total.update(f"{content}  {name}\n".encode())
    return total.hexdigest()
