"""Text to tokens and back, and messages to the text that the model reads: no generation, no slot."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from engines.api_body import validated
from engines.api_schema import ChatRequest, parse_chat_request, parse_json_object
from engines.api_text import DetokenizeRequest, TokenizeRequest
from engines.errors import InvalidRequest
from engines.runtime.llama import Vocabulary
from engines.runtime.operations import NEEDS_MODEL, Operation
from engines.runtime.preparation import Preparation


def written(vocabulary: Vocabulary, token: int) -> bytes:
    """A token's bytes; a control token stands there by its name."""
    return vocabulary.pieces[token] or vocabulary.text_of(token).encode()


def detokenize(vocabulary: Vocabulary, tokens: list[int]) -> str:
    return b"".join(written(vocabulary, token) for token in tokens).decode("utf-8", "replace")


def require_known(vocabulary: Vocabulary, tokens: list[int], param: str) -> None:
    """Raises InvalidRequest for a token id beyond the vocabulary, which llama.cpp does not check everywhere."""
    beyond = max(tokens, default=0)
    if beyond >= vocabulary.size:
        raise InvalidRequest(f"{param}: token {beyond} is beyond the vocabulary of {vocabulary.size}", param=param)


class TextEndpoints:
    def __init__(self, preparation: Preparation) -> None:
        self._preparation = preparation

    def operations(self) -> list[Operation]:
        return [
            Operation(
                "POST", "/tokenize", self.tokenize, "Text as token ids.", (TokenizeRequest,), statuses=NEEDS_MODEL
            ),
            Operation(
                "POST", "/detokenize", self.detokenize, "Token ids as text.", (DetokenizeRequest,), statuses=NEEDS_MODEL
            ),
            Operation(
                "POST",
                "/apply-template",
                self.apply_template,
                "Messages as the text that the model reads.",
                (ChatRequest,),
                statuses=NEEDS_MODEL,
            ),
        ]

    async def tokenize(self, request: web.Request) -> web.Response:
        return web.json_response(await self._preparation.run_aside(self._tokenize, await request.read()))

    async def detokenize(self, request: web.Request) -> web.Response:
        return web.json_response(await self._preparation.run_aside(self._detokenize, await request.read()))

    async def apply_template(self, request: web.Request) -> web.Response:
        return web.json_response(await self._preparation.run(self._apply_template, await request.read()))

    def _tokenize(self, raw: bytes) -> dict[str, Any]:
        body = validated(TokenizeRequest, parse_json_object(raw))
        vocabulary = self._preparation.llama.vocabulary
        tokens = vocabulary.tokenize(body.content, add_special=body.add_special, parse_special=body.parse_special)
        if not body.with_pieces:
            return {"tokens": tokens}
        return {"tokens": [{"id": token, "piece": _piece(vocabulary, token)} for token in tokens]}

    def _detokenize(self, raw: bytes) -> dict[str, Any]:
        body = validated(DetokenizeRequest, parse_json_object(raw))
        vocabulary = self._preparation.llama.vocabulary
        require_known(vocabulary, body.tokens, "tokens")
        return {"content": detokenize(vocabulary, body.tokens)}

    def _apply_template(self, raw: bytes) -> dict[str, Any]:
        request = parse_chat_request(raw)
        if request.images():
            self._preparation.require_sight("messages")
        return {"prompt": self._preparation.template.render(request)}


def _piece(vocabulary: Vocabulary, token: int) -> str | list[int]:
    """A token's text, or its bytes where they are a part of a character, as llama.cpp has it."""
    raw = written(vocabulary, token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)
