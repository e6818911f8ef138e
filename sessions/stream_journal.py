"""What the site keeps of a stream so that another engine can go on with it, and the events between engine and site.

An engine that is asked for its journal says `hydra.begun` first, and a `hydra.mark` behind each group of events. A client is
shown what a mark stands behind: so what it has is just what the kept marks tell of, wherever the connection breaks. The marks
are the engines' own (`engines.runtime.journal`) and kept as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable

JOURNAL_HEADER = "X-Hydra-Journal"
MARK = b"event: hydra."
# An answer of some 400,000 tokens; a longer one cannot be continued.
MAX_JOURNAL_BYTES = 8 << 20
# An engine that says so has broken the answer off for reasons of its own.
ITS_OWN_FAILURES = frozenset({"engine_stopping", "decode_failed"})


class StreamJournal:
    """Of one answer, over all engines that write it. `on_move` is told of the events of a handoff."""

    def __init__(self, kept: bytes = b"") -> None:
        self.lines = bytearray(kept)
        self.is_kept = bool(kept)
        self.has_shown = bool(kept)
        self.failure = ""
        self.on_move: Callable[[bytes], None] = lambda frame: None
        self._held: list[bytes] = []

    def shown(self, frames: bytes) -> bytes:
        """Of whole frames those that the client is shown now."""
        if MARK not in frames and not self.is_kept:
            self.has_shown = True
            return frames
        shown: list[bytes] = []
        for frame in frames.split(b"\n\n")[:-1]:
            if frame.startswith(MARK):
                self._heard(frame, shown)
            elif self.is_kept:
                self._held.append(frame)
            else:
                shown.append(frame)
        if not shown:
            return b""
        self.has_shown = True
        return b"\n\n".join(shown) + b"\n\n"

    def _heard(self, frame: bytes, shown: list[bytes]) -> None:
        name, _, data = frame[len(MARK) :].partition(b"\ndata: ")
        if name == b"mark":
            self._keep(data)
            shown += self._held
            self._held = []
        elif name == b"begun":
            self.is_kept = True
            self._keep(data)
        elif name == b"failed":
            self.failure = str(json.loads(data)["code"])
        else:
            self.on_move(frame)

    def _keep(self, line: bytes) -> None:
        if len(self.lines) < MAX_JOURNAL_BYTES and line != b"[]":
            self.lines += line + b"\n"

    @property
    def is_closed(self) -> bool:
        """Whether the stream's very end is here."""
        return b'"closed"' in self.lines[self.lines.rfind(b"\n", 0, -1) + 1 :]

    @property
    def is_cut(self) -> bool:
        """Whether the engine has ended a stream that another one should go on with."""
        return self.is_kept and not self.is_closed and (not self.failure or self.failure in ITS_OWN_FAILURES)

    @property
    def can_go_on(self) -> bool:
        """Whether another engine can write on what the client has."""
        return not self.has_shown or (self.is_kept and len(self.lines) < MAX_JOURNAL_BYTES)

    def held(self) -> bytes:
        """What came behind the last mark, where nobody will go on with the stream."""
        held, self._held = self._held, []
        return b"".join(frame + b"\n\n" for frame in held)

    def goes_on(self) -> None:
        """Another engine writes the stream on from the last mark."""
        self._held, self.failure = [], ""
