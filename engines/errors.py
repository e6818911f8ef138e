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
├── ConstraintFailed            400  the form that the request asked for cannot be followed any further
├── TemplateBroken              500  the model's chat template, or the one given instead, cannot be compiled
├── StateError                       a slot's state can not leave or enter
│   ├── SlotNotFound            404  no slot has that id
│   ├── SlotEmpty               404  the slot holds no tokens
│   ├── SessionNotHeld          404  neither a slot nor host memory holds the session's conversation
│   ├── SlotBusy                409  the slot generates, or another transfer has it
│   ├── SlotFileNotFound        404  no saved slot has that name
│   ├── SlotFileFailed          500  a saved slot can not be read or written
│   ├── SlotOccupied            409  the slot holds a conversation and the sender asked to spare it
│   ├── StateInvalid            400  the bytes are cut short, damaged or of no known form
│   ├── StateIncompatible       422  sound bytes, but of another model, KV type or layout
│   ├── HandoffStale            409  a later move of the session was granted, or this one is over
│   ├── HandoffUnknown          404  no move of that id brings a generation here
│   ├── GenerationStays         409  the running request cannot move to another engine, for a reason that is told
│   ├── GenerationMoved         409  the running request goes on at another engine; tells whoever follows it
│   ├── StateTooLarge           413  more tokens than this engine's context takes
│   └── StateSharingOff         501  this engine's llama.cpp lays states out in an unknown way
├── NotServed                   501  this process does not serve that operation
├── ProtocolBroken              502  bytes that are not the binary protocol's, or an exchange that stopped midway
├── NotAuthenticated            401  HELLO failed: one side does not know the shared secret, or did not say HELLO
├── RpcRefused                       a peer answered with another status than OK; carries its message, code and hint
│   ├── RpcNotFound             404  NOT_FOUND
│   ├── RpcFailed               500  ERROR
│   ├── RpcBusy                 503  BUSY; a later try may succeed
│   ├── RpcBadRequest           400  BAD_REQUEST
│   └── RpcNotServed            501  NOT_IMPLEMENTED
└── Unavailable                 503  nothing can answer now, a later try may succeed
    ├── EngineLoading           503  the engine still loads its model
    ├── EngineStopping          503  the engine shuts down
    ├── EngineUnreachable       503  the engine's process does not answer
    │   └── RpcTimeout          503  an operation of the binary protocol did not end within its deadline
    ├── NoCellsFree             503  other conversations hold the cells that the state needs
    ├── StoreAway               503  the host's store does not answer, or not in time
    └── NoEngineReady           503  the model is known, but no engine serves it now
        ├── ModelLoading        503  an engine of it is on its way; says how far
        └── ModelDoesNotFit     503  no device has room for it; says what would fit

LaunchError                          an engine process could not be started (never reaches a client as such)
└── ModelLoadFailed                  llama.cpp could not load the model or make its context
    ├── DoesNotFit                   the model with this configuration needs more memory than there is
    └── LibraryUnfit                 this process's llama.cpp has no code for its card
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
    loading: dict[str, object] | None = None

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


class ConstraintFailed(EngineError):
    code = "constraint_failed"
    http_status = 400
    error_type = "invalid_request_error"
    hint = "Ask for a simpler schema or grammar: shorter patterns, fewer alternatives."


class TemplateBroken(EngineError):
    code = "template_broken"
    hint = "Give the engine another chat template (chat_template)."


class StateError(EngineError):
    """Something kept a slot's state from leaving or entering; the slot is free, and empty if it was being filled."""

    code = "state_error"


class SlotNotFound(StateError):
    code = "slot_not_found"
    http_status = 404
    error_type = "not_found_error"
    hint = "GET /slots lists the slots."


class SlotEmpty(StateError):
    code = "slot_empty"
    http_status = 404
    error_type = "not_found_error"
    hint = "A slot has state once a request ran in it."


class SessionNotHeld(StateError):
    code = "session_not_held"
    http_status = 404
    error_type = "not_found_error"
    hint = "It may be in the store already, or on another engine."


class SlotBusy(StateError):
    code = "slot_busy"
    http_status = 409
    error_type = "conflict_error"
    retryable = True
    retry_after_s = 1
    hint = "Wait until GET /slots shows the slot idle, or use another slot."


class SlotFileNotFound(StateError):
    code = "slot_file_not_found"
    http_status = 404
    error_type = "not_found_error"
    hint = "A slot is saved under a name with POST /slots/{id}?action=save."


class SlotFileFailed(StateError):
    code = "slot_file_failed"
    hint = "The disk under slot_save_path is full, failing or not writable."


class SlotOccupied(StateError):
    code = "slot_occupied"
    http_status = 409
    error_type = "conflict_error"
    hint = "Take an empty slot, or allow what it holds to be replaced (erase_existing)."


