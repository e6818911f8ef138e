"""Errors of the engines app, data plane and control plane alike.

EngineError
├── InvalidRequest              400  the body breaks the API's contract
│   ├── UnsupportedParameter    400  a known parameter this engine cannot honour; never silently dropped
│   ├── ContextLengthExceeded   400  the prompt does not fit the engine's context
│   └── BodyTooLarge            413  the body exceeds HYDRA_MAX_BODY_BYTES
├── ModelNotFound               404  nobody serves a model of that name
├── QueueFull                   429  the engine's waiting line is at its bound
│   └── TooManyAnswers          429  the request asks for more answers than the empty line holds
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
│   ├── TargetRefused           409  the target of a move does not take it; names the target's own code
│   ├── GenerationStays         409  the running request cannot move to another engine, for a reason that is told
│   ├── GenerationMoved         409  the running request goes on at another engine; tells whoever follows it
│   ├── StateTooLarge           413  more tokens than this engine's context takes
│   ├── ContextTooShort         422  the answer would end here before it is as long as was granted where it began
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

from engines.error_base import EngineError as EngineError
from engines.state_errors import ContextTooShort as ContextTooShort
from engines.state_errors import GenerationMoved as GenerationMoved
from engines.state_errors import GenerationStays as GenerationStays
from engines.state_errors import HandoffStale as HandoffStale
from engines.state_errors import HandoffUnknown as HandoffUnknown
from engines.state_errors import SessionNotHeld as SessionNotHeld
from engines.state_errors import SlotBusy as SlotBusy
from engines.state_errors import SlotEmpty as SlotEmpty
from engines.state_errors import SlotFileFailed as SlotFileFailed
from engines.state_errors import SlotFileNotFound as SlotFileNotFound
from engines.state_errors import SlotNotFound as SlotNotFound
from engines.state_errors import SlotOccupied as SlotOccupied
from engines.state_errors import StateError as StateError
from engines.state_errors import StateHasImages as StateHasImages
from engines.state_errors import StateIncompatible as StateIncompatible
from engines.state_errors import StateInvalid as StateInvalid
from engines.state_errors import StateSharingOff as StateSharingOff
from engines.state_errors import StateTooLarge as StateTooLarge
from engines.state_errors import TargetRefused as TargetRefused


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


class TooManyAnswers(QueueFull):
    """Another engine's line may be longer; at this one it is no use to come back."""

    code = "too_many_answers"
    retryable = False
    retry_after_s = 0
    hint = "Ask for fewer answers at once, or start the engine with a higher queue_limit."


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

    def __init__(self, message: str, *, peer_code: str = "", hint: str | None = None, param: str | None = None) -> None:
        super().__init__(message, hint=hint, param=param)
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
