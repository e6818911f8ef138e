"""Chat messages to prompt text, by the model's own Jinja template in a sandbox.

The template comes out of a GGUF, that is, from a stranger: it runs without access to attributes of Python's internals.
"""

from __future__ import annotations

import datetime
import json
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engines.api_schema import ChatRequest, Message
from engines.errors import InvalidRequest
from engines.runtime.llama import Vocabulary

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class TemplateRefused(jinja2.TemplateError):
    """The template itself called raise_exception: this conversation does not fit its rules."""


def _raise_exception(message: str) -> None:
    raise TemplateRefused(message)


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    """Jinja's own tojson escapes HTML, which would change what the model reads."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)  # noqa: DTZ005 -- templates mean the host's local date


class ChatTemplate:
    """A compiled template. `render` may be called from any thread."""

    def __init__(self, source: str | None, vocabulary: Vocabulary) -> None:
        """Raises jinja2.TemplateSyntaxError for a template that cannot be compiled. None means ChatML."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        self._template = environment.from_string(source or CHATML)
        self._bos = vocabulary.text_of(vocabulary.bos)
        self._eos = vocabulary.text_of(vocabulary.eos)

    def render(self, request: ChatRequest) -> str:
        """The prompt up to where the answer begins. Raises InvalidRequest when the template refuses the messages."""
        try:
            return self._template.render(
                {
                    **(request.chat_template_kwargs or {}),
                    "messages": [_as_template_sees(message) for message in request.messages],
                    "add_generation_prompt": True,
                    "bos_token": self._bos,
                    "eos_token": self._eos,
                }
            )
        except TemplateRefused as error:
            raise InvalidRequest(
                f"The model's chat template refuses these messages: {error}", param="messages"
            ) from error
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
            # The template is data: whatever it raises is its fault or the messages', never the engine's.
            raise InvalidRequest(
                f"The model's chat template failed: {type(error).__name__}: {error}", param="messages"
            ) from error

    def tokens(self, request: ChatRequest, vocabulary: Vocabulary) -> list[int]:
        """The rendered prompt as token ids, with the BOS token exactly once if the vocabulary wants one."""
        text = self.render(request)
        written = vocabulary.adds_bos and bool(self._bos) and text.startswith(self._bos)
        return vocabulary.tokenize(text, add_special=not written, parse_special=True)


def _as_template_sees(message: Message) -> dict[str, Any]:
    seen: dict[str, Any] = {"role": message.role, "content": message.text()}
    if message.role == "developer":
        seen["role"] = "system"
    for key in ("name", "tool_calls", "tool_call_id"):
        if getattr(message, key) is not None:
            seen[key] = getattr(message, key)
    if message.thoughts is not None:
        seen["reasoning_content"] = message.thoughts
    return seen
