"""Errors of the engines app, data plane and control plane alike.

EngineError
├── InvalidRequest              400  the body breaks the API's contract
│   ├── UnsupportedParameter    400  a known parameter this engine cannot honour; never silently dropped
│   ├── ContextLengthExceeded   400  the prompt does not fit the engine's context
│   └── BodyTooLarge            413  the body exceeds HYDRA_MAX_BODY_BYTES
├── ModelNotFound               404  nobody serves a model of that name
├── QueueFull                   429  the engine's waiting line is at its bound
├── DeadlineExceeded            504  the request waited or ran longer than its deadline
├── DecodeFailed                500  llama.cpp refused a batch of this request
└── Unavailable                 503  nothing can answer now, a later try may succeed
    ├── EngineLoading           503  the engine still loads its model
    ├── EngineStopping          503  the engine shuts down
    ├── EngineUnreachable       503  the engine's process does not answer
    └── NoEngineReady           503  the model is known, but no engine serves it now

LaunchError                          an engine process could not be started (never reaches a client as such)
└── ModelLoadFailed                  llama.cpp could not load the model or make its context
    └── DoesNotFit                   the model with this configuration needs more memory than there is
"""

from __future__ import annotations


class EngineError(Exception):
    """A failure with everything an HTTP answer needs: code, status, hint and whether a retry makes sense."""

    code = "engine_error"
    http_status = 500
    error_type = "server_error"
    retryable = False
    hint: str | None = None
    retry_after_s: int | None = None

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
        return {"error": error}


class InvalidRequest(EngineError):
    code = "invalid_request"
    http_status = 400
    error_type = "invalid_request_error"


class UnsupportedParameter(InvalidRequest):
    code = "unsupported_parameter"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"
    hint = "Shorten the conversation, or serve the model with a longer context."


class BodyTooLarge(InvalidRequest):
    code = "body_too_large"
    http_status = 413
    hint = "Raise HYDRA_MAX_BODY_BYTES if such bodies are meant."


class ModelNotFound(EngineError):
    code = "model_not_found"
    http_status = 404
    error_type = "not_found_error"
    hint = "GET /v1/models lists the names that are served."


class QueueFull(EngineError):
    code = "queue_full"
    http_status = 429
    error_type = "rate_limit_error"
    retryable = True
    retry_after_s = 2
    hint = "All slots are busy and the waiting line is full; try again shortly."


class DeadlineExceeded(EngineError):
    code = "deadline_exceeded"
    http_status = 504
    error_type = "timeout_error"


class DecodeFailed(EngineError):
    code = "decode_failed"
    retryable = True


class Unavailable(EngineError):
    code = "unavailable"
    http_status = 503
    error_type = "unavailable_error"
    retryable = True
    retry_after_s = 2


class EngineLoading(Unavailable):
    code = "engine_loading"
    hint = "The model is being loaded; GET /health tells when it is ready."


class EngineStopping(Unavailable):
    code = "engine_stopping"


class EngineUnreachable(Unavailable):
    code = "engine_unreachable"


class NoEngineReady(Unavailable):
    code = "no_engine_ready"
    hint = "An engine of this model may still be loading; the dashboard shows its state."


class LaunchError(Exception):
    """An engine process could not be started; the message is one line for the log and the panel."""


class ModelLoadFailed(LaunchError):
    """llama.cpp could not load the model or make its context."""


class DoesNotFit(ModelLoadFailed):
    """Known before loading: a device lacks the memory. The message names what is needed, what is free and what would fit."""
