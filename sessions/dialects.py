"""The APIs that the site relays: for each path, how its requests are read and how its answers tell what happened.

An engine serves the same paths. A new endpoint of the engine becomes one of the site by a line here and a URL.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engines.client import ANSWER_TIMEOUT_S
from sessions import engine_call as calls
from sessions.answer_form import CHAT_FORM, COMPLETION_FORM, MESSAGE_FORM, RESPONSE_FORM, USAGE_FORM, AnswerForm
from sessions.engine_call import EngineCall

UTILITY_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Dialect:
    """One path. `is_turn`: its requests are written down as turns; `answer_timeout_s` bounds an answer in one piece."""

    path: str
    form: AnswerForm
    call: Callable[[Dialect, bytes], EngineCall]
    method: str = "POST"
    is_turn: bool = True
    answer_timeout_s: float = ANSWER_TIMEOUT_S

    def read(self, raw: bytes) -> EngineCall:
        """The request in this body. Raises InvalidRequest or ModelNotFound."""
        return self.call(self, raw)


def _utility(path: str, form: AnswerForm = USAGE_FORM, method: str = "POST") -> Dialect:
    return Dialect(path, form, calls.plain_call, method, is_turn=False, answer_timeout_s=UTILITY_TIMEOUT_S)


CHAT = Dialect("/v1/chat/completions", CHAT_FORM, calls.chat_call)
COMPLETIONS = Dialect("/v1/completions", COMPLETION_FORM, calls.completion_call)
RESPONSES = Dialect("/v1/responses", RESPONSE_FORM, calls.response_call)
MESSAGES = Dialect("/v1/messages", MESSAGE_FORM, calls.message_call)
STREAMED = {dialect.path: dialect for dialect in (CHAT, COMPLETIONS, RESPONSES, MESSAGES)}
COUNT_TOKENS = _utility("/v1/messages/count_tokens", MESSAGE_FORM)
EMBEDDINGS = Dialect("/v1/embeddings", USAGE_FORM, calls.gathered_call)
RERANK = Dialect("/v1/rerank", USAGE_FORM, calls.gathered_call)
TOKENIZE = _utility("/tokenize")
DETOKENIZE = _utility("/detokenize")
APPLY_TEMPLATE = _utility("/apply-template")
PROPS = _utility("/props", method="GET")
