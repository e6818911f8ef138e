"""An engine as the router takes it: from its row, its own rates, and what its first tokens took."""

from __future__ import annotations

from engines.rates_view import EngineRates
from engines.services import EngineEndpoint
from pools.router_views import DecodeRates, EngineView, PrefillFit
from sessions.first_tokens import Calibration

# Until an engine has told its own: one that is neither fast nor slow.
UNKNOWN_PREFILL = PrefillFit(0.002)
UNKNOWN_DECODE = DecodeRates(((1, 0.05), (8, 0.1)))
UNKNOWN_REQUEST_S = 1.0


def unmeasured(endpoint: EngineEndpoint, beside: Calibration) -> EngineView:
    """One that has not told its rates."""
    return EngineView(
        endpoint.engine_id,
        endpoint.name,
        endpoint.host_name,
        endpoint.model_name,
        UNKNOWN_PREFILL,
        UNKNOWN_DECODE,
        endpoint.slots,
        endpoint.context_tokens,
        endpoint.context_tokens * endpoint.slots,
        free_slots=endpoint.slots,
        request_s=UNKNOWN_REQUEST_S,
        features=_features(endpoint),
        fixed_s=beside.fixed_s,
    )


def measured(
    endpoint: EngineEndpoint, rates: EngineRates, beside: Calibration, *, asleep: bool, neighbours: int
) -> EngineView:
    """One as it told lately. `asleep`: it has done nothing for long; `neighbours` compute on its device."""
    return EngineView(
        endpoint.engine_id,
        endpoint.name,
        endpoint.host_name,
        endpoint.model_name,
        PrefillFit(rates.prefill_token_s, rates.prefill_pair_s, rates.prefill_beside_s),
        DecodeRates(rates.steps, rates.resident_token_s, rates.own_token_s),
        rates.slots,
        rates.context_tokens,
        rates.cells,
        free_slots=rates.free_slots,
        decoding=rates.decoding,
        resident_tokens=rates.resident_tokens,
        own_tokens=rates.own_tokens,
        pending_tokens=rates.pending_tokens,
        queue_length=rates.queue_length,
        queue_limit=rates.queue_limit,
        request_s=rates.request_s,
        chunk_s=rates.chunk_s if rates.interleaves else 0.0,
        idle_tokens=rates.idle_tokens,
        idle_s=rates.idle_s,
        features=_features(endpoint),
        kv_group=rates.kv_group,
        resumes=bool(rates.kv_group),
        streams_kv=rates.streams_kv,
        variant=endpoint.variant_id,
        kv_token_bytes=rates.kv_token_bytes,
        kv_part_bytes=rates.kv_part_bytes,
        fixed_s=beside.fixed_s,
        wake_s=beside.wake_s if asleep else 0.0,
        drift=beside.drift,
        neighbours=neighbours,
        crowd=beside.crowd,
        whole_row_slots=rates.whole_row_slots,
        free_whole_row_slots=rates.free_whole_row_slots,
    )


def _features(endpoint: EngineEndpoint) -> frozenset[str]:
    return frozenset({"text", "vision"} if endpoint.sees_images else {"text"})
