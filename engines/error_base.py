"""What every error of the engines app is; the tree of them is in `engines.errors`, which is where to import them from."""

from __future__ import annotations

from typing import Any


class EngineError(Exception):
    """A failure with everything an HTTP answer needs: code, status, hint and whether a retry makes sense.

    The site adds the id of the request that it belongs to, and where no engine was chosen what was weighed.
    """

    code = "engine_error"
    http_status = 500
    error_type = "server_error"
    retryable = False
    hint: str | None = None
    retry_after_s: int | None = None
    loading: dict[str, object] | None = None
    request_id: str = ""
    explanation: dict[str, Any] | None = None

    def __init__(self, message: str, *, param: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if hint is not None:
            self.hint = hint

    def body(self) -> dict[str, object]:
        """The error in OpenAI's shape, with our hint beside it."""
        error: dict[str, object] = {
            "message": self.message,
            "type": self.error_type,
            "param": self.param,
            "code": self.code,
        }
        if self.hint:
            error["hint"] = self.hint
        return {"error": error, **self.beside()}

    def beside(self) -> dict[str, object]:
        """What stands beside the error, in every shape."""
        return {} if self.loading is None else {"loading": self.loading}

    def messages_body(self) -> dict[str, object]:
        """The error in the shape of Anthropic's Messages API, with our code and hint beside it."""
        kind = _MESSAGES_TYPES.get(self.http_status, "invalid_request_error" if self.http_status < 500 else "api_error")
        error = {"type": kind, "message": self.message, "code": self.code}
        return {"type": "error", "error": {**error, "hint": self.hint} if self.hint else error, **self.beside()}


# Anthropic's names, by status; its clients choose an exception by the status alone.
_MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
