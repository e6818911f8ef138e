"""The middlewares of the engine's server: failures in the shape that a path's clients know, no foreign pages, no strangers."""

from __future__ import annotations

import hmac
import logging

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from engines.browser_guard import foreign_page, host_name, is_loopback
from engines.config import EngineConfig
from engines.errors import BodyTooLarge, EngineError, InvalidRequest, NotAuthenticated
from engines.runtime.operations import Handler

log = logging.getLogger("hydra.engine.http")

CONFIG = web.AppKey("config", EngineConfig)

MESSAGES_PATH = "/v1/messages"
# Whoever watches an engine needs no secret to see that it lives.
OPEN_PATHS = frozenset({"/health", "/v1/health", "/healthz", "/readyz"})


def json_error(request: web.Request, error: EngineError, **headers: str) -> web.Response:
    """`error` as an answer to `request`, in its path's dialect."""
    if error.retry_after_s:
        headers["Retry-After"] = str(error.retry_after_s)
    dialect = request.path == MESSAGES_PATH or request.path.startswith(MESSAGES_PATH + "/")
    body = error.messages_body() if dialect else error.body()
    return web.json_response(body, status=error.http_status, headers=headers)


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every failure leaves in a client's shape with the right status; what nobody expected is logged with its traceback."""
    try:
        return await handler(request)
    except EngineError as error:
        return json_error(request, error)
    except web.HTTPRequestEntityTooLarge:
        limit = request.app[CONFIG].max_body_bytes
        return json_error(request, BodyTooLarge(f"The request body is larger than {limit} bytes."))
    except (web.RequestPayloadError, HttpProcessingError) as error:
        return json_error(request, InvalidRequest(f"The request body cannot be read: {type(error).__name__}."))
    except web.HTTPException as error:
        refusal = EngineError(f"{request.method} {request.path}: {error.reason}")
        refusal.error_type = "not_found_error" if error.status == 404 else "invalid_request_error"
        refusal.http_status = error.status
        refusal.code = {404: "not_found", 405: "method_not_allowed"}.get(error.status, "bad_request")
        allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
        return json_error(request, refusal, **allow)
    except ConnectionError:
        raise  # the client is gone; there is nobody to tell
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        return json_error(request, EngineError("The engine failed; its log has the cause."))


@web.middleware
async def refuse_foreign_pages(request: web.Request, handler: Handler) -> web.StreamResponse:
    """A loopback engine has no keys, so it must not be reachable through somebody's browser."""
    reason = foreign_page(request.headers)
    if reason is None and is_loopback(request.app[CONFIG].host) and not is_loopback(host_name(request.host)):
        reason = f"Host is {request.host[:200]}"
    if reason:
        refusal = EngineError(f"Requests from other web pages are refused ({reason}).")
        refusal.error_type, refusal.code, refusal.http_status = "permission_error", "foreign_origin", 403
        return json_error(request, refusal)
    return await handler(request)


@web.middleware
async def refuse_strangers(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Beyond loopback an engine answers those that have its secret: its site and its head."""
    secret = request.app[CONFIG].http_secret
    if secret and request.path not in OPEN_PATHS:
        scheme, _, presented = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(presented.strip().encode(), secret.encode()):
            return json_error(request, NotAuthenticated("This engine asks for its secret."))
    return await handler(request)
