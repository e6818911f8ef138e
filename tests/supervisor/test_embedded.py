"""The servers of a test run or of one command, and the signals that end it."""

import signal
import subprocess
import sys

import psutil
import pytest

from hydra_site.env import PROJECT_DIR
from hydra_site.supervisor.home import Home

BORROWER = """
import sys, time
from pathlib import Path
from hydra_site.supervisor.embedded import embedded_servers
with embedded_servers(Path(sys.argv[1])):
    print("up", flush=True)
    time.sleep(600)
"""


def running_for(home: Home) -> list[str]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if any(str(home.root) in word for word in words):
            found.append(" ".join(words))
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_their_borrower_ends_them_too(home: Home, number: int) -> None:
    borrower = subprocess.Popen(
        [sys.executable, "-c", BORROWER, str(home.root)],
        cwd=PROJECT_DIR,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with borrower:
        assert borrower.stdout
        assert borrower.stdout.readline() == "up\n"
        assert len(running_for(home)) > 1
        borrower.send_signal(number)
        assert borrower.wait(60) != 0
    assert running_for(home) == []
    assert list(home.run_dir.iterdir()) == []
