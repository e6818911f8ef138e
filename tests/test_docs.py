"""The README names what exists: every setting with its default and meaning, every command of the Makefile and manage.py."""

from __future__ import annotations

import re
from pathlib import Path

from hydra_site import env

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_every_setting_stands_in_the_readme_as_in_the_table() -> None:
    for setting in env.SETTINGS:
        default = f"`{setting.default}`" if setting.default else ""
        assert f"| `{setting.name}` | {default} | {setting.help} |" in README


def test_every_make_target_stands_in_the_readme() -> None:
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert phony
    missing = [name for name in phony[1].split() if name != "system-packages" and f"`make {name}`" not in README]
    assert missing == []


def test_every_management_command_stands_in_the_documentation() -> None:
    text = README + (ROOT / "docs" / "architecture.md").read_text()
    commands = [path.stem for path in ROOT.glob("*/management/commands/*.py") if path.stem != "__init__"]
    assert commands
    assert [name for name in commands if f"manage.py {name}" not in text] == []
