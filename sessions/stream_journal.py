"""What the site keeps of a stream so that another engine can go on with it, and the events between engine and site.

An engine that is asked for its journal says `hydra.begun` first, and a `hydra.mark` behind each group of events. A client is
shown what a mark stands behind: so what it has is just what the kept marks tell of, wherever the connection breaks. The marks
are the engines' own (`engines.runtime.journal`) and kept as they are.

The first mark of an engine that a generation moved to says how much of the answer was written elsewhere. Where the client has not
just that, since its engine was lost with the last of it on the way, the stream has a gap, and nothing behind it is shown: it is
written on from the last mark, as if an engine had been lost.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable

from engines.errors import ProtocolBroken

JOURNAL_HEADER = "X-Hydra-Journal"
MARK = b"event: hydra."
# An answer of some 400,000 tokens; a longer one cannot be continued.
MAX_JOURNAL_BYTES = 8 << 20
# An engine that says so has broken the answer off for reasons of its own.
ITS_OWN_FAILURES = frozenset({"engine_stopping", "decode_failed"})
# By choice the characters of its text, and whether its end was written too.
Written = dict[int, tuple[int, bool]]


class StreamJournal:
    """Of one answer, over all engines that write it. `on_move` is told of the events of a handoff. With `has_gap` what the engine
    writes does not follow on what was shown."""

    def __init__(self, kept: bytes = b"") -> None:
        self.lines = bytearray(kept)
        self.is_kept = bool(kept)
        self.has_shown = bool(kept)
        self.failure = ""
        self.has_gap = False
        self._written: Written | None = None
        self.on_move: Callable[[bytes], None] = lambda frame: None
        self._held: list[bytes] = []

    def shown(self, frames: bytes) -> bytes:
        """Of whole frames those that the client is shown now."""
        if MARK not in frames and not self.is_kept:
            self.has_shown = True
            return frames
        shown: list[bytes] = []
        for frame in frames.split(b"\n\n")[:-1]:
            if self.has_gap:
                break
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
            if self._written is not None:
                self.has_gap, self._written = not _follows(data, self._written), None
                if self.has_gap:
                    return
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

    def written(self) -> Written | None:
        """How much of each choice the marks tell of; None for a stream without, or with more than are kept. Any thread, while
        nothing comes: of a long answer it takes a while. Raises ProtocolBroken."""
        if not self.is_kept or len(self.lines) >= MAX_JOURNAL_BYTES:
            return None
        characters: Counter[int] = Counter()
        ended: set[int] = set()
        try:
            for line in self.lines.splitlines()[1:]:
                for choice, count, _, *more in json.loads(line):
                    characters[choice] += count
                    if more and "reason" in more[0]:
                        ended.add(choice)
        except (ValueError, TypeError) as error:
            raise ProtocolBroken("The engine's marks cannot be read.") from error
        return {choice: (count, choice in ended) for choice, count in characters.items() if count or choice in ended}

    def goes_on(self, written: Written | None = None) -> None:
        """Another engine writes the stream on from the last mark; one that a generation moved to says how much was `written`."""
        self._held, self.failure = [], ""
        self.has_gap, self._written = False, written


def _follows(data: bytes, written: Written) -> bool:
    """Whether that is what the first mark of an answer that moved there tells of; an engine may not tell."""
    for _, _, _, *more in json.loads(data):
        if more and "written" in more[0]:
            told = more[0]["written"]
            return written == {choice: (count, ended) for choice, count, ended in told if count or ended}
    return True
