"""What compilers may take of a machine's memory that engines serve on meanwhile."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

# What one takes at most for a file of llama.cpp; of CUDA kernels with many templates it may be a little more.
COMPILER_BYTES = 2 << 30
# The kernel ends those first whose number is highest; 1,000 at most.
FIRST = 900


def usual_jobs(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Compilers at once: one for each core that this process may use, as far as there is memory for them, at least one."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
    fitting = int(match[1]) * 1024 // COMPILER_BYTES if match else 1
    return max(1, min(len(os.sched_getaffinity(0)), fitting))


def go_first(score: Path = Path("/proc/self/oom_score_adj")) -> None:
    """Where memory runs out all the same, this process and what it starts are ended, and no engine."""
    with contextlib.suppress(OSError):  # a container may not let its processes say so
        if int(score.read_text()) < FIRST:
            score.write_text(str(FIRST))
