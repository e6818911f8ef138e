"""How an engine's or a store's process says in its log why it ends: who asked it to, or where native code failed.

Without that a process that was told to stop and one that crashed look alike from outside: both are just gone.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import signal

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# How faulthandler begins what it writes.
FATAL = "Fatal Python error:"
STDERR = 2


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
