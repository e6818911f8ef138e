"""docs/store.md names every setting with its default, and every figure."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

from engines.store.books import Counts, StoreStatus
from engines.store.config import StoreConfig

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "store.md").read_text()


def test_every_setting_stands_there_with_its_default() -> None:
    written: dict[str, str] = {}
    for names, defaults in re.findall(r"^\| (`[^|]*) \|([^|]*)\|", PAGE, re.M):
        keys = re.findall(r"`(\w+)`", names)
        values = [value.strip(" `") for value in defaults.split(",")]
        assert len(keys) == len(values), names
        written |= dict(zip(keys, values, strict=True))
    fields = {field.name: field.default for field in dataclasses.fields(StoreConfig)}
    assert set(written) == set(fields)
    for key, default in fields.items():
        text = default if isinstance(default, str) else json.dumps(default)
        assert written[key] == text or float(written[key]) == default, key


def test_every_figure_stands_there() -> None:
    for kind in (StoreStatus, Counts):
        assert [field.name for field in dataclasses.fields(kind) if f"`{field.name}`" not in PAGE] == []
