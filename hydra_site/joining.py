"""`POST /v1/hosts/join`: a machine with a one-time token becomes a host, and learns how to reach the pool's servers."""

from __future__ import annotations

import ipaddress
import json
import logging
from typing import Any

from django.db import transaction
from django.http import HttpRequest, HttpResponseBase, JsonResponse
from pydantic import BaseModel, ConfigDict, Field, field_validator

from engines.api_body import validated
from engines.browser_guard import foreign_page
from engines.errors import InvalidRequest
from hydra_site import host_grants
from pools import join_tokens
from pools.db import in_db
from pools.errors import PoolError, ReleaseDiffers
from pools.release import this_release
from sessions import drains
from sessions.api.answers import endpoint
from sessions.api.operations import Operation
from sessions.choices import DrainKind
from sessions.errors import ForeignOrigin

MAX_BODY_BYTES = 1 << 14

logger = logging.getLogger(__name__)


class JoinBody(BaseModel):
    """What a machine says that wants to join."""

    model_config = ConfigDict(strict=True, extra="forbid", title="JoinBody")

    token: str = Field(min_length=1, max_length=join_tokens.MAX_TOKEN_CHARS)
    host_name: str = Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")
    address: str = Field(max_length=45, description="The IP address at which its engines and its store will listen.")
    version: str = Field(max_length=64)
    schema_digest: str = Field(max_length=16)

    @field_validator("address")
    @classmethod
    def is_address(cls, value: str) -> str:
        address = ipaddress.ip_address(value)
        if address.is_unspecified or address.is_multicast:
            raise ValueError("must be an address at which others reach this machine")
        return str(address)


@endpoint(
    "POST",
    operations={
        "POST": Operation(
            "A machine joins the pool as a host",
            "site",
            body=JoinBody,
            statuses=(401, 403, 409, 502, 503),
            is_open=True,
        )
    },
)
async def join(request: HttpRequest) -> HttpResponseBase:
    """Asks for no key: the token is what lets in."""
    if (foreign := foreign_page(request.headers)) is not None:
        raise ForeignOrigin(f"Requests from other web pages are refused ({foreign}).")
    body = validated(JoinBody, _json_object(request.body))
    try:
        answer = await in_db(admit, body)
    except PoolError as error:
        logger.warning("%s was not let in: %s", body.host_name, error.message)
        return JsonResponse(error_body(error), status=error.http_status)
    logger.info("host %s joined, its engines will listen on %s", body.host_name, body.address)
    response = JsonResponse(answer)
    response["Cache-Control"] = "no-store"
    return response


def admit(body: JoinBody) -> dict[str, Any]:
    """Use the token up, make the host's row, role and broker user. All or nothing; raises PoolError."""
    release = this_release()
    with transaction.atomic():
        host_id = join_tokens.redeem(body.token, body.host_name, body.address)
        if body.schema_digest != release.schema:
            raise ReleaseDiffers(f"The site runs {release.version}, this machine {body.version}; their tables differ.")
        # A drain of the machine that had this name is over, and its engines take requests here.
        drains.serve_again(drains.subject_of(DrainKind.HOST, host_id))
        granted = host_grants.grant(host_id, body.host_name)
    return {
        "host_name": body.host_name,
        "version": release.version,
        "database_url": granted.database_url,
        "broker_url": granted.broker_url,
        "database_ca": granted.database_ca,
        "broker_ca": granted.broker_ca,
    }


def error_body(error: PoolError) -> dict[str, Any]:
    """A pool's error in the shape of the API's others."""
    kind = "authentication_error" if error.http_status == 401 else "invalid_request_error"
    return {
        "error": {
            "message": error.message,
            "type": kind if error.http_status < 500 else "server_error",
            "param": None,
            "code": error.code,
            "hint": error.hint,
        }
    }


def _json_object(text: bytes) -> dict[str, Any]:
    if len(text) > MAX_BODY_BYTES:
        raise InvalidRequest(f"The request body is larger than {MAX_BODY_BYTES} bytes.")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"The request body is no JSON: {error}") from error
    if not isinstance(values, dict):
        raise InvalidRequest("The request body must be a JSON object.")
    return values
