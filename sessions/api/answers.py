"""How the API answers: one decorator for its views, and one place where failures become what a path's clients know."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping
from functools import wraps
from typing import Any

from django.conf import settings
from django.contrib.auth.decorators import login_not_required
from django.core.exceptions import RequestDataTooBig, SuspiciousOperation
from django.db import Error as DatabaseError
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.http.request import UnreadablePostError
from django.views.decorators.csrf import csrf_exempt

from engines.errors import BodyTooLarge, EngineError, InvalidRequest, Unavailable
from sessions.api.operations import Operation
from sessions.api.route_headers import describe, trace_id
from sessions.dialects import MESSAGES
from sessions.errors import EngineRefused, MethodNotAllowed, SessionError

View = Callable[..., Awaitable[HttpResponseBase]]
ErrorBody = Callable[[EngineError], dict[str, object]]
logger = logging.getLogger(__name__)


def endpoint(
    *methods: str, operations: Mapping[str, Operation] | None = None, error_body: ErrorBody = EngineError.body
) -> Callable[[View], View]:
    """Make an async view an endpoint of the API: these methods only, no login page, no CSRF token, errors as JSON.

    `operations` (by method) is what the OpenAPI document says of it; without, it is not in there.
    """

    def decorate(view: View) -> View:
        @csrf_exempt
        @login_not_required
        @wraps(view)
        async def answer(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
            try:
                if request.method not in methods:
                    raise MethodNotAllowed(f"{request.method} is not served here; use {' or '.join(methods)}.")
                return _with_length(await view(request, *args, **kwargs))
            except Exception as error:  # noqa: BLE001 the last resort: it is logged with its traceback and answered
                response = error_response(error, request, error_body)
                if isinstance(error, MethodNotAllowed):
                    response["Allow"] = ", ".join(methods)
                return _with_length(response)

        answer.operations = operations or {}  # type: ignore[attr-defined]
        return answer

    return decorate


def error_response(error: Exception, request: HttpRequest, error_body: ErrorBody = EngineError.body) -> HttpResponse:
    """Any failure as `error_body` shapes it. What nobody expected becomes a 500 whose id leads to its traceback in the log."""
    known = _known(error)
    request_id = (known.request_id if known is not None else "") or str(uuid.uuid4())
    if known is None:
        logger.error("%s %s failed, request %s", request.method, request.path, request_id, exc_info=error)
        known = SessionError(
            "The site failed; its log has the cause.", hint=f"Look for request {request_id} in the log."
        )
        known.code = "internal_error"
    if isinstance(known, EngineRefused) and known.body_bytes:
        response = HttpResponse(known.body_bytes, status=known.http_status, content_type="application/json")
    else:
        response = JsonResponse(error_body(known), status=known.http_status)
    if known.retry_after_s:
        response["Retry-After"] = str(known.retry_after_s)
    if known.http_status == 401:
        response["WWW-Authenticate"] = "Bearer"
    describe(response, request_id, None, trace_id(request))
    return response


def body_too_large(path: str) -> bytes:
    """The answer to a body over the limit, for the server that stops reading before Django sees the request."""
    error = BodyTooLarge(f"The request body is larger than {settings.HYDRA_MAX_BODY_BYTES} bytes.")
    is_messages = path.startswith(MESSAGES.path)
    return json.dumps(error.messages_body() if is_messages else error.body()).encode()


def _with_length(response: HttpResponseBase) -> HttpResponseBase:
    """Pages get their Content-Length from middleware that the API does without."""
    if isinstance(response, HttpResponse):
        response["Content-Length"] = str(len(response.content))
    return response


def _known(error: Exception) -> EngineError | None:
    if isinstance(error, EngineError):
        return error
    if isinstance(error, RequestDataTooBig):
        return BodyTooLarge(f"The request body is larger than {settings.HYDRA_MAX_BODY_BYTES} bytes.")
    if isinstance(error, UnreadablePostError | SuspiciousOperation):
        return InvalidRequest(f"The request could not be read: {error}")
    if isinstance(error, DatabaseError):
        logger.error("the database does not answer: %s", error)
        return Unavailable("The site's database does not answer right now.")
    return None
