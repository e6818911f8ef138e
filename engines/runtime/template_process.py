"""Chat templates in processes of their own, so that no template holds a thread of the engine or takes its memory.

What a template may do, and why limits inside one process would not hold, stands in `template_sandbox.py`.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.errors import ContextLengthExceeded, InvalidRequest, TemplateBroken
from engines.runtime.template_sandbox import LENGTH

SANDBOX = Path(__file__).with_name("template_sandbox.py")
CPU_S = 5.0
# The process may wait for a core; the bound that counts is its CPU time.
WALL_S = 60.0
MAX_PROCESSES = 2
MAX_TEXT_CHARS = 32 << 20
MAX_ANSWER_BYTES = 4 * MAX_TEXT_CHARS

log = logging.getLogger("hydra.engine.template")


@dataclass(frozen=True)
class Rendering:
    """A rendered prompt, and how many of its bytes the rendering of each wanted beginning has in common with it."""

    text: str
    shared_bytes: tuple[int, ...]


class _Ended(Exception):
    """The process is gone, or had to go; the message says why, as a sentence about the template."""


class _Sandbox:
    """One process. Used by one thread at a time; after _Ended it is of no more use."""

    def __init__(self, cpu_s: float) -> None:
        self._deadline_s = WALL_S
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-X", "utf8", str(SANDBOX), str(cpu_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={key: os.environ[key] for key in ("TZ",) if key in os.environ},
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Raises _Ended."""
        raw = json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogatepass")
        deadline = time.monotonic() + self._deadline_s
        try:
            view = memoryview(LENGTH.pack(len(raw)) + raw)
            while view:
                view = view[self._requests.write(view) or 0 :]
            size = LENGTH.unpack(self._read(LENGTH.size, deadline))[0]
            if size > MAX_ANSWER_BYTES:
                raise _Ended("it wrote too much")
            answer: dict[str, Any] = json.loads(self._read(size, deadline).decode("utf-8", "surrogatepass"))
        except BrokenPipeError:
            raise self._ended() from None
        return answer

    def _read(self, size: int, deadline: float) -> bytes:
        read = bytearray()
        poll = select.poll()
        poll.register(self._answers, select.POLLIN)
        while len(read) < size:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise _Ended(f"it took longer than {self._deadline_s:g} s")
            chunk = self._answers.read(min(size - len(read), 1 << 20))
            if not chunk:
                raise self._ended()
            read += chunk
        return bytes(read)

    def _ended(self) -> _Ended:
        self._process.kill()
        code = self._process.wait()
        if code == -signal.SIGPROF:
            return _Ended("it took too much time")
        return _Ended("it took too much memory" if code == 3 else f"its process ended with {code}")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._requests.close()
        self._answers.close()


class TemplateProcess:
    """A compiled template that renders in up to MAX_PROCESSES processes, each started when it is first needed.

    `render` may be called from any thread, `close` ends the processes (calling it twice is harmless). Raises TemplateBroken for
    a template that cannot be compiled.
    """

    def __init__(self, source: str, *, max_chars: int = MAX_TEXT_CHARS, cpu_s: float = CPU_S) -> None:
        """`max_chars` bounds each text that it renders, `cpu_s` the time for a request."""
        self._source = source
        self._max_chars = min(max_chars, MAX_TEXT_CHARS)
        self._cpu_s = cpu_s
        self._idle: queue.LifoQueue[_Sandbox | None] = queue.LifoQueue()
        for _ in range(MAX_PROCESSES - 1):
            self._idle.put(None)
        self._idle.put(self._start())
        # Whoever forgets to close it leaves no process behind.
        self.close = weakref.finalize(self, _close_all, self._idle)

    def _start(self) -> _Sandbox:
        sandbox = _Sandbox(self._cpu_s)
        try:
            problem = sandbox.ask({"source": self._source}).get("failed")
        except _Ended as ended:
            problem = str(ended)
        if problem is not None:
            sandbox.close()
            raise TemplateBroken(f"The chat template cannot be compiled: {problem}")
        return sandbox

    def render(self, variables: Mapping[str, Any], beginnings: Sequence[int] = ()) -> Rendering:
        """The text for `variables`; `beginnings` are counts of messages whose rendering alone, without generation prompt, is
        to be compared with it (those that the template refuses are left out).

        Raises ContextLengthExceeded for a text beyond `max_chars`, and InvalidRequest when the template refuses the
        messages, fails, or goes beyond its other bounds.
        """
        request = {"variables": variables, "beginnings": list(beginnings), "max_chars": self._max_chars}
        sandbox = self._idle.get()
        try:
            sandbox = sandbox or self._start()
            answer = sandbox.ask(request)
        except _Ended as ended:
            if sandbox is not None:
                sandbox.close()
            sandbox = None
            log.warning("the chat template's process was ended: %s", ended)
            answer = {"failed": str(ended)}
        finally:
            self._idle.put(sandbox)
        if "too_long" in answer:
            raise ContextLengthExceeded(
                f"The rendered prompt has more than {self._max_chars} characters; no context holds it.",
                param="messages",
            )
        if "refused" in answer:
            raise InvalidRequest(
                f"The model's chat template refuses these messages: {answer['refused']}", param="messages"
            )
        if "failed" in answer:
            raise InvalidRequest(f"The model's chat template failed: {answer['failed']}", param="messages")
        return Rendering(answer["text"], tuple(answer["shared_bytes"]))


def require_compiles(source: str) -> None:
    """Raises TemplateBroken, with the line, for a template that cannot be compiled."""
    TemplateProcess(source).close()


def _close_all(idle: queue.LifoQueue[_Sandbox | None]) -> None:
    """Waits for renderings in progress; whoever renders later starts a process anew."""
    for _ in range(MAX_PROCESSES):
        sandbox = idle.get()
        if sandbox is not None:
            sandbox.close()
    for _ in range(MAX_PROCESSES):
        idle.put(None)
