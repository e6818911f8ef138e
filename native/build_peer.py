"""Builds llama-server, llama-bench and llama-batched-bench from the very source that llama-cpp-python carries.

    python -m native.build_peer REQUIREMENTS BUILD_DIR

REQUIREMENTS pins llama-cpp-python with its hash; its sdist comes through pip, whatever index that is set to. The binaries
end up in BUILD_DIR/bin; nothing is built again while the pin is unchanged. Comparisons are fair only from one source.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from native import changes
from native.llama_source import fetch_source, pinned

TARGETS = ("llama-server", "llama-bench", "llama-batched-bench")
FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_RPC=ON",
    "-DBUILD_SHARED_LIBS=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_CURL=OFF",
    "-DCMAKE_BUILD_RPATH_USE_ORIGIN=ON",  # the binaries find their libraries wherever both lie together
)
BUILD_TIMEOUT_S = 3600


def build(source: Path, folder: Path, flags: tuple[str, ...] = ()) -> None:
    """Configures with further `flags`, builds, and copies to `folder`/bin; progress is the build tool's own."""
    objects = folder / "objects"
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    subprocess.run(["cmake", *generator, "-S", str(source), "-B", str(objects), *FLAGS, *flags], check=True)
    jobs = str(len(os.sched_getaffinity(0)))
    subprocess.run(
        ["cmake", "--build", str(objects), "-j", jobs, "--target", *TARGETS], check=True, timeout=BUILD_TIMEOUT_S
    )
    shutil.copytree(objects / "bin", folder / "bin", symlinks=True, dirs_exist_ok=True)


def build_changed(source: Path, folder: Path, out: Path, flags: tuple[str, ...] = ()) -> None:
    """Hydra's own libraries out of the objects that `build` left in `folder`: what its changes of the source touch is compiled
    again. They lie in `out` then, and `folder`/bin keeps the others. Raises BuildFailed for a source that they do not fit."""
    changes.apply(source)
    objects = folder / "objects"
    # The changes bring files that the first configuration has not seen.
    subprocess.run(["cmake", "-S", str(source), "-B", str(objects), *FLAGS, *flags], check=True)
    command = ["cmake", "--build", str(objects), "-j", str(len(os.sched_getaffinity(0))), "--target", "llama"]
    subprocess.run(command, check=True, timeout=BUILD_TIMEOUT_S)
    out.mkdir(parents=True, exist_ok=True)
    for library in (objects / "bin").glob("lib*.so*"):
        shutil.copy2(library, out / library.name, follow_symlinks=False)


def main(requirements: Path, folder: Path) -> None:
    pin = pinned(requirements)
    stamp = folder / "built"
    if stamp.exists() and stamp.read_text() == pin and all((folder / "bin" / name).exists() for name in TARGETS):
        print(f"llama-server of {pin} is built: {folder / 'bin'}")
        return
    for name in ("cmake", "c++"):
        if shutil.which(name) is None:
            raise SystemExit(f"building llama-server needs {name}: apt install cmake build-essential")
    shutil.rmtree(folder, ignore_errors=True)
    build(fetch_source(pin, folder), folder)
    stamp.write_text(pin)
    print(f"llama-server of {pin} is built: {folder / 'bin'}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit((__doc__ or "").strip())
    main(Path(sys.argv[1]), Path(sys.argv[2]).resolve())
