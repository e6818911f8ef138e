"""Bodies of the endpoints that pool: OpenAI's embeddings, and reranking in Jina's shape. For site and engine alike."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, field_validator

from engines.api_body import clean_text, validated
from engines.api_schema import parse_json_object

MAX_INPUTS = 2048
MAX_TOKEN_ID = (1 << 31) - 1

_STRICT = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
_INPUT_SCHEMA = {
    "oneOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    ]
}

Input = str | list[int]


class EmbeddingRequest(BaseModel):
    """`POST /v1/embeddings`. Token ids are taken as they are; texts get the vocabulary's own tokens around them."""

    model_config = _STRICT
    # Any, and checked below: a union would list every number of a long input as a wrong string first.
    input: Annotated[Any, WithJsonSchema(_INPUT_SCHEMA)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None

    @field_validator("input")
    @classmethod
    def _texts_or_ids(cls, value: Any) -> list[Input]:
        if isinstance(value, str):
            return [_checked(value, "it")]
        if not isinstance(value, list) or not value:
            raise ValueError("must be a text, a list of texts, a list of token ids or a list of such lists; not empty")
        if type(value[0]) is int:
            return [_checked(value, "it")]
        if len(value) > MAX_INPUTS:
            raise ValueError(f"at most {MAX_INPUTS} inputs, got {len(value)}")
        return [_checked(item, f"input {index}") for index, item in enumerate(value)]

    @property
    def inputs(self) -> list[Input]:
        """All inputs; a single one makes a list of one."""
        found: list[Input] = self.input
        return found


def _checked(item: Any, name: str) -> Input:
    if isinstance(item, str):
        if not item:
            raise ValueError(f"{name} is an empty text, which has no embedding")
        return clean_text(item)
    if not isinstance(item, list) or not item:
        raise ValueError(f"{name} must be a text or a list of token ids, and not empty")
    for token in item:
        # bool is an int to Python, and true is no token.
        if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID:
            raise ValueError(f"{name} holds {str(token)[:40]!r}, which is no token id")
    return item


class Document(BaseModel):
    """A document of a rerank request that is not a plain string."""

    model_config = _STRICT
    text: str


class RerankRequest(BaseModel):
    """`POST /v1/rerank`. `raw_scores` leaves a single logit as the model gave it, instead of its sigmoid."""

    model_config = _STRICT
    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[list[str | Document], Field(min_length=1, max_length=MAX_INPUTS)]
    model: str | None = None
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool = False
    raw_scores: bool = False

    @field_validator("query")
    @classmethod
    def _valid_query(cls, value: str) -> str:
        return clean_text(value)

    @field_validator("documents")
    @classmethod
    def _valid_documents(cls, value: list[str | Document]) -> list[str | Document]:
        for document in value:
            clean_text(document if isinstance(document, str) else document.text)
        return value

    @property
    def texts(self) -> list[str]:
        return [document if isinstance(document, str) else document.text for document in self.documents]


def parse_embedding_request(raw: bytes) -> EmbeddingRequest:
    """Raises InvalidRequest, with the field that is wrong as `param`."""
    return validated(EmbeddingRequest, parse_json_object(raw))


def parse_rerank_request(raw: bytes) -> RerankRequest:
    """Raises InvalidRequest, with the field that is wrong as `param`."""
    return validated(RerankRequest, parse_json_object(raw))
