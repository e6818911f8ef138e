"""Scripted conversations: the client owns both sides, so both servers see the same history whatever they answered."""

from __future__ import annotations

from collections.abc import Sequence

from bench.load import text_of_words

TURNS = 5
USER_WORDS, REASONING_WORDS, ANSWER_WORDS = 60, 120, 90


def history(conversation: int, turn: int, system_words: int) -> list[dict[str, str]]:
    """The messages of `turn` (from 0): system, then earlier turns with answer and reasoning, then the new user message.

    Templates of reasoning models drop the reasoning of earlier turns, so each prompt parts from the last one near its end.
    """
    messages = [{"role": "system", "content": text_of_words(system_words, conversation, "system")}]
    for earlier in range(turn + 1):
        messages.append({"role": "user", "content": text_of_words(USER_WORDS, conversation, earlier, "user")})
        if earlier < turn:
            messages.append(
                {
                    "role": "assistant",
                    "reasoning_content": text_of_words(REASONING_WORDS, conversation, earlier, "reasoning"),
                    "content": text_of_words(ANSWER_WORDS, conversation, earlier, "answer"),
                }
            )
    return messages


def reusable_tokens(prompt: Sequence[int], computed: Sequence[Sequence[int]]) -> int:
    """The longest prefix of `prompt` that an earlier prompt shares; the last token must always be computed again."""
    longest = max((_common_prefix(prompt, earlier) for earlier in computed), default=0)
    return min(longest, len(prompt) - 1)


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count
