"""Addresses of the API: those below /v1/, and those that llama.cpp's clients expect at the root."""

from __future__ import annotations

from django.urls import path, re_path

from engines.api_completions import CompletionBody
from engines.api_embeddings import EmbeddingRequest, RerankRequest
from engines.api_messages import CountTokensRequest, MessagesRequest
from engines.api_responses import ResponsesRequest
from engines.api_schema import ChatRequest
from engines.api_text import DetokenizeRequest, TokenizeRequest
from sessions import dialects
from sessions.api import session_views, stream_views, views
from sessions.api.openapi import openapi
from sessions.api.operations import JSON, RELAYED, SSE, Operation, Parameter
from sessions.api.relay_views import CONVERSATION_HEADER, RESUMABLE_HEADER, relay_view
from sessions.api.route_headers import BACKGROUND_HEADER, IDEMPOTENCY_HEADER, TIMEOUT_HEADER

_SWITCH = {"type": "string", "enum": ["0", "1"]}
_RESUMABLE = Parameter(RESUMABLE_HEADER, "header", "1: the stream goes on without this connection.", _SWITCH)
_CONVERSATION = Parameter(CONVERSATION_HEADER, "header", "A name of your own to find the stream by.")
_BACKGROUND = Parameter(BACKGROUND_HEADER, "header", "1: nobody goes on with this; keep it off conversations.", _SWITCH)
_IDEMPOTENCY = Parameter(IDEMPOTENCY_HEADER, "header", "Retries under the same key get the first one's answer.")
_TIMEOUT = Parameter(
    TIMEOUT_HEADER,
    "header",
    "Seconds for all of it, waiting included.",
    {"type": "integer", "minimum": 1, "maximum": 999999},
)
_STREAMED = {
    "parameters": (_RESUMABLE, _CONVERSATION, _BACKGROUND, _IDEMPOTENCY, _TIMEOUT),
    "answers": (JSON, SSE),
    "statuses": (*RELAYED, 501),
}
_MODEL = Parameter("model", "query", "The model's name; the default one without.")

chat_completions = relay_view(
    dialects.CHAT, Operation("The next message of a conversation", "generation", ChatRequest, **_STREAMED)
)
completions = relay_view(
    dialects.COMPLETIONS, Operation("The continuation of a text", "generation", CompletionBody, **_STREAMED)
)
responses = relay_view(
    dialects.RESPONSES, Operation("OpenAI's Responses API", "generation", ResponsesRequest, **_STREAMED)
)
messages = relay_view(
    dialects.MESSAGES,
    Operation("Anthropic's Messages API", "generation", MessagesRequest, messages_errors=True, **_STREAMED),
)
count_tokens = relay_view(
    dialects.COUNT_TOKENS,
    Operation(
        "How many tokens messages take", "tokens", CountTokensRequest, statuses=(*RELAYED, 501), messages_errors=True
    ),
)
embeddings = relay_view(
    dialects.EMBEDDINGS, Operation("Vectors of texts", "embeddings", EmbeddingRequest, statuses=(*RELAYED, 501))
)
rerank = relay_view(
    dialects.RERANK,
    Operation("Documents by their relevance to a query", "embeddings", RerankRequest, statuses=(*RELAYED, 501)),
)
tokenize = relay_view(
    dialects.TOKENIZE, Operation("A text's tokens", "tokens", TokenizeRequest, statuses=(*RELAYED, 501))
)
detokenize = relay_view(
    dialects.DETOKENIZE, Operation("The text of tokens", "tokens", DetokenizeRequest, statuses=(*RELAYED, 501))
)
apply_template = relay_view(
    dialects.APPLY_TEMPLATE,
    Operation("The prompt that messages become", "tokens", ChatRequest, statuses=(*RELAYED, 501)),
)
props = relay_view(
    dialects.PROPS, Operation("A model's settings at its engine", "models", None, (_MODEL,), statuses=RELAYED)
)

urlpatterns = [
    path("chat/completions", chat_completions),
    path("chat/completions/", chat_completions),
    path("completions", completions),
    path("responses", responses),
    path("messages", messages),
    path("messages/count_tokens", count_tokens),
    path("embeddings", embeddings),
    path("rerank", rerank),
    path("models", views.models),
    path("models/", views.models),
    path("models/<path:name>", views.model),
    path("sessions", session_views.sessions),
    path("sessions/<str:session>", session_views.session),
    path("sessions/<str:session>/park", session_views.park),
    path("sessions/<str:session>/resume", session_views.resume),
    path("sessions/<str:session>/migrate", session_views.migrate),
    path("streams", stream_views.streams),
    path("stream/<path:name>", stream_views.stream),
    re_path(r"^(?P<path>[\s\S]*)$", views.unknown),
]
root_urlpatterns = [
    path("rerank", rerank),
    path("tokenize", tokenize),
    path("detokenize", detokenize),
    path("apply-template", apply_template),
    path("props", props),
    path("openapi.json", openapi),
]
