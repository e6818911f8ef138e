"""What the site keeps of a stream so that another engine can go on with it, and the events between engine and site.

An engine that is asked for its journal says `hydra.begun` first, and a `hydra.mark` behind each group of events. A client is
shown what a mark stands behind: so what it has is just what the kept marks tell of, wherever the connection breaks. The marks
are the engines' own (`engines.runtime.journal`) and kept as they are.

The first mark of an engine that a generation moved to says how much of the answer was written elsewhere. Where the client has not
just that, since its engine was lost with the last of it on the way, the stream has a gap, and nothing behind it is shown: it is
written on from the last mark, as if an engine had been lost.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable

JOURNAL_HEADER = "X-Hydra-Journal"
MARK = b"event: hydra."
# An answer of some 400,000 tokens; a longer one cannot be continued.
MAX_JOURNAL_BYTES = 8 << 20
# An engine that says so has broken the answer off for reasons of its own.
ITS_OWN_FAILURES = frozenset({"engine_stopping", "decode_failed"})
# So much is counted at once; more of it beside the event loop.
COUNTED_INLINE_BYTES = 32 << 10
# By choice the characters of its text, and whether its end was written too.
Written = dict[int, tuple[int, bool]]
# By choice its characters, and the choices that have ended.
Counts = tuple[Counter[int], set[int]]

logger = logging.getLogger(__name__)


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
        self._counting: asyncio.Task[Counts] | None = None
        self._counted_bytes = 0
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
            if name == b"moving":
                self._count_soon()
            self.on_move(frame)

    def _keep(self, line: bytes) -> None:
        if len(self.lines) < MAX_JOURNAL_BYTES and line != b"[]":
            self.lines += line + b"\n"

    @property
    def created(self) -> int:
        """When the answer says it was begun, in seconds since 1970; 0 where its engine has not told."""
        if not self.is_kept:
            return 0
        try:
            return int(json.loads(self.lines[: self.lines.find(b"\n")])["created"])
        except (ValueError, KeyError, TypeError):
            return 0

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
        self.has_gap, self._written = False, None

    async def goes_along(self) -> None:
        """The engine writes it on that its generation moved to, which says how much was written before."""
        self.goes_on()
        if not self.is_kept or len(self.lines) >= MAX_JOURNAL_BYTES:
            return
        self._count_soon()
        assert self._counting is not None
        counting, self._counting = self._counting, None
        try:
            characters, ended = await counting
            rest = bytes(self.lines[self._counted_bytes :])
            more = _counted(rest) if len(rest) < COUNTED_INLINE_BYTES else await asyncio.to_thread(_counted, rest)
        except (ValueError, TypeError) as error:
            logger.warning("an engine's marks cannot be read, so that its stream cannot be followed: %r", error)
            self.has_gap = True
            return
        characters, ended = characters + more[0], ended | more[1]
        self._written = {choice: (characters[choice], choice in ended) for choice in {*characters, *ended}}

    def _count_soon(self) -> None:
        """Have counted what the marks tell of by now, so that little is left to do when the stream goes on elsewhere: of a long
        answer it takes a while."""
        if self.is_kept and self._counting is None:
            self._counted_bytes = len(self.lines)
            counting = asyncio.to_thread(_counted, bytes(self.lines))
            self._counting = asyncio.create_task(counting, name="journal-count")


def _counted(lines: bytes) -> Counts:
    """Raises ValueError, TypeError for what are no marks."""
    characters: Counter[int] = Counter()
    ended: set[int] = set()
    for line in lines.splitlines():
        entries = json.loads(line)
        if isinstance(entries, dict):
            continue  # the head
        for choice, count, _, *more in entries:
            characters[choice] += count
            if more and "reason" in more[0]:
                ended.add(choice)
    return characters, ended


def _follows(data: bytes, written: Written) -> bool:
    """Whether that is what the first mark of an answer that moved there tells of; an engine may not tell."""
    for _, _, _, *more in json.loads(data):
        if more and "written" in more[0]:
            told = more[0]["written"]
            return written == {choice: (count, ended) for choice, count, ended in told if count or ended}
    return True
