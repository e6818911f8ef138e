"""A message of a chat request: who says it, its texts and images, its thoughts and calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from engines.api_body import clean_text
from engines.api_tools import MAX_TOOL_CALLS, ToolCall

ROLES = ("system", "developer", "user", "assistant", "tool")
# Who may show images: the user, and tools in their results.
SHOWING_ROLES = ("user", "tool")

_STRICT = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class ImageUrl(BaseModel):
    """An image as OpenAI's clients send it. `detail` is accepted and means nothing: the projector knows one way."""

    model_config = _STRICT
    url: str
    detail: str | None = None


class ContentPart(BaseModel):
    """A text, or an image by its address (which must be a data: URI; that is looked at where the image is needed)."""

    model_config = _STRICT
    type: str
    text: str | None = None
    image_url: str | ImageUrl | None = None

    @model_validator(mode="after")
    def _has_what_its_type_says(self) -> ContentPart:
        if self.type in ("image_url", "input_image"):
            if self.image_url is None:
                raise ValueError(f"a part of type {self.type!r} needs its image_url")
        elif self.type != "text":
            raise ValueError(f"content of type {self.type!r} is not served; known are text, image_url and input_image")
        elif self.text is None:
            raise ValueError("a part of type 'text' needs its text")
        else:
            clean_text(self.text)
        return self

    @property
    def url(self) -> str | None:
        """An image's address; None for a text."""
        if self.type == "text":
            return None
        return self.image_url.url if isinstance(self.image_url, ImageUrl) else self.image_url


@dataclass(frozen=True)
class ShownImage:
    """An image of a request, and the message and part of it where it stands."""

    url: str
    message: int
    part: int


class Message(BaseModel):
    """One turn's message. `content` may be a string or a list of texts and images; an assistant may have none."""

    model_config = _STRICT
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOL_CALLS)] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _known_role(self) -> Message:
        if self.role not in ROLES:
            raise ValueError(f"unknown role {self.role!r}; known are {', '.join(ROLES)}")
        if self.content is None and not (self.role == "assistant" and (self.tool_calls or self.thoughts)):
            raise ValueError(f"a message of role {self.role!r} needs content")
        for text in (self.content, self.name, self.thoughts, self.tool_call_id):
            if isinstance(text, str):
                clean_text(text)
        if self.role not in SHOWING_ROLES and self.urls():
            raise ValueError(f"a message of role {self.role!r} shows no images; {' and '.join(SHOWING_ROLES)} may")
        return self

    @property
    def thoughts(self) -> str | None:
        return self.reasoning_content if self.reasoning_content is not None else self.reasoning

    def urls(self) -> list[tuple[int, str]]:
        """The images of the content: index of the part and address."""
        parts = self.content if isinstance(self.content, list) else []
        return [(index, part.url) for index, part in enumerate(parts) if part.url is not None]

    def text(self, image: str = "") -> str:
        """The content as one string, with `image` where one stands; texts are joined by line breaks, as llama.cpp does."""
        if self.content is None:
            return ""
        if isinstance(self.content, str):
            return self.content
        pieces: list[str] = []
        before = ""
        for part in self.content:
            if part.type == before == "text":
                pieces.append("\n")
            pieces.append(image if part.url is not None else part.text or "")
            before = part.type
        return "".join(pieces)