class StateHasImages(StateError):
    # Not a 409, which a peer takes for "not now".
    code = "state_has_images"
    http_status = 400
    error_type = "invalid_request_error"
    hint = "Send the conversation, images included, to the other engine, which computes it again."


class StateInvalid(StateError):
    code = "state_invalid"
    http_status = 400
    error_type = "invalid_request_error"


class StateIncompatible(StateError):
    code = "state_incompatible"
    http_status = 422
    error_type = "invalid_request_error"
    hint = "Both engines must serve the same model file with the same KV types; GET /slots/{id}/state/meta shows the fingerprint."


class HandoffStale(StateError):
    code = "handoff_stale"
    http_status = 409
    error_type = "invalid_request_error"


class HandoffUnknown(StateError):
    code = "handoff_unknown"
    http_status = 404
    error_type = "not_found_error"


class GenerationStays(StateError):
    code = "generation_stays"
    http_status = 409
    error_type = "invalid_request_error"


class GenerationMoved(StateError):
    """`param` is the handoff's id: `POST /handoffs/{id}/stream` of the other engine has the rest."""

    code = "generation_moved"
    http_status = 409
    error_type = "invalid_request_error"
    retryable = True


class StateTooLarge(StateError):
    code = "state_too_large"
    http_status = 413
    error_type = "invalid_request_error"
    hint = "Serve the model with a longer context."


class StateSharingOff(StateError):
    code = "state_sharing_off"
    http_status = 501
    hint = "The engine's log has the reason; it serves chat all the same."


class NotServed(EngineError):
    code = "not_served"
    http_status = 501
    error_type = "not_supported_error"


class ProtocolBroken(EngineError):
    code = "protocol_broken"
    http_status = 502
    retryable = True


class NotAuthenticated(EngineError):
    code = "not_authenticated"
    http_status = 401
    error_type = "authentication_error"
    hint = (
        "Both sides need the same secret: on HTTP http_secret as `Authorization: Bearer`, in the binary protocol rpc_secret, "
        "with HELLO first on every connection."
    )


class RpcRefused(EngineError):
    """What a peer said instead of OK. `peer_code` is its own error code, finer than the status that the class stands for."""

    code = "rpc_refused"

    def __init__(self, message: str, *, peer_code: str = "", hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.peer_code = peer_code


class RpcNotFound(RpcRefused):
    code = "rpc_not_found"
    http_status = 404
    error_type = "not_found_error"


class RpcFailed(RpcRefused):
    code = "rpc_failed"


class RpcBusy(RpcRefused):
    code = "rpc_busy"
    http_status = 503
    error_type = "unavailable_error"
    retryable = True
    retry_after_s = 1


class RpcBadRequest(RpcRefused):
    code = "rpc_bad_request"
    http_status = 400
    error_type = "invalid_request_error"


class RpcNotServed(RpcRefused):
    code = "rpc_not_served"
    http_status = 501
    error_type = "not_supported_error"


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


class StoreAway(Unavailable):
    code = "store_away"
    hint = "Requests go on without it; what they need is computed. Look whether the store's process runs."


class NoCellsFree(Unavailable):
    code = "no_cells_free"
    hint = "Other conversations run; try again when they have ended, or serve the model with more cache_tokens."


class RpcTimeout(EngineUnreachable):
    code = "rpc_timeout"


class NoEngineReady(Unavailable):
    code = "no_engine_ready"
    hint = "An engine of this model may still be loading; the dashboard shows its state."


class ModelLoading(NoEngineReady):
    """`loading` says how far it is: `state` (queued, draining, starting, loading), and as far as known `node`, `device`,
    `progress` (0 to 1), `eta_seconds`.
    """

    code = "model_loading"
    hint = "Try again after Retry-After seconds; a streamed request waits by itself."
    retry_after_s = 2

    def __init__(self, message: str, loading: dict[str, object]) -> None:
        super().__init__(message)
        self.loading = loading


class ModelDoesNotFit(NoEngineReady):
    code = "model_does_not_fit"
    retryable = False
    hint = "Ask for less context or fewer slots, use a smaller quant, or free memory; the model's page shows what fits."


class LaunchError(Exception):
    """An engine process could not be started; the message is one line for the log and the panel."""


class ModelLoadFailed(LaunchError):
    """llama.cpp could not load the model or make its context."""


class LibraryUnfit(ModelLoadFailed):
    """llama.cpp was not built for the card; `hint` says how to build it. Told before anything is loaded."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(f"{message}. {hint}")
        self.hint = hint


class DoesNotFit(ModelLoadFailed):
    """Known before loading: a device lacks the memory. The message names what is needed, what is free and what would fit."""
