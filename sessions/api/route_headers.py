"""Headers about a request's way: what may be asked of it, and what an answer tells.

Of a client's own headers none goes to an engine: whom a request is from and which conversation it belongs to are the site's to
say (`sessions.relay`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from django.http import HttpRequest, HttpResponseBase

from engines.errors import InvalidRequest
from pools.router_views import RUN_MODES, Mode
from sessions.dispatch import NO_WISHES, REQUEST_BUDGET_S, Wishes
from sessions.errors import OperatorsOnly
from sessions.identity import Owner
from sessions.relay import EngineAnswer

FORCE_ENGINE_HEADER = "X-Hydra-Force-Engine"
FORCE_MODE_HEADER = "X-Hydra-Force-Mode"
RUN_MODE_HEADER = "X-Hydra-Run-Mode"
BACKGROUND_HEADER = "X-Hydra-Background"
TIMEOUT_HEADER = "X-Hydra-Timeout"
FINAL_HEADER = "X-Dynamo-Session-Final"
IDEMPOTENCY_HEADER = "Idempotency-Key"
MAX_IDEMPOTENCY_CHARS = 256
SWITCH = {"": False, "0": False, "false": False, "1": True, "true": True}
_MODES: Mapping[str, Mode] = {"solo": "solo", "pd": "pd", "combined": "combined"}
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


def wishes(request: HttpRequest, owner: Owner) -> Wishes:
    """Raises OperatorsOnly for a key that names an engine or a form, or hurries; InvalidRequest for what is no such thing."""
    engine = request.headers.get(FORCE_ENGINE_HEADER, "").strip()
    mode = request.headers.get(FORCE_MODE_HEADER, "").strip().lower()
    run_mode = request.headers.get(RUN_MODE_HEADER, "").strip().lower()
    background = switch(request, BACKGROUND_HEADER)
    budget_s = _budget_s(request.headers.get(TIMEOUT_HEADER, "").strip())
    # A header of others, so what is no truth there is none here, and no error.
    is_final = request.headers.get(FINAL_HEADER, "").strip().lower() in ("1", "true")
    if not (engine or mode or run_mode or background or budget_s or is_final):
        return NO_WISHES
    if run_mode and run_mode not in RUN_MODES:
        raise InvalidRequest(f"{RUN_MODE_HEADER} must be {', '.join(RUN_MODES)}.", param=RUN_MODE_HEADER)
    # Whoever is in a hurry makes others wait.
    if (engine or mode or run_mode == "fast") and owner.api_key_id is not None:
        raise OperatorsOnly("Engine and form of a request are chosen by the pool for requests with a key.")
    if mode and mode not in _MODES:
        raise InvalidRequest(f"{FORCE_MODE_HEADER} must be {', '.join(_MODES)}.", param=FORCE_MODE_HEADER)
    chosen = next((one for one in RUN_MODES if one == run_mode), None)
    return Wishes(engine, _MODES.get(mode), background, budget_s or REQUEST_BUDGET_S, chosen, is_final)


def _budget_s(text: str) -> float:
    """What the client gives the request in all, 0 where it does not say; the pool's own bound stays."""
    if not text:
        return 0.0
    if not (text.isascii() and text.isdigit() and len(text) <= 6 and int(text)):
        raise InvalidRequest(f"{TIMEOUT_HEADER} must be a whole number of seconds.", param=TIMEOUT_HEADER)
    return min(float(text), REQUEST_BUDGET_S)


def switch(request: HttpRequest, name: str) -> bool:
    """A header that is 1 or 0. Raises InvalidRequest."""
    value = request.headers.get(name, "").strip().lower()
    if value not in SWITCH:
        raise InvalidRequest(f"{name} must be 1 or 0.", param=name)
    return SWITCH[value]


def idempotency_key(request: HttpRequest) -> str:
    """Raises InvalidRequest for one that is too long."""
    key = request.headers.get(IDEMPOTENCY_HEADER, "").strip()
    if len(key) > MAX_IDEMPOTENCY_CHARS:
        raise InvalidRequest(
            f"{IDEMPOTENCY_HEADER} has more than {MAX_IDEMPOTENCY_CHARS} characters.", param=IDEMPOTENCY_HEADER
        )
    return key


def trace_id(request: HttpRequest) -> str:
    """The caller's W3C trace, "" where it has none."""
    found = _TRACEPARENT.fullmatch(request.headers.get("traceparent", "").strip().lower())
    return found[1] if found and set(found[1]) != {"0"} else ""


def describe(response: HttpResponseBase, request_id: str, answer: EngineAnswer | None, trace: str = "") -> None:
    """Says on the response where it was made, how it got there, and what of the prompt was there already."""
    # Anthropic's clients look for the second name.
    response["X-Request-Id"] = response["request-id"] = request_id
    response["X-Hydra-Trace"] = trace or request_id.replace("-", "")
    if answer is None:
        return
    response["X-Hydra-Engine"] = answer.engine.name
    response["X-Hydra-Node"] = answer.engine.host_name
    response["X-Hydra-Model"] = answer.model_name
    response["X-Hydra-Route"] = answer.route
    if answer.split is not None:
        response["X-Hydra-Prefill-Engine"] = answer.split.prefill.name
        response["X-Hydra-Decode-Engine"] = answer.split.decode.name
        if answer.split.fell_back:
            response["X-Hydra-Fell-Back"] = "pd"
        elif answer.sent.kv_loss is not None:
            # Nats: what the answer may lose, as it goes on with KV of another quant.
            response["X-Hydra-Kv-Kl"] = f"{answer.sent.kv_loss:.6f}"
    response["X-Hydra-Cached"] = str(answer.cached_tokens)
    if answer.session:
        response["X-Hydra-Session"] = answer.session
