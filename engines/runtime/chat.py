"""Chat messages to prompt text, by the model's own Jinja template.

The template runs in processes of its own (`template_process.py`); here stands what it is given and what its text tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from engines.api_message import Message
from engines.api_schema import ChatRequest
from engines.errors import InvalidRequest
from engines.runtime.llama import Vocabulary
from engines.runtime.media_projector import Part
from engines.runtime.media_prompt import assemble, new_marker
from engines.runtime.media_span import NO_SPANS, SpanMap
from engines.runtime.template_process import MAX_TEXT_CHARS, Rendering, TemplateProcess
from engines.runtime.tool_text import with_tools_as_text

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# A checkpoint nearer to the beginning saves too little to hold a sequence.
MIN_CUT_TOKENS = 16
THINK, END_THINK = "<think>", "</think>"
# What stands for an image where a prompt is shown as text; llama.cpp's own.
SHOWN_IMAGE = "<__media__>"
ToolFormat = Literal["qwen_xml", "hermes_json"]


@dataclass(frozen=True)
class Prompt:
    """A prompt's token ids, and the positions in it where a later request is likely to branch off, ascending.

    `opens_thought`: the prompt ends inside a block of reasoning, so that the answer begins in it. `tool_format` is the one in
    which the prompt asks for calls, None if it shows no tools. `end_of_thought` are the tokens that end reasoning. `spans` are
    its images, whose ids stand among the tokens. `system_cut` is the cut behind the system prompt and the tools, 0 where there
    is none.
    """

    tokens: list[int]
    cuts: list[int]
    opens_thought: bool = False
    tool_format: ToolFormat | None = None
    end_of_thought: tuple[int, ...] = ()
    spans: SpanMap = NO_SPANS
    system_cut: int = 0


def tool_format(source: str) -> ToolFormat | None:
    """The format in which a template shows calls, if it is one that can be read."""
    if "<tool_call>" not in source or "tools" not in source:
        return None
    if "<function=" in source and "<parameter=" in source:
        return "qwen_xml"
    return "hermes_json" if "arguments" in source and "<arg_key>" not in source else None


class ChatTemplate:
    """A compiled template. `render` and `prompt` may be called from any thread; `close` ends its processes.

    A template that shows calls in no format that can be read gets tools as text (`tool_text.py`).
    """

    def __init__(self, source: str | None, vocabulary: Vocabulary, *, context_tokens: int | None = None) -> None:
        """None means ChatML. Raises TemplateBroken for a template that cannot be compiled.

        `context_tokens` bounds what it may write: no context holds more characters than its tokens' longest texts together.
        """
        longest = max(1, int(vocabulary.written_bytes.max()))
        source = source or CHATML
        self.tool_format = tool_format(source)
        self._process = TemplateProcess(
            source, max_chars=MAX_TEXT_CHARS if context_tokens is None else context_tokens * longest
        )
        self._vocabulary = vocabulary
        self._bos = vocabulary.text_of(vocabulary.bos)
        self._eos = vocabulary.text_of(vocabulary.eos)
        self._end_of_thought = tuple(vocabulary.tokenize(f"\n{END_THINK}\n\n", add_special=False, parse_special=True))

    def close(self) -> None:
        self._process.close()

    def render(self, request: ChatRequest) -> str:
        """The prompt up to where the answer begins. Raises InvalidRequest when the template refuses the messages."""
        return self._rendered(request, with_cuts=False, image=SHOWN_IMAGE).text

    def prompt(self, request: ChatRequest, *, with_cuts: bool, images: Sequence[Sequence[Part]] = ()) -> Prompt:
        """The rendered prompt as token ids, with the BOS token exactly once if the vocabulary wants one.

        `images` are what stands for each of the request's, in order. Raises InvalidRequest where the template shows not all of
        them, or ends with one.
        """
        marker = new_marker() if images else ""
        rendering = self._rendered(request, with_cuts=with_cuts, image=marker)
        text = rendering.text
        written = self._vocabulary.adds_bos and bool(self._bos) and text.startswith(self._bos)
        if images:
            read = assemble(text, marker, images, self._vocabulary, add_special=not written)
            if read.tokens[-1] < 0:
                raise InvalidRequest("The chat template ends with an image; text must follow it.", param="messages")
            tokens, spans = read.tokens, read.spans
            ends = (np.searchsorted(read.ends, shared, side="right") for shared in rendering.shared_bytes)
            cuts = {spans.whole(int(end)) for end in ends}
        else:
            tokens, spans = self._vocabulary.tokenize(text, add_special=not written, parse_special=True), NO_SPANS
            cuts = self._cuts(tokens, rendering.shared_bytes, adds_bos=self._vocabulary.adds_bos and not written)
        kept = sorted(cut for cut in cuts if MIN_CUT_TOKENS <= cut < len(tokens))
        # The first of two beginnings is the system prompt's.
        system_cut = min(cuts) if len(rendering.shared_bytes) > 1 else 0
        return Prompt(
            tokens,
            kept,
            opens_thought=_opens_thought(text),
            tool_format=(self.tool_format or "hermes_json") if request.functions_by_name else None,
            end_of_thought=self._end_of_thought,
            spans=spans,
            system_cut=system_cut if system_cut in kept else 0,
        )

    def _cuts(self, tokens: list[int], shared_bytes: Sequence[int], *, adds_bos: bool) -> set[int]:
        """The places in `tokens` where so many bytes of the rendered text end."""
        if not shared_bytes:
            return set()
        ends = np.cumsum(self._vocabulary.written_bytes[tokens])
        begin = int(ends[0]) if adds_bos and tokens[0] == self._vocabulary.bos else 0
        # A position between tokens is enough: a cut that is a token early only saves a token less.
        return {int(np.searchsorted(ends, begin + shared, side="right")) for shared in shared_bytes}

    def _rendered(self, request: ChatRequest, *, with_cuts: bool, image: str) -> Rendering:
        """`with_cuts` also compares with beginnings that a later request is likely to share: the system prompt, and all without
        the answer's opening, since templates drop old reasoning behind it."""
        variables = self._variables(request, image)
        messages = variables["messages"]
        beginnings = [count for count in (_leading_system(messages), len(messages)) if count] if with_cuts else []
        rendering = self._process.render(variables, beginnings)
        if request.thinking is False and _opens_thought(rendering.text):
            # The template knows no way to begin without reasoning: the block that it opened is closed empty.
            closed = f"{rendering.text.rstrip()}\n\n{END_THINK}\n\n"
            return Rendering(closed, rendering.shared_bytes)
        return rendering

    def _variables(self, request: ChatRequest, image: str) -> dict[str, Any]:
        """What the template sees: the request's own variables, then those that always are there; `image` stands for one."""
        tools = [] if request.tool_choice == "none" else request.tools or []
        shown_tools = [tool.model_dump(exclude_unset=True) for tool in tools]
        messages = [_as_template_sees(message, image) for message in request.messages]
        if self.tool_format is None:
            messages, shown_tools = with_tools_as_text(messages, shown_tools), []
        return {
            **request.template_variables,
            "messages": messages,
            "tools": shown_tools or None,
            "documents": None,
            "add_generation_prompt": True,
            "bos_token": self._bos,
            "eos_token": self._eos,
        }


def _opens_thought(text: str) -> bool:
    return text.rstrip().endswith(THINK)


def _as_template_sees(message: Message, image: str) -> dict[str, Any]:
    seen: dict[str, Any] = {"role": message.role, "content": message.text(image)}
    if message.role == "developer":
        seen["role"] = "system"
    for key in ("name", "tool_call_id"):
        if getattr(message, key) is not None:
            seen[key] = getattr(message, key)
    if message.tool_calls:
        seen["tool_calls"] = [
            {
                "id": call.id,
                "type": call.type,
                "function": {"name": call.function.name, "arguments": call.function.argument_values()},
            }
            for call in message.tool_calls
        ]
    if message.thoughts is not None:
        seen["reasoning_content"] = message.thoughts
    return seen


def _leading_system(messages: list[dict[str, Any]]) -> int:
    """How many messages of role system the conversation begins with; 0 if it has no others."""
    count = 0
    while count < len(messages) and messages[count]["role"] == "system":
        count += 1
    return count if count < len(messages) else 0
