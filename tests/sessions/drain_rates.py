"""What an engine with nothing to do tells of itself."""

from engines.rates_view import EngineRates

STEPS = ((1, 0.05),)
RATES = EngineRates(
    model="tiny", slots=4, free_slots=4, decoding=0, pending_tokens=(), queue_length=0, queue_limit=8, context_tokens=4096,
    cells=8192, resident_tokens=0, prefill_token_s=0.001, prefill_pair_s=0.0, steps=STEPS, resident_token_s=0.0,
    request_s=1.0, chunk_s=0.1, interleaves=False, kv_group="", restore_bytes_per_s=0.0, sessions={}, idle_tokens=0,
    idle_s=0.0, streams_kv=True, kv_token_bytes=100.0,
)  # fmt: skip
