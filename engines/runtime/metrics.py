"""The engine's Prometheus series: llama.cpp's names where its dashboards have one, our own prefix for the rest."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from engines.runtime.draft_length import DraftLength
from engines.runtime.generation import Stats
from engines.runtime.handoff_metrics import HandoffMetrics
from engines.runtime.prefix import PrefixCache
from engines.runtime.rates import Rates
from engines.runtime.waiting import WaitingLine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_WAITS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_STEPS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class EngineMetrics:
    """A registry of its own, so that several engines in one test process do not clash. Updated by the core's thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.handoffs = HandoffMetrics(self.registry)
        self._rates: Rates | None = None
        self.prompt_tokens = self._counter("llamacpp:prompt_tokens", "Prompt tokens computed")
        self.predicted_tokens = self._counter("llamacpp:tokens_predicted", "Tokens generated")
        self.prompt_seconds = self._counter("llamacpp:prompt_seconds", "Time from admission to the first token")
        self.predicted_seconds = self._counter("llamacpp:tokens_predicted_seconds", "Time from first to last token")
        self.decode_calls = self._counter("llamacpp:n_decode", "Calls of llama_decode")
        self.cached_tokens = self._counter("hydra_engine_cached_prompt_tokens", "Prompt tokens reused, not computed")
        self.preemptions = self._counter("hydra_engine_preemptions", "Generations put back because the cache was full")
        self.drafts = self._counter("hydra_engine_drafts", "Drafts that steps verified")
        self.drafted_tokens = self._counter("hydra_engine_drafted_tokens", "Tokens drafted for a step to verify")
        self.accepted_tokens = self._counter("hydra_engine_accepted_tokens", "Drafted tokens that were right")
        self.requests = Counter(
            "hydra_engine_requests", "Ended generations by outcome", ["outcome"], registry=self.registry
        )
        self.wait_steps = Counter(
            "hydra_engine_wait_steps",
            "Steps that a waiting generation was passed over, by cause (slot, cells, prefix, leaving)",
            ["cause"],
            registry=self.registry,
        )
        self.wait_seconds = Histogram(
            "hydra_engine_wait_seconds",
            "What requests waited for beside the line: their preparation (a free thread and those before them included), their"
            " prefix from the store, others' prompts in the same steps",
            ["cause"],
            registry=self.registry,
            buckets=_WAITS_S,
        )
        self.queue_seconds = self._histogram("hydra_engine_queue_seconds", "Time in the waiting line", _WAITS_S)
        self.first_token_seconds = self._histogram(
            "hydra_engine_time_to_first_token_seconds", "Time from arrival to the first token", _WAITS_S
        )
        self.output_token_seconds = self._histogram(
            "hydra_engine_time_per_output_token_seconds", "A generation's mean time between tokens", _STEPS_S
        )
        self.step_seconds = self._histogram("hydra_engine_step_seconds", "Duration of llama_decode", _STEPS_S)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, registry=self.registry, buckets=buckets)

    def watch(self, cache: PrefixCache, waiting: WaitingLine) -> None:
        """Registers the gauges that are read from the core's own state when somebody scrapes."""

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, registry=self.registry)

        cells = cache.ledger
        gauge("llamacpp:requests_processing", "Generations in slots").set_function(lambda: len(cache.busy))
        gauge("llamacpp:requests_deferred", "Generations in the waiting line").set_function(lambda: len(waiting))
        gauge("llamacpp:kv_cache_tokens", "KV cells in use").set_function(lambda: cells.count - cells.free)
        gauge("llamacpp:kv_cache_usage_ratio", "Share of KV cells in use").set_function(
            lambda: 1 - cells.free / cells.count
        )
        gauge("hydra_engine_slots", "Generations that may run at once").set(cache.most_running)
        gauge("hydra_engine_checkpoints", "Checkpoints inside the context").set_function(
            lambda: sum(len(checkpoint.sequence) > 0 for checkpoint in cache.checkpoints)
        )
        gauge("hydra_engine_host_cache_bytes", "States in host memory").set_function(lambda: cache.host.used_bytes)
        gauge("hydra_engine_host_cache_evicted", "States that host memory had no more room for").set_function(
            lambda: cache.host.evicted
        )
        gauge("hydra_engine_host_cache_entries", "States in host memory").set_function(lambda: len(cache.host))

    def watch_drafts(self, length: DraftLength) -> None:
        """Registers what the choice of a draft's length rests on."""
        Gauge("hydra_engine_draft_length", "Tokens of the last draft, 0 where drafting does not pay",
              registry=self.registry).set_function(lambda: length.chosen)  # fmt: skip
        Gauge("hydra_engine_draft_gain", "Speed with drafts of that length over the speed without, by measured costs",
              registry=self.registry).set_function(lambda: length.gain)  # fmt: skip
        Gauge("hydra_engine_draft_acceptance", "Share of drafted tokens that were right, of late, all generations",
              registry=self.registry).set_function(lambda: length.prior)  # fmt: skip

    def watch_rates(self, rates: Rates) -> None:
        """Registers the speeds that a router goes by, and tells them how long generations hold a slot."""
        self._rates = rates
        Gauge("hydra_engine_prompt_token_seconds", "Time of a prompt's token, of late",
              registry=self.registry).set_function(lambda: rates.prefill.token_s)  # fmt: skip
        Gauge("hydra_engine_request_seconds", "Time that a generation holds a slot, of late",
              registry=self.registry).set_function(lambda: rates.request_s)  # fmt: skip

    def ended(self, outcome: str, stats: Stats) -> None:
        self.requests.labels(outcome).inc()
        if self._rates is not None and stats.completion_tokens:
            self._rates.ended(stats.prompt_s + stats.decode_s)
        self.cached_tokens.inc(stats.cached_tokens)
        self.drafts.inc(stats.drafts)
        self.drafted_tokens.inc(stats.drafted_tokens)
        self.accepted_tokens.inc(stats.accepted_tokens)
        for cause, seconds in (("restore", stats.restore_s), ("others_prompts", stats.prompt_wait_s)):
            if seconds:
                self.wait_seconds.labels(cause).observe(seconds)
        if stats.completion_tokens:
            self.prompt_seconds.inc(stats.prompt_s)
            self.predicted_seconds.inc(stats.decode_s)
        if stats.completion_tokens > 1:
            self.output_token_seconds.observe(stats.decode_s / (stats.completion_tokens - 1))

    def text(self) -> bytes:
        return generate_latest(self.registry)
