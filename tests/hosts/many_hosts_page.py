"""docs/many-hosts.md as something to run: its fenced blocks, with the reader's own addresses, paths and passwords put in."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "many-hosts.md"
_MANAGE = [".venv/bin/python", "manage.py"]


class ManyHostsPage:
    """`put_in` maps what the page writes (an address, a path, `…`) to what a reader puts there."""

    def __init__(self, put_in: Mapping[str, str]) -> None:
        self._put_in = dict(put_in)
        self._sections = {
            title.strip(): text
            for title, text in re.findall(r"^#{2,3} (.*?)$\n(.*?)(?=^#{2,3} |\Z)", PAGE.read_text(), re.M | re.S)
        }

    def blocks(self, section: str) -> list[str]:
        """The fenced blocks below a heading. Raises KeyError for a heading that the page lacks."""
        return [self._filled(text) for text in re.findall(r"^```\w*\n(.*?)^```$", self._sections[section], re.M | re.S)]

    def block(self, section: str, beginning: str) -> str:
        """The one block below a heading with a line that begins like this. Raises AssertionError without."""
        found = [text for text in self.blocks(section) if re.search(f"^{re.escape(beginning)}", text, re.M)]
        assert len(found) == 1, f"{PAGE.name}, {section}: {len(found)} blocks with a line {beginning!r}"
        return found[0]

    def exports(self, section: str) -> dict[str, str]:
        """What the `export` lines below a heading set."""
        words = [shlex.split(line, comments=True) for text in self.blocks(section) for line in text.splitlines()]
        pairs = [word.partition("=") for line in words if line[:1] == ["export"] for word in line[1:]]
        return {name: value for name, _, value in pairs}

    def command(self, section: str, name: str) -> list[str]:
        """The arguments of `manage.py` in the line below a heading that runs its command `name`."""
        words = [shlex.split(line, comments=True) for text in self.blocks(section) for line in text.splitlines()]
        found = [line[2:] for line in words if line[:3] == [*_MANAGE, name]]
        assert len(found) == 1, f"{PAGE.name}, {section}: {len(found)} lines with manage.py {name}"
        return found[0]

    def _filled(self, text: str) -> str:
        # At once and the longest first: what was put in is not looked at again, and 10.0.0.0/24 is no 10.0.0.
        written = sorted(self._put_in, key=len, reverse=True)
        return re.sub("|".join(map(re.escape, written)), lambda found: self._put_in[found[0]], text)
