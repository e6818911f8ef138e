"""What `make run` leaves behind, and how it comes back after the worst."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import PulledModel
from tests.e2e.test_api import HELLO, chat
from tests.stack import TMPFS, Stack, modes_above

NOTHING: dict[str, list[str]] = {"processes": [], "run files": []}


@pytest.fixture
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lifecycle")
    path.chmod(0o700)
    return path


@pytest.fixture
def mortal(home: Path, pulled_smollm2: PulledModel) -> Iterator[Stack]:
    stack = Stack(home, pulled_smollm2.models_dir)
    yield stack
    stack.close()


@pytest.mark.soak
def test_it_comes_back_after_kill_9_and_a_clean_stop_leaves_nothing(mortal: Stack) -> None:
    """One long story instead of five starts: first start, supervisor killed, everything killed, Ctrl-C."""
    modes = modes_above(mortal.home)

    mortal.start()
    engine, store = mortal.process_of("engines.runtime"), mortal.process_of("engines.store")
    assert chat(mortal, {"messages": HELLO, "max_tokens": 5})[0] == 200
    memory = mortal.shared_memory()

    mortal.kill_supervisor()
    mortal.start()
    assert chat(mortal, {"messages": HELLO, "max_tokens": 5})[0] == 200
    assert engine.is_running(), "an engine that outlived its supervisor is adopted, not started anew"
    assert store.is_running()
    assert mortal.process_of("engines.store") == store

    mortal.kill_everything()
    assert mortal.processes() == []
    mortal.start()
    assert chat(mortal, {"messages": HELLO, "max_tokens": 5})[0] == 200
    assert mortal.process_of("engines.store").is_running()
    memory |= mortal.shared_memory()

    assert mortal.interrupt() == 0
    assert mortal.leftovers() == NOTHING
    assert len(memory) > 2  # the servers', the store's, the engine's
    assert not [name for name in memory if (TMPFS / name).exists()]
    assert modes_above(mortal.home) == modes
