"""The documentation names what exists and nothing else: settings, commands, paths, the engine's fields, endpoints and errors."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.api_schema import ChatRequest
from engines.config import EngineConfig
from engines.errors import EngineError
from engines.runtime.core import EngineCore
from engines.runtime.http import EngineServer
from engines.runtime.metrics import EngineMetrics
from hydra_site import env

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ENGINE_PAGE = (ROOT / "docs" / "engine.md").read_text()
ERROR_MODULES = ("engines.errors", "engines.state_errors")
CODE = re.compile(r"`([^`\s]+)`")
# A file or folder of this repository, perhaps with a *; paths of the API begin with a slash.
PATH = re.compile(r"[\w.*-]+(/[\w.*-]+)*\.(py|md)|[\w.*-]+(/[\w.*-]+)+")


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


# --- paths ---------------------------------------------------------------------------------------


def named_paths(page: Path) -> Iterator[tuple[str, Path]]:
    """Paths that a page names, with the folder that the heading above them names: modules may stand there by name alone."""
    folder = ROOT
    for line in page.read_text().splitlines():
        codes = CODE.findall(line)
        if line.startswith("#"):
            folder = next((ROOT / code for code in codes if (ROOT / code).is_dir()), ROOT)
        yield from ((code, folder) for code in codes if PATH.fullmatch(code))


def exists(name: str, folder: Path) -> bool:
    return any(any(base.glob(name)) for base in {folder, ROOT})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_that_is_named_exists(page: Path) -> None:
    # A word with a slash is a path of ours only if it begins with a folder of ours.
    ours = [(name, folder) for name, folder in named_paths(page) if "." in name or (ROOT / name.split("/")[0]).is_dir()]
    # Where a setting's default lies, the first start makes it.
    ours = [(name, folder) for name, folder in ours if name not in {setting.default for setting in env.SETTINGS}]
    assert [name for name, folder in ours if not exists(name, folder)] == []


def test_the_architecture_names_paths() -> None:
    assert len(list(named_paths(ROOT / "docs" / "architecture.md"))) > 50


# --- the engine's page ---------------------------------------------------------------------------


def section(title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", ENGINE_PAGE, re.M | re.S)
    assert found
    return found[1]


def test_every_setting_of_an_engine_stands_there_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", section("Settings"), re.M))
    expected = {
        field.name: "" if field.default is dataclasses.MISSING else f"`{json.dumps(field.default)}`"
        for field in dataclasses.fields(EngineConfig)
    }
    assert rows == expected


def test_every_field_of_a_chat_request_stands_there() -> None:
    known = set(CODE.findall(section("Request fields")))
    assert [name for name in ChatRequest.model_fields if name not in known] == []


def test_every_error_code_stands_there_with_its_status() -> None:
    statuses = dict[str, str]()
    for line in section("Errors").splitlines():
        if row := re.match(r"\| (.*?) \| (\d+) \|", line):
            statuses |= dict.fromkeys(CODE.findall(row[1]), row[2])
        elif not line.startswith("|"):
            # In prose a status follows the codes that have it.
            for codes, status in re.findall(r"((?:`\w+`,? ?(?:and )?)+)\((\d+)\)", line):
                statuses |= dict.fromkeys(CODE.findall(codes), status)
    kinds = list(EngineError.__subclasses__())
    for kind in kinds:
        kinds += kind.__subclasses__()
    ours = {kind.code: str(kind.http_status) for kind in kinds if kind.__module__ in ERROR_MODULES}
    assert {code: statuses.get(code) for code in ours} == ours


def template(path: str) -> str:
    """aiohttp's `{name:pattern}` as a page writes it."""
    return re.sub(r"{(\w+):[^}]*}", r"{\1}", path)


async def test_every_endpoint_stands_there_and_no_other() -> None:
    config = EngineConfig(model_path="none.gguf", model_name="none")
    server = EngineServer(config, EngineCore(config, 1, asyncio.get_running_loop(), EngineMetrics()))
    try:
        served = {f"{operation.method} {template(operation.path)}" for operation in server.operations()}
    finally:
        server.close()
    assert set(re.findall(r"`((?:GET|POST|PUT|DELETE) /\S*)`", section("Endpoints"))) == served
