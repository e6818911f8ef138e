"""Requests that a chat program makes for itself: a title, tags, a summary, follow-up questions. Nobody goes on with them.

They are known by what they ask for, since most programs do not say. Taking a person's question for one costs it little: its
conversation is not kept warm. Pure.
"""

from __future__ import annotations

import re

# What is asked for stands at the beginning or at the end; what lies between is the conversation.
LOOKED_AT_CHARS = 600
# A task of this kind is one message, perhaps behind a system prompt.
MOST_MESSAGES = 2

_MAKE = r"(?:generat\w*|creat\w*|writ\w*|suggest\w*|provid\w*|summari[sz]\w*|com(?:e|ing) up with|respond with|return|determine)"
_THING = r"(?:title|tags?|summary|summari[sz]e|follow[- ]?up (?:questions?|prompts?)|topic|emoji|search quer(?:y|ies)|keywords?)"
_ABOUT = r"(?:conversation|chat|dialog(?:ue)?|thread|discussion|exchange|message|session)"
_TASK = re.compile(rf"\b{_MAKE}\b.{{0,160}}\b{_THING}\b", re.I | re.S)
_SUMMARY = re.compile(rf"\bsummari[sz]e\b.{{0,80}}\b{_ABOUT}\b", re.I | re.S)
_OF_A_CHAT = re.compile(rf"\b{_ABOUT}(?:'s|s)?\b|<chat_history>|{{{{MESSAGES", re.I)
_ROLE = re.compile(r"\b(?:title|tag|topic|summary)[- ]generat(?:or|ion)\b|### Task:", re.I)


def is_background(system: str, message: str, messages: int) -> bool:
    """Whether a request with this system prompt and this one user message is a program's own; `messages` without systems'."""
    if messages > MOST_MESSAGES:
        return False
    ends = _ends(message)
    asked = f"{_ends(system)}\n{ends}"
    if _ROLE.search(asked) and re.search(_THING, asked, re.I):
        return True
    return bool((_TASK.search(asked) and _OF_A_CHAT.search(asked)) or _SUMMARY.search(ends))


def _ends(text: str) -> str:
    return text if len(text) <= 2 * LOOKED_AT_CHARS else f"{text[:LOOKED_AT_CHARS]}\n{text[-LOOKED_AT_CHARS:]}"
