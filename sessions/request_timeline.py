"""The one event that every request leaves in the log; here of those that were refused before an engine was chosen.

`sessions.turn` tells of the others, under the same names. Such a request has no row, so its event alone says what was weighed.
"""

from __future__ import annotations

import json
import logging
import time
import uuid

from engines.errors import EngineError
from sessions.engine_call import EngineCall
from sessions.identity import Identity

EVENT = "request_timeline"

timeline = logging.getLogger("hydra.request_timeline")


def tell_refused(
    call: EngineCall,
    identity: Identity,
    request_id: uuid.UUID,
    error: Exception,
    *,
    arrived_s: float,
    is_background: bool = False,
    headers_sent_s: float | None = None,
) -> None:
    """One event for a request that came at `arrived_s` (monotonic) and got no engine; the error is told whose it is.

    Of `headers_sent_s` see `early_headers`.
    """
    known = error if isinstance(error, EngineError) else None
    if known is not None:
        known.request_id = str(request_id)
    if not call.dialect.is_turn or not timeline.isEnabledFor(logging.INFO):
        return
    explanation = (known.explanation if known is not None else None) or {}
    event = {
        "event": EVENT,
        "request_id": str(request_id),
        "session": identity.key_hash[:16],
        "model": call.model,
        "engine": "",
        "node": "",
        "route": None,
        "why": explanation.get("why"),
        "background": is_background,
        "request_bytes": len(call.raw),
        "state": "refused",
        "error_code": known.code if known is not None else "internal_error",
        "duration_s": round(time.monotonic() - arrived_s, 6),
        "candidates": explanation.get("candidates", []),
        "refusals": explanation.get("refusals", []),
        **early_headers(headers_sent_s, time.monotonic()),
    }
    timeline.info(json.dumps(event))


def early_headers(headers_sent_s: float | None, until_s: float) -> dict[str, object]:
    """What the event says of a stream that waited for its model: its headers left at `headers_sent_s` (monotonic), when nobody
    knew its route yet. Nothing of any other."""
    if headers_sent_s is None:
        return {}
    return {"load_wait_s": round(until_s - headers_sent_s, 6), "route_headers": False}
