"""What can go wrong with a conversation before an engine sees it.

SessionError (an EngineError, whose shape it has)
├── AuthenticationRequired   401  no key, where one is needed
├── KeyInvalid               401  a key was presented that is unknown, revoked or expired
├── ForeignOrigin            403  a web page of another site tried to use the open loopback API
├── OperatorsOnly            403  a key asked for what only people of the panel and this machine's programs may
├── EngineRefused            as the engine answered: its status and its body are passed on
├── PathUnknown              404  /v1 has no such path
├── MethodNotAllowed         405  the path exists, the method does not
├── SessionUnknown           404  this owner has no conversation of that id
├── StreamUnknown            404  no kept stream of this owner has that name
├── StreamGap                410  the stream is there, the asked-for events are not any more
├── StreamTaken              409  another replica of the site reads the resumable stream now
├── StreamStopped            409  a resumable stream was stopped before its engine had answered
├── SessionBusy              409  a request of the conversation runs
├── SessionStays             409  the conversation cannot be parked or moved as it is
├── DrainUnknown             404  there is no such engine, card, host or drain
├── NothingToDrain           409  no engine runs on what is to get empty
├── DrainGoesOn              409  it is being drained already
├── RequestInProgress        409  a request with this Idempotency-Key runs on another replica
├── PoolBusy                 429  every engine of the model has as many requests as it may
└── TooManyStreams           429  no place for another resumable stream
"""

from __future__ import annotations

import json
from typing import Any

from engines.errors import EngineError


class SessionError(EngineError):
    """A failure before an engine sees the request; answered as those of the engines are."""

    code = "session_error"


class AuthenticationRequired(SessionError):
    code = "authentication_required"
    http_status = 401
    error_type = "authentication_error"
    hint = "Send an API key as `Authorization: Bearer …`; keys are made in the admin or with `manage.py apikey create`."


class KeyInvalid(SessionError):
    code = "invalid_api_key"
    http_status = 401
    error_type = "authentication_error"
    hint = "The key is unknown, revoked or expired; make a new one."


class ForeignOrigin(SessionError):
    code = "foreign_origin"
    http_status = 403
    error_type = "permission_error"
    hint = "Without a key the API answers only programs of this machine, not web pages of other sites. Send an API key."


class EngineRefused(SessionError):
    """An engine answered with an error. `body_bytes` is that answer, to be passed on as it is."""

    code = "engine_refused"
    http_status = 502

    def __init__(self, message: str, *, body_bytes: bytes = b"") -> None:
        super().__init__(message)
        self.body_bytes = body_bytes

    @classmethod
    def of(cls, status: int, body: bytes, retry_after: str | None) -> EngineRefused:
        """The refusal in an engine's answer; one that is no error object is told as a plain failure."""
        try:
            values: Any = json.loads(body)
            error = dict(values["error"])
            refusal = cls(str(error["message"]), body_bytes=body)
        except (ValueError, KeyError, TypeError):
            return cls(f"The engine answered with status {status} and no error object.")
        refusal.http_status = status
        refusal.code = str(error.get("code") or cls.code)
        refusal.error_type = str(error.get("type") or cls.error_type)
        refusal.hint = error.get("hint")
        refusal.param = error.get("param")
        refusal.retryable = status in (429, 503)
        refusal.retry_after_s = int(retry_after) if retry_after and retry_after.isdecimal() else None
        return refusal


class PathUnknown(SessionError):
    code = "path_unknown"
    http_status = 404
    error_type = "not_found_error"
    hint = "GET /openapi.json lists what is served."


class MethodNotAllowed(SessionError):
    code = "method_not_allowed"
    http_status = 405
    error_type = "invalid_request_error"


class StreamUnknown(SessionError):
    code = "stream_unknown"
    http_status = 404
    error_type = "not_found_error"
    hint = "Streams are kept where `X-Hydra-Resumable: 1` asked for it, and only for some minutes after their end."


class StreamGap(SessionError):
    code = "stream_gap"
    http_status = 410
    error_type = "invalid_request_error"


class StreamStopped(SessionError):
    code = "stream_stopped"
    http_status = 409
    error_type = "invalid_request_error"


class StreamTaken(SessionError):
    code = "stream_taken"
    http_status = 409
    error_type = "invalid_request_error"
    hint = "It was asked for at another replica of the site, and is read there."


class OperatorsOnly(SessionError):
    code = "operators_only"
    http_status = 403
    error_type = "permission_error"


class SessionUnknown(SessionError):
    code = "session_unknown"
    http_status = 404
    error_type = "not_found_error"
    hint = "GET /v1/sessions lists your own; X-Hydra-Session of an answer names its session."


class SessionBusy(SessionError):
    code = "session_busy"
    http_status = 409
    error_type = "invalid_request_error"
    retryable = True
    retry_after_s = 2


class SessionStays(SessionError):
    code = "session_stays"
    http_status = 409
    error_type = "invalid_request_error"


class DrainUnknown(SessionError):
    code = "drain_unknown"
    http_status = 404
    error_type = "not_found_error"


class NothingToDrain(SessionError):
    code = "nothing_to_drain"
    http_status = 409
    error_type = "invalid_request_error"


class DrainGoesOn(SessionError):
    code = "drain_goes_on"
    http_status = 409
    error_type = "invalid_request_error"


class RequestInProgress(SessionError):
    code = "request_in_progress"
    http_status = 409
    error_type = "invalid_request_error"
    retryable = True
    retry_after_s = 2
    hint = "It is being answered to the connection that sent it first; send it again when that has ended."


class PoolBusy(SessionError):
    code = "pool_busy"
    http_status = 429
    error_type = "rate_limit_error"
    retryable = True


class TooManyStreams(SessionError):
    code = "too_many_streams"
    http_status = 429
    error_type = "rate_limit_error"
    retryable = True
    retry_after_s = 5
    hint = "Stop a stream with DELETE /v1/stream/ID, or send the request without X-Hydra-Resumable."
