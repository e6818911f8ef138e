"""The bodies of what is done with slots: save and restore as llama-server has them, and park."""

from __future__ import annotations

import re

from pydantic import BaseModel, ConfigDict, field_validator

# No separators and no leading dot: the name stays in its folder, and unfinished files are never restored.
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}")


class SlotFileRequest(BaseModel):
    """`POST /slots/{id}?action=save|restore`: a plain file name inside the engine's folder for slots."""

    model_config = ConfigDict(strict=True, extra="ignore")
    filename: str

    @field_validator("filename")
    @classmethod
    def _plain_name(cls, value: str) -> str:
        if not _NAME.fullmatch(value):
            raise ValueError("must be 1 to 128 letters, digits, dots, dashes and underscores, and begin with no dot")
        return value


class ParkRequest(BaseModel):
    """`POST /sessions/park`: the session as X-Hydra-Session named it."""

    model_config = ConfigDict(strict=True, extra="ignore")
    session: str
