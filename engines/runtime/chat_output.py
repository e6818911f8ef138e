"""What a chat model wrote, taken apart while it streams: reasoning, content and tool calls.

A message reads: whitespace, one <think> block or none (whose beginning the prompt may have written already), then content and
calls in any order. Markers never leave in part. What comes out depends on the text alone, never on how it was cut into pieces.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engines.api_schema import ChatRequest
from engines.api_tools import chosen_function
from engines.runtime.chat import END_THINK, THINK, Prompt
from engines.runtime.tool_calls import CALL, END_CALL, FUNCTION, CallParser, HeadReader, NotACall, held_back, may_become


@dataclass(frozen=True)
class ToolCallDelta:
    """News of one tool call. `id` and `name` come once, with the first; `arguments` are JSON text to be appended."""

    index: int
    id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True)
class ChatDelta:
    """What became known of a message: text to be appended to each part."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True)
class ChatFormat:
    """How the text of an answer is to be read.

    `functions` are those that may be called, with the schemas of their parameters; without any, calls are text.
    `opens_thought`: the text begins inside a block of reasoning. `splits_reasoning`: reasoning leaves by its own name,
    `reasoning_field`, and without its markers; else it stays in the content as it was written. With a `call_seed` the same text
    gives its calls the same ids again.
    """

    functions: Mapping[str, Mapping[str, Any] | None] = field(default_factory=dict)
    opens_thought: bool = False
    splits_reasoning: bool = True
    parallel_calls: bool = True
    bare_functions: bool = False
    reasoning_field: str = "reasoning_content"
    call_seed: str = ""

    @classmethod
    def of(cls, request: ChatRequest, prompt: Prompt) -> ChatFormat:
        """What `request` asked for and the model was shown."""
        named = chosen_function(request.tool_choice)
        return cls(
            functions={
                name: function.parameters
                for name, function in request.functions_by_name.items()
                if named in (None, name)
            },
            opens_thought=prompt.opens_thought,
            splits_reasoning=request.reasoning_format != "none",
            parallel_calls=request.parallel_tool_calls is not False,
            # Qwen's coders forget the outer tag at times.
            bare_functions=prompt.tool_format == "qwen_xml",
            reasoning_field=request.reasoning_field,
        )


PLAIN = ChatFormat()


class _Collected:
    """The parts of the delta that is being made."""

    def __init__(self) -> None:
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[ToolCallDelta] = []

    def arguments(self, index: int, text: str) -> None:
        if self.calls and self.calls[-1].index == index:
            last = self.calls[-1]
            self.calls[-1] = ToolCallDelta(index, last.id, last.name, last.arguments + text)
        elif text:
            self.calls.append(ToolCallDelta(index, None, None, text))

    def delta(self) -> ChatDelta:
        return ChatDelta("".join(self.content), "".join(self.reasoning), tuple(self.calls))


