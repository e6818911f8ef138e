"""Bodies of the endpoints between text and tokens, with llama.cpp's names."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator

from engines.api_body import clean_text

_STRICT = ConfigDict(strict=True, extra="ignore")
MAX_TOKENS = 1 << 22


class TokenizeRequest(BaseModel):
    """`POST /tokenize`. `add_special` puts the vocabulary's own tokens around the text, `with_pieces` tells each token's text."""

    model_config = _STRICT
    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False

    @field_validator("content")
    @classmethod
    def _valid_text(cls, value: str) -> str:
        return clean_text(value)


class DetokenizeRequest(BaseModel):
    """`POST /detokenize`."""

    model_config = _STRICT
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(max_length=MAX_TOKENS)]
