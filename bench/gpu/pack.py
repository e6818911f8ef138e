"""Packs what a machine with a GPU and without a package registry needs into build/gpu-bundle: run there with `run.sh`.

    python -m bench.gpu.pack [--python 3.12] [--out build/gpu-bundle]

In the bundle: llama.cpp's source without what a CUDA build does not read, the pure Python part of its bindings, our code,
and wheels for that machine's Python with a lock file that carries their hashes. `make peer` must have run before.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

from packaging.requirements import Requirement

from bench.errors import BenchError
from bench.vocabulary import ROOT, TEMPLATE_FILE, VOCABULARY_FILE, llama_source

LIMIT_BYTES = 60 * 2**20
ROOTS = (
    "aiohttp",
    "uvloop",
    "pydantic",
    "prometheus-client",
    "jinja2",
    "numpy",
    "blake3",
    "llguidance",
    "xxhash",
    "pillow",
    "gguf",
    "psutil",
    "rich",
    "nvidia-ml-py",
    "diskcache",
)
LOCK_FILES = ("requirements/run.txt", "requirements/llama.txt")
CODE = ("engines", "pools", "bench", "native")
# pip matches each exactly; the machine's is newer
GLIBC = ("2_39", "2_36", "2_35", "2_34", "2_31", "2_28", "2_27", "2_26", "2_24", "2_17", "2_12", "2_5")
DOWNLOAD_TIMEOUT_S = 600

SOURCE_KEPT = re.compile(
    r"(CMakeLists\.txt|LICENSE|licenses/.*|cmake/.*|common/.*|include/.*|src/.*|vendor/.*|scripts/[^/]*\.cmake|"
    r"ggml/(CMakeLists\.txt|cmake/.*|include/.*|src/([^/]+|ggml-(cpu|cuda|rpc)/.*))|"
    r"tools/(CMakeLists\.txt|ui/(CMakeLists\.txt|[^/]*\.(in|cmake))|server/[^/]+|(?!ui/|server/)[^/]+/.*)|"
    + re.escape(VOCABULARY_FILE)
    + "|"
    + re.escape(TEMPLATE_FILE)
    + ")"
)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.pack", description=__doc__)
    parser.add_argument("--python", default="3.12", help="version of the other machine's python3")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-bundle")
    options = parser.parse_args(arguments)
    try:
        pack(options.out, options.python)
    except BenchError as error:
        print(f"pack: {error}", file=sys.stderr)
        return 1
    return 0


def pack(out: Path, python: str) -> None:
    """Writes the bundle anew; wheels that are there already are kept. Raises BenchError if it gets too large."""
    out.mkdir(parents=True, exist_ok=True)
    source = llama_source()
    package = source.parent.parent
    with tarfile.open(out / "source.tar.xz", "w:xz", preset=9) as archive:
        _add(archive, source, "llama.cpp", lambda name: SOURCE_KEPT.fullmatch(name) is not None)
        _add(archive, package / "llama_cpp", "llama_cpp", lambda name: re.fullmatch(r"[^/]+\.py", name) is not None)
    with tarfile.open(out / "code.tar.xz", "w:xz") as archive:
        for name in CODE:
            _add(archive, ROOT / name, name, lambda name: "__pycache__" not in name)
    shutil.copy(Path(__file__).with_name("run.sh"), out / "run.sh")
    (out / "requirements.txt").write_text("".join(_lock_entries()))
    _download_wheels(out, python)
    total = 0
    for path in sorted(path for path in out.rglob("*") if path.is_file()):
        total += path.stat().st_size
        print(f"{path.stat().st_size / 2**20:8.2f} MiB  {path.relative_to(out)}")
    print(f"{total / 2**20:8.2f} MiB in {out}")
    if total > LIMIT_BYTES:
        raise BenchError(f"the bundle has {total / 2**20:.0f} MiB; at most {LIMIT_BYTES // 2**20} may travel")


def _add(archive: tarfile.TarFile, folder: Path, prefix: str, is_kept: Callable[[str], bool]) -> None:
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if is_kept(name):
            archive.add(path, f"{prefix}/{name}", recursive=False)


def _lock_entries() -> Iterator[str]:
    """The lock files' own entries, hashes included, of everything that engine and bench import."""
    pinned: dict[str, str] = {}
    for name in LOCK_FILES:
        for entry in re.findall(r"^\S+==\S+ \\\n(?: +--hash=\S+(?: \\)?\n)+", (ROOT / name).read_text(), re.MULTILINE):
            pinned[_canonical(entry.partition("==")[0])] = entry
    for name in sorted(_closure(ROOTS)):
        if name not in pinned:
            raise BenchError(f"{name} stands in none of {', '.join(LOCK_FILES)}")
        yield pinned[name]


def _closure(names: tuple[str, ...]) -> set[str]:
    """The packages and all that they require here, without extras."""
    found: set[str] = set()
    open_names = [_canonical(name) for name in names]
    while open_names:
        name = open_names.pop()
        if name in found:
            continue
        found.add(name)
        requirements = map(Requirement, importlib.metadata.requires(name) or [])
        open_names += [_canonical(r.name) for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.split("[")[0]).lower()


def _download_wheels(out: Path, python: str) -> None:
    wheels = out / "wheels"
    stamp, wanted = out / "wheels.for", f"{python}\n{(out / 'requirements.txt').read_text()}"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    shutil.rmtree(wheels, ignore_errors=True)
    platforms = [f"--platform=manylinux_{version}_x86_64" for version in GLIBC]
    platforms += [f"--platform=manylinux{name}_x86_64" for name in ("2014", "2010", "1")]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    command += ["--require-hashes", "--only-binary=:all:", "--implementation=cp", f"--python-version={python}"]
    command += [*platforms, "--dest", str(wheels), "-r", str(out / "requirements.txt")]
    subprocess.run(command, check=True, timeout=DOWNLOAD_TIMEOUT_S)
    stamp.write_text(wanted)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
