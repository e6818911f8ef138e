"""The output items of a response, and the typed events that tell of their growth. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engines.runtime.answer_parts import Change, Part

_PREFIXES = {"reasoning": "rs", "text": "msg", "tool_call": "fc"}


class ResponseItems:
    """One item for each part of the answer. With `as_summary` reasoning leaves as a summary, which some clients show only."""

    def __init__(self, identity: str, *, as_summary: bool) -> None:
        self.all: list[dict[str, Any]] = []
        self._identity = identity
        self._as_summary = as_summary

    def events(self, change: Change, *, cut_short: bool) -> Iterator[dict[str, Any]]:
        """The change's events, without their numbers. `cut_short`: the answer ends here because it may grow no longer."""
        part = change.part
        if change.kind == "open":
            yield from self._open(part)
        elif change.kind == "write":
            yield {
                "type": f"response.{self._stem(part)}.delta",
                **self._place(part),
                "delta": change.text,
                **_logprobs(part),
            }
        else:
            yield from self._close(part, "incomplete" if cut_short else "completed")

    def _open(self, part: Part) -> Iterator[dict[str, Any]]:
        item = self._item(part, "in_progress")
        self.all.append(item)
        yield {"type": "response.output_item.added", "output_index": part.index, "item": item}
        if part.kind != "tool_call":
            yield {"type": f"response.{self._container(part)}.added", **self._place(part), "part": self._content(part)}

    def _close(self, part: Part, status: str) -> Iterator[dict[str, Any]]:
        item = self.all[part.index] = self._item(part, status)
        text = {"arguments": part.text, "name": part.name} if part.kind == "tool_call" else {"text": part.text}
        yield {"type": f"response.{self._stem(part)}.done", **self._place(part), **text, **_logprobs(part)}
        if part.kind != "tool_call":
            yield {"type": f"response.{self._container(part)}.done", **self._place(part), "part": self._content(part)}
        yield {"type": "response.output_item.done", "output_index": part.index, "item": item}

    def _item(self, part: Part, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._id(part), "status": status}
        contents = [self._content(part)] if status != "in_progress" else []
        if part.kind == "text":
            return {**item, "type": "message", "role": "assistant", "content": contents}
        if part.kind == "reasoning":
            summary, content = (contents, []) if self._as_summary else ([], contents)
            return {**item, "type": "reasoning", "summary": summary, "content": content}
        return {**item, "type": "function_call", "call_id": part.call_id, "name": part.name, "arguments": part.text}

    def _content(self, part: Part) -> dict[str, Any]:
        if part.kind == "text":
            return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}
        return {"type": "summary_text" if self._as_summary else "reasoning_text", "text": part.text}

    def _place(self, part: Part) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": self._id(part), "output_index": part.index}
        if part.kind == "tool_call":
            return place
        return {**place, "summary_index" if self._summarises(part) else "content_index": 0}

    def _stem(self, part: Part) -> str:
        if part.kind == "tool_call":
            return "function_call_arguments"
        if part.kind == "text":
            return "output_text"
        return "reasoning_summary_text" if self._as_summary else "reasoning_text"

    def _container(self, part: Part) -> str:
        return "reasoning_summary_part" if self._summarises(part) else "content_part"

    def _summarises(self, part: Part) -> bool:
        return part.kind == "reasoning" and self._as_summary

    def _id(self, part: Part) -> str:
        return f"{_PREFIXES[part.kind]}_{self._identity}_{part.index}"


def _logprobs(part: Part) -> dict[str, Any]:
    return {"logprobs": []} if part.kind == "text" else {}
