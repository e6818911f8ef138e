"""The completion API's request body. Sampling is read by the chat request's own rules, so both endpoints know the same.

Everything that generates ends up as a ChatRequest: `CompletionRequest.sampling` is one without its messages' meaning.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, create_model, model_validator

from engines.api_body import clean_text, validated
from engines.api_schema import ChatRequest, parse_json_object
from engines.errors import InvalidRequest, UnsupportedParameter

MAX_PROMPTS = 64
MAX_CHOICES = 64
MAX_LOGPROBS = 20

# Fields of a chat request that mean nothing, or something else, where there is no chat.
CHAT_ONLY = frozenset(
    {
        "messages",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "functions",
        "audio",
        "modalities",
        "logprobs",
        "top_logprobs",
        "chat_template_kwargs",
        "enable_thinking",
        "reasoning_effort",
        "reasoning_field",
        "reasoning_format",
        "reasoning_budget",
        "thinking_budget_tokens",
        "max_completion_tokens",
    }
)

# What CompletionRequest has a field of its own for, beside what is chat's alone.
SHADOWED = CHAT_ONLY | {"prompt", "suffix", "echo", "logprobs", "best_of"}

_Token = Annotated[int, Field(ge=0, lt=1 << 31)]


class CompletionRequest(BaseModel):
    """A validated `POST /v1/completions` body: the fields of its own, beside the sampling fields of a chat request.

    `prompt` is one text, several texts, one list of token ids or several. `logprobs` is the number of alternatives to tell.
    """

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    prompt: (
        str
        | Annotated[list[_Token], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[Annotated[list[_Token], Field(min_length=1)]], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    suffix: str | None = None
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    _sampling: ChatRequest = PrivateAttr()

    @model_validator(mode="after")
    def _valid_text(self) -> CompletionRequest:
        for text in (self.suffix or "", *self.texts):
            clean_text(text)
        if self.suffix is not None and len(self.prompts) > 1:
            raise InvalidRequest("suffix needs a single prompt", param="suffix")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Each prompt, as text or as token ids."""
        prompt: Any = self.prompt
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            return [prompt]
        return list(prompt)

    @property
    def texts(self) -> list[str]:
        return [prompt for prompt in self.prompts if isinstance(prompt, str)]

    @property
    def sampling(self) -> ChatRequest:
        return self._sampling

    def refuse_unsupported(self) -> None:
        """Raises UnsupportedParameter for what would change the answer and is not served."""
        choices = self.sampling.n or 1
        if self.best_of is not None and self.best_of != choices:
            raise UnsupportedParameter("best_of is not served; ask for n choices and choose.", param="best_of")
        if self.echo and self.logprobs is not None:
            raise UnsupportedParameter(
                "Log probabilities of the prompt's tokens are not computed.",
                param="echo",
                hint="Ask for echo or for logprobs, not for both.",
            )
        if self.suffix is not None and self.echo:
            raise UnsupportedParameter("echo is not served together with suffix.", param="echo")
        if len(self.prompts) * choices > MAX_CHOICES:
            raise UnsupportedParameter(f"prompts times n is more than {MAX_CHOICES} choices.", param="n")


_SHARED: dict[str, Any] = {
    name: (info.annotation, info) for name, info in ChatRequest.model_fields.items() if name not in SHADOWED
}
# The body with all the fields that a client may send, for the API's description.
CompletionBody = create_model("CompletionBody", __base__=CompletionRequest, **_SHARED)


def parse_completion_request(raw: bytes) -> CompletionRequest:
    """Validates a completion body. Raises InvalidRequest (with `param`) or UnsupportedParameter."""
    body = parse_json_object(raw)
    request = validated(CompletionRequest, body)
    fields = {name: value for name, value in body.items() if name not in CHAT_ONLY}
    # No template, so no reasoning either: a form holds from the first token on.
    fields |= {"messages": [{"role": "user", "content": ""}], "enable_thinking": False}
    if request.logprobs is not None:
        fields |= {"logprobs": True, "top_logprobs": request.logprobs}
    request._sampling = validated(ChatRequest, fields)
    request._sampling.refuse_unsupported()
    request.refuse_unsupported()
    return request