class ChatOutput:
    """The parser of one choice's text. `feed` takes any piece of it, `finish` ends it; the deltas joined are the message.

    `plain` turns true once the rest can only be content, so that a caller may pass it on without asking. `reasoning_bytes` are
    those of the text, markers included, up to the end of the reasoning.
    """

    def __init__(self, form: ChatFormat = PLAIN, choice: int = 0) -> None:
        self._form = form
        self._choice = choice
        self._markers = (CALL, FUNCTION) if form.bare_functions else (CALL,)
        self._buffer = ""
        self._state: Callable[[bool], bool] = self._begin
        self._out = _Collected()
        self._gap = ""
        self._has_content = False
        self._parser: CallParser | None = None
        self._head: HeadReader | None = None
        self._searched = 0
        self._counts_reasoning = True
        self.call_count = 0
        self.is_broken = False
        self.plain = False
        self.reasoning_bytes = 0

    def feed(self, text: str) -> ChatDelta:
        if self.passes(text):
            return ChatDelta(content=text)
        if self._counts_reasoning:
            self.reasoning_bytes += len(text.encode())
        self._buffer += text
        return self._read(final=False)

    def passes(self, text: str) -> bool:
        """Whether this text, come next, is content as it stands and needs no feeding."""
        return self.plain or self._is_ordinary(text)

    def _is_ordinary(self, text: str) -> bool:
        """Whether content goes on, nothing is held back, and nothing of `text` needs to be: most tokens beside tools."""
        return (
            self._state == self._content
            and self._has_content
            and not (self._buffer or self._gap or "<" in text)
            and text[-1:] > " "
            and not text[-1].isspace()
        )

    def finish(self) -> ChatDelta:
        """Ends the text: whatever was held back leaves. Must be called once."""
        return ChatDelta() if self.plain else self._read(final=True)

    def finish_reason(self, raw_reason: str) -> str:
        """ "tool_calls" where a model stopped after calls; a call that was cut off by a limit stays one that was cut off."""
        return "tool_calls" if raw_reason == "stop" and self.call_count else raw_reason

    def _read(self, *, final: bool) -> ChatDelta:
        self._out = _Collected()
        while self._state(final):
            pass
        if final and not self.call_count:
            self._out.content.append(self._gap)
        return self._out.delta()

    # Each state reads from the buffer what it can; True: another state goes on with the rest, False: more text is needed.

    # --- reasoning ------------------------------------------------------------------------------

    def _begin(self, final: bool) -> bool:
        text = self._buffer.lstrip()
        if text.startswith(THINK):
            self._take(len(self._buffer) - len(text) + len(THINK), keep_markers=True)
        elif not final and may_become(text, (THINK,)):
            return False
        elif not self._form.opens_thought:
            return self._end_reasoning(0)
        self._state = self._before_thought
        return True

    def _before_thought(self, final: bool) -> bool:
        if self._form.splits_reasoning:
            self._buffer = self._buffer.lstrip()
        if not self._buffer and not final:
            return False
        self._state = self._thought
        return True

    def _thought(self, final: bool) -> bool:
        """Holds back whitespace, which is none of the reasoning's if the end follows."""
        end = self._buffer.find(END_THINK)
        call = self._buffer.find(CALL) if self._form.functions else -1
        if call >= 0 and (end < 0 or call < end):
            self._reason(len(self._trimmed(self._buffer[:call])))
            self._state, self._searched = self._call_in_thought, 0
            return True
        if end >= 0:
            self._end_thought(end)
            return True
        if final:
            self._reason(len(self._buffer))
            return False
        markers = (END_THINK, CALL) if self._form.functions else (END_THINK,)
        self._reason(len(self._trimmed(self._buffer[: len(self._buffer) - held_back(self._buffer, markers)])))
        return False

    def _call_in_thought(self, final: bool) -> bool:
        """A call inside of reasoning is a draft if the reasoning ends behind it. If it never ends, the model forgot to end it,
        and the call is meant."""
        end = self._buffer.find(END_THINK, self._searched)
        if end >= 0:
            self._end_thought(end)
            return True
        if not final:
            self._searched = max(0, len(self._buffer) - len(END_THINK))
            return False
        form = ChatFormat(
            self._form.functions, parallel_calls=self._form.parallel_calls, call_seed=self._form.call_seed
        )
        behind = ChatOutput(form, self._choice)
        parts = (behind.feed(self._buffer), behind.finish())
        if behind.is_broken or not behind.call_count:
            self._reason(len(self._buffer))
            return False
        self.reasoning_bytes -= len(self._buffer.lstrip().encode())
        self.call_count = behind.call_count
        for part in parts:
            self._out.content.append(part.content)
            self._out.calls += part.tool_calls
        self._buffer = ""
        return False

    def _trimmed(self, text: str) -> str:
        return text.rstrip() if self._form.splits_reasoning else text

    def _reason(self, count: int) -> None:
        (self._out.reasoning if self._form.splits_reasoning else self._out.content).append(self._buffer[:count])
        self._buffer = self._buffer[count:]

    def _end_thought(self, end: int) -> None:
        trimmed = len(self._trimmed(self._buffer[:end]))
        self._reason(trimmed)
        self._take(end - trimmed + len(END_THINK), keep_markers=True)
        self._end_reasoning(self.reasoning_bytes - len(self._buffer.encode()))
        self._state = self._behind_thought

    def _end_reasoning(self, reasoning_bytes: int) -> bool:
        self._counts_reasoning = False
        self.reasoning_bytes = reasoning_bytes
        self._state = self._content
        return True

    def _take(self, count: int, *, keep_markers: bool) -> None:
        if keep_markers and not self._form.splits_reasoning:
            self._out.content.append(self._buffer[:count])
        self._buffer = self._buffer[count:]

    def _behind_thought(self, final: bool) -> bool:
        if self._form.splits_reasoning:
            self._buffer = self._buffer.lstrip()
        if not self._buffer and not final:
            return False
        self._state = self._content
        return True

    # --- content --------------------------------------------------------------------------------

    def _content(self, final: bool) -> bool:
        if not self._form.functions:
            self._out.content.append(self._buffer)
            self._buffer, self.plain = "", True
            return False
        starts = [at for marker in self._markers if (at := self._buffer.find(marker)) >= 0]
        if starts:
            self._say(min(starts))
            self._state, self._head = self._before_call, HeadReader(self._form.functions)
            return True
        self._say(len(self._buffer) - (0 if final else held_back(self._buffer, self._markers)))
        return False

    def _say(self, count: int) -> None:
        """Passes content on but for whitespace at its end, which is dropped if a call follows, and also before the content
        if nothing but calls was there."""
        text, self._buffer = self._buffer[:count], self._buffer[count:]
        said = text.rstrip()
        if not said:
            self._gap += text
            return
        if self._has_content or not self.call_count:
            self._out.content.append(self._gap)
            self._out.content.append(said)
        else:
            self._out.content.append(said.lstrip())
        self._gap = text[len(said) :]
        self._has_content = True

    # --- calls ----------------------------------------------------------------------------------

    def _before_call(self, final: bool) -> bool:
        assert self._head is not None
        try:
            head = self._head.read(self._buffer, final=final)
        except NotACall:
            self._say(len(CALL) if self._buffer.startswith(CALL) else len(FUNCTION))
            self._state = self._content
            return True
        if head is None:
            return False
        self._gap = ""
        self._buffer = self._buffer[head.length :]
        self._parser = head.parser
        self.call_count += 1
        if self._is_wanted:
            index = self.call_count - 1
            self._out.calls.append(ToolCallDelta(index, self._call_id(index), head.name, head.arguments))
        self._state = self._call if self._parser else self._behind_call
        return True

    def _call_id(self, index: int) -> str:
        seed = self._form.call_seed
        if not seed:
            return f"call_{secrets.token_hex(12)}"
        return f"call_{hashlib.sha256(f'{seed} {self._choice} {index}'.encode()).hexdigest()[:24]}"

    @property
    def _is_wanted(self) -> bool:
        return self._form.parallel_calls or self.call_count == 1

    def _call(self, final: bool) -> bool:
        assert self._parser is not None
        progress = self._parser.consume(self._buffer, final=final)
        self._buffer = self._buffer[progress.consumed :]
        if self._is_wanted:
            self._out.arguments(self.call_count - 1, progress.arguments)
        if progress.done:
            self._state = self._behind_call
        elif final:
            self.is_broken = True
        return progress.done

    def _behind_call(self, final: bool) -> bool:
        text = self._buffer.lstrip()
        if text.startswith(END_CALL):
            self._buffer = text.removeprefix(END_CALL)
        elif not final and may_become(text, (END_CALL,)):
            return False
        self._state = self._content
        return True
