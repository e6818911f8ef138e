"""What the router's answer says of a request, as its turn's row keeps it."""

from __future__ import annotations

from typing import Any

from sessions.dispatch import Dispatched


def planned(sent: Dispatched) -> dict[str, Any]:
    """Fields of a `TurnStart`."""
    plan = sent.routed.plan
    return {
        "model_name": sent.endpoint.model_name,
        "engine_id": sent.endpoint.engine_id,
        "route": sent.mode,
        "explanation": _explanation(sent),
        "predicted_first_token_s": plan.first_token_s if plan is not None else None,
        "seen_wanted_engine_id": sent.seen_wanted_engine_id,
    }


def _explanation(sent: Dispatched) -> dict[str, Any]:
    """Why it goes where it goes; and that two engines are to share it, while nobody knows what comes of that."""
    explanation = sent.routed.explanation.to_dict()
    if sent.mode == "pd" and sent.decode is not None:
        explanation["split"] = {"prefill": sent.endpoint.name, "decode": sent.decode.name, "state": "running"}
    return explanation
