"""Chat messages to prompt text, by the model's own Jinja template in a sandbox.

The template comes out of a GGUF, that is, from a stranger: it runs without access to attributes of Python's internals.
"""

from __future__ import annotations

import datetime
import json
import logging
from dataclasses import dataclass
from typing import Any

import jinja2
import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engines.api_schema import ChatRequest, Message
from engines.errors import InvalidRequest
from engines.runtime.cells import common_prefix
from engines.runtime.llama import Vocabulary

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


log = logging.getLogger("hydra.engine.chat")

# A checkpoint nearer to the beginning saves too little to hold a sequence.
MIN_CUT_TOKENS = 16


@dataclass(frozen=True)
class Prompt:
    """A prompt's token ids, and the positions in it where a later request is likely to branch off, ascending."""

    tokens: list[int]
    cuts: list[int]


class TemplateRefused(jinja2.TemplateError):
    """The template itself called raise_exception: this conversation does not fit its rules."""


# The template is data: whatever it raises is its fault or the messages', never the engine's.
_TEMPLATE_FAULTS = (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError)


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
        self._vocabulary = vocabulary
        self._bos = vocabulary.text_of(vocabulary.bos)
        self._eos = vocabulary.text_of(vocabulary.eos)

    def render(self, request: ChatRequest) -> str:
        """The prompt up to where the answer begins. Raises InvalidRequest when the template refuses the messages."""
        try:
            return self._render(request, request.messages, add_generation_prompt=True)
        except TemplateRefused as error:
            raise InvalidRequest(
                f"The model's chat template refuses these messages: {error}", param="messages"
            ) from error
        except _TEMPLATE_FAULTS as error:
            raise InvalidRequest(
                f"The model's chat template failed: {type(error).__name__}: {error}", param="messages"
            ) from error

    def _render(self, request: ChatRequest, messages: list[Message], *, add_generation_prompt: bool) -> str:
        return self._template.render(
            {
                **(request.chat_template_kwargs or {}),
                "messages": [_as_template_sees(message) for message in messages],
                "add_generation_prompt": add_generation_prompt,
                "bos_token": self._bos,
                "eos_token": self._eos,
            }
        )

    def cut_texts(self, request: ChatRequest) -> list[str]:
        """Beginnings of the prompt that a later request is likely to share: the system prompt, and all without the answer's
        opening, since templates drop old reasoning behind it. A template that refuses such a beginning yields none."""
        texts = []
        for messages in (_leading_system(request.messages), request.messages):
            if messages:
                try:
                    texts.append(self._render(request, messages, add_generation_prompt=False))
                except _TEMPLATE_FAULTS as error:
                    log.debug("no cut: the template refuses %d messages (%s)", len(messages), error)
        return texts

    def prompt(self, request: ChatRequest, *, with_cuts: bool) -> Prompt:
        """The rendered prompt as token ids, with the BOS token exactly once if the vocabulary wants one."""
        vocabulary = self._vocabulary
        text = self.render(request)
        written = vocabulary.adds_bos and bool(self._bos) and text.startswith(self._bos)
        tokens = vocabulary.tokenize(text, add_special=not written, parse_special=True)
        cuts: set[int] = set()
        if with_cuts:
            ends = np.cumsum(vocabulary.written_bytes[tokens])
            begin = int(ends[0]) if tokens[0] == vocabulary.bos and not written and vocabulary.adds_bos else 0
            for beginning in self.cut_texts(request):
                # A position between tokens is enough: a cut that is a token early only saves a token less.
                shared = len(text[: common_prefix(beginning, text)].encode())
                cuts.add(int(np.searchsorted(ends, begin + shared, side="right")))
        return Prompt(tokens, sorted(cut for cut in cuts if MIN_CUT_TOKENS <= cut < len(tokens)))


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


def _leading_system(messages: list[Message]) -> list[Message]:
    count = 0
    while count < len(messages) and messages[count].role in ("system", "developer"):
        count += 1
    return messages[:count] if count < len(messages) else []
