"""How an engine's or a store's process says in its log why it ends: who asked it to, or where native code failed.

Without that a process that was told to stop and one that crashed look alike from outside: both are just gone.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import re
import signal

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# How faulthandler begins what it writes.
FATAL = "Fatal Python error:"
STDERR = 2
# Set for a process, they are told from its first import on: loading a library is native code, too.
TELL_FROM_THE_START = {"PYTHONFAULTHANDLER": "1"}
# What faulthandler calls them, in small letters.
FAULTS = {
    "segmentation fault": signal.SIGSEGV,
    "aborted": signal.SIGABRT,
    "bus error": signal.SIGBUS,
    "floating point exception": signal.SIGFPE,
    "illegal instruction": signal.SIGILL,
}
# llama.cpp and the C++ library abort where memory runs out, say so, and perhaps print where they stood.
LAST_LINES = 60
_NO_MEMORY = re.compile(
    r"out of memory|bad_alloc|(?:failed|unable) to allocate|cannot allocate|ALLOC_FAILED|OUT_OF_MEMORY", re.IGNORECASE
)


def fault_of(exit_code: int | None, log: str) -> signal.Signals | None:
    """Which fault of native code ended a process; None for any other end, an abort for want of memory too.

    `exit_code` is negative for a signal, None where nobody knows it: then, and where it says nothing, the log's end tells.
    """
    if exit_code:
        fault = next((number for number in FAULTS.values() if number == -exit_code), None)
    else:
        # Behind whatever was written last, which may have had no end.
        said = (line.partition(FATAL)[2] for line in log.splitlines() if FATAL in line)
        names = [name.strip().lower().replace("-", " ") for name in said]
        fault = FAULTS.get(names[-1]) if names else None
    before = log.rpartition(FATAL)[0] or log  # behind it there are pages of stack
    last = "\n".join(before.splitlines()[-LAST_LINES:])
    return None if fault == signal.SIGABRT and _NO_MEMORY.search(last) else fault


def tell_of_crashes() -> None:
    """From here on a fault of native code (SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT) writes to stderr which it was and where
    each thread stood."""
    faulthandler.enable(file=STDERR)


def stop_asked(log: logging.Logger) -> asyncio.Event:
    """Set by SIGTERM or SIGINT, which is logged. For the running loop."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def asked(number: signal.Signals) -> None:
        log.info("%s: it stops", number.name)
        stop.set()

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, asked, number)
    return stop
