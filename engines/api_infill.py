"""llama.cpp's `/infill`: what an editor sends to have the text at the cursor filled in."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from engines.api_body import clean_text, validated
from engines.api_completions import CHAT_ONLY
from engines.api_schema import ChatRequest, parse_json_object

MAX_FILES = 1024


class ContextFile(BaseModel):
    """A part of another file that the editor finds worth knowing."""

    model_config = ConfigDict(strict=True, extra="ignore")
    filename: str = "file"
    text: str


class InfillRequest(BaseModel):
    """A validated `POST /infill` body, beside the sampling fields of a chat request. `prompt` goes behind the prefix."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: Annotated[list[ContextFile], Field(max_length=MAX_FILES)] = []
    prompt: str = ""
    n_predict: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    _sampling: ChatRequest = PrivateAttr()

    @model_validator(mode="after")
    def _valid_text(self) -> InfillRequest:
        for text in (self.input_prefix, self.input_suffix, self.prompt):
            clean_text(text)
        for file in self.input_extra:
            clean_text(file.filename)
            clean_text(file.text)
        return self

    @property
    def sampling(self) -> ChatRequest:
        return self._sampling


def parse_infill_request(raw: bytes) -> InfillRequest:
    """Validates an infill body. Raises InvalidRequest (with `param`) or UnsupportedParameter."""
    body = parse_json_object(raw)
    request = validated(InfillRequest, body)
    fields = {name: value for name, value in body.items() if name not in CHAT_ONLY | {"n", "stream_options"}}
    fields |= {"messages": [{"role": "user", "content": ""}], "enable_thinking": False}
    if request.n_predict is not None and request.n_predict > 0:
        fields["max_tokens"] = request.n_predict
    request._sampling = validated(ChatRequest, fields)
    request._sampling.refuse_unsupported()
    return request
