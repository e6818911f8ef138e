"""Install llama.cpp's bindings from source and show one line of progress: `build_progress.py LOCK_FILE LOG_FILE`.

The build compiles some two hundred files for many minutes, of which pip shows either nothing or megabytes. This reads
pip's long output, keeps it in LOG_FILE, and shows how far the compiler is: a line that rewrites itself on a terminal, a
line per ten percent elsewhere. Run by the environment's own Python with the packages' names and hashes in LOCK_FILE;
needs nothing but the standard library. Exit code 0 when the bindings are installed, 1 when not (with the log's end).
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

DISTRIBUTION = "llama-cpp-python"
CMAKE_ARGS = "-DGGML_RPC=ON"
# The library that only a build with CMAKE_ARGS has.
PROOF = "libggml-rpc.*"
COMPILERS = ("c++", "g++", "clang++")
NO_COMPILER = "Hydra needs a C++ compiler to build llama.cpp: apt install build-essential"
STEP = re.compile(r"^\s*\[(\d+)/(\d+)\] ")
TAIL_LINES = 30
WIDEST_LINE = 200


class Progress:
    """Shows done/total on one line of a terminal, or at every tenth elsewhere."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._is_terminal = sys.stdout.isatty()
        self._tenths_shown = -1

    def show(self, done: int, total: int) -> None:
        """Show that `done` of `total` steps are taken."""
        elapsed_s = time.monotonic() - self._started
        text = f"building llama.cpp: {done}/{total} files, {elapsed_s:.0f} s"
        if self._is_terminal:
            print(f"\r\x1b[K{text}", end="\n" if done == total else "", flush=True)
        elif (tenths := done * 10 // total) > self._tenths_shown:
            self._tenths_shown = tenths
            print(text, flush=True)


def main(lock_file: Path, log_file: Path) -> int:
    """Install what `lock_file` names; the exit code."""
    if _is_cached() or _is_built():
        print("installing llama.cpp's bindings", flush=True)
    elif any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), *COMPILERS)):
        print(f"building llama.cpp once, which takes a while (log: {log_file})", flush=True)
    else:
        print(NO_COMPILER, file=sys.stderr)
        return 1
    install = ["install", "-v", "--require-hashes", "-r", str(lock_file)]
    code = _run_pip(install, log_file)
    if code == 0 and not _is_built():
        # pip's cache does not know CMAKE_ARGS, so it may hold somebody's build without RPC.
        print("the cached build lacks RPC, building anew", flush=True)
        code = _run_pip([*install, "--no-cache-dir", "--force-reinstall", "--no-deps"], log_file)
    if code == 0 and not _is_built():
        print("llama.cpp was built without RPC", file=sys.stderr)
        code = 1
    return 1 if code else 0


def _run_pip(arguments: list[str], log_file: Path) -> int:
    """Run pip, follow its output, and show the end of it if it fails."""
    progress = Progress()
    last: deque[str] = deque(maxlen=TAIL_LINES)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    environment = {**os.environ, "CMAKE_ARGS": CMAKE_ARGS}
    with (
        log_file.open("w", encoding="utf-8") as log,
        subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
        ) as pip,
    ):
        assert pip.stdout is not None
        for line in pip.stdout:
            log.write(line)
            last.append(line.rstrip()[:WIDEST_LINE])
            if step := STEP.match(line):
                progress.show(int(step[1]), int(step[2]))
    if pip.returncode:
        print("\n".join(["", *last]), file=sys.stderr)
        print(f"llama.cpp could not be built. The whole log is {log_file}.", file=sys.stderr)
        print("If the compiler was killed, memory ran out: CMAKE_BUILD_PARALLEL_LEVEL=1 make run", file=sys.stderr)
    return pip.returncode


def _is_built() -> bool:
    """Whether the bindings are installed here with RPC."""
    importlib.invalidate_caches()
    found = importlib.util.find_spec("llama_cpp")
    if found is None or not found.submodule_search_locations:
        return False
    return any(Path(found.submodule_search_locations[0], "lib").glob(PROOF))


def _is_cached() -> bool:
    """Whether pip's cache holds a wheel of the bindings."""
    command = [sys.executable, "-m", "pip", "cache", "list", DISTRIBUTION.replace("-", "_"), "--format=abspath"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    return listed.returncode == 0 and bool(listed.stdout.strip())


if __name__ == "__main__":
    try:
        raise SystemExit(main(Path(sys.argv[1]), Path(sys.argv[2])))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
