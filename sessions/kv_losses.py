"""What is lost between two quants of a family whose engines share KV: which pairs were measured, and which are to be.

The only writer of these rows. A pair without a figure is used for nothing; one that could not be measured is tried again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db.models import Q
from django.db.models.functions import Now

from engines import services as engines
from engines.services import EngineEndpoint
from sessions.models import KvLoss

# No task measures for longer; it must be over before a pair is tried again.
MEASURING_S = 540.0
RETRY_S = 600.0
MAX_PROBLEM_CHARS = 300


@dataclass(frozen=True)
class KvLossView:
    """A pair of quants as pages and headers show it; KL in nats, None where it was not measured."""

    prefill_variant_id: int
    decode_variant_id: int
    prefill_quant: str
    decode_quant: str
    model_name: str
    kl_mean: float | None
    kl_max: float | None
    places: int
    same_top: int
    probe_tokens: int
    problem: str
    measured_at: datetime | None


@dataclass(frozen=True)
class Measured:
    """One measurement: the divergence at `places` of the probe text, of which `same_top` kept their likeliest token."""

    kl_mean: float
    kl_max: float
    places: int
    same_top: int
    probe_tokens: int


@dataclass(frozen=True)
class Pair:
    """Two serving engines of unlike quants of one family."""

    prefill: EngineEndpoint
    decode: EngineEndpoint

    @property
    def of(self) -> Q:
        return Q(prefill_variant_id=self.prefill.variant_id, decode_variant_id=self.decode.variant_id)


def among(variant_ids: Iterable[int]) -> dict[tuple[int, int], float]:
    """The mean divergence of each pair of these variants that was measured."""
    chosen = list(variant_ids)
    rows = KvLoss.objects.filter(
        prefill_variant_id__in=chosen, decode_variant_id__in=chosen, kl_mean__isnull=False
    ).values_list("prefill_variant_id", "decode_variant_id", "kl_mean")
    return {(first, second): kl for first, second, kl in rows}


def views(model_id: int | None = None) -> tuple[KvLossView, ...]:
    """All pairs that were looked at, or a model's."""
    rows = KvLoss.objects.select_related("prefill_variant__model", "decode_variant")
    if model_id is not None:
        rows = rows.filter(prefill_variant__model_id=model_id)
    return tuple(
        KvLossView(
            row.prefill_variant_id,
            row.decode_variant_id,
            row.prefill_variant.quantization,
            row.decode_variant.quantization,
            row.prefill_variant.model.name,
            row.kl_mean,
            row.kl_max,
            row.places,
            row.same_top,
            row.probe_tokens,
            row.problem,
            row.measured_at,
        )
        for row in rows
    )


def due() -> list[Pair]:
    """Pairs of engines that serve now and whose quants may share KV, but were not measured: each pair of quants once."""
    by_family: dict[tuple[str, str], dict[int, EngineEndpoint]] = {}
    for endpoint in engines.serving_engines():
        if endpoint.kv_family:
            by_family.setdefault((endpoint.model_name, endpoint.kv_family), {})[endpoint.variant_id] = endpoint
    found = []
    for of_family in by_family.values():
        if len(of_family) > 1:
            known = _settled(list(of_family))
            found += [
                Pair(first, second)
                for first in of_family.values()
                for second in of_family.values()
                if first is not second and (first.variant_id, second.variant_id) not in known
            ]
    return found


def _settled(variant_ids: list[int]) -> set[tuple[int, int]]:
    """Pairs that have a figure, are being measured, or failed a moment ago."""
    late = Q(measured_at__isnull=False) | Q(tried_at__gt=Now() - timedelta(seconds=RETRY_S))
    rows = KvLoss.objects.filter(late, prefill_variant_id__in=variant_ids, decode_variant_id__in=variant_ids)
    return set(rows.values_list("prefill_variant_id", "decode_variant_id"))


def claim(pair: Pair) -> bool:
    """Take a pair to measure it; False when somebody else has."""
    KvLoss.objects.get_or_create(prefill_variant_id=pair.prefill.variant_id, decode_variant_id=pair.decode.variant_id)
    free = Q(tried_at__isnull=True) | Q(tried_at__lt=Now() - timedelta(seconds=MEASURING_S))
    return bool(KvLoss.objects.filter(pair.of, free, measured_at__isnull=True).update(tried_at=Now(), problem=""))


def record(pair: Pair, measured: Measured) -> bool:
    """Write a measurement down; False when the pair's row is gone, as with one of its variants."""
    return bool(KvLoss.objects.filter(pair.of).update(**vars(measured), problem="", measured_at=Now()))


def fail(pair: Pair, problem: str) -> bool:
    """Write down why a pair could not be measured; it is tried again after RETRY_S."""
    return bool(KvLoss.objects.filter(pair.of, measured_at__isnull=True).update(problem=problem[:MAX_PROBLEM_CHARS]))


def measure_again(row_ids: Iterable[int]) -> int:
    """Forget these figures, so that the pairs are measured anew when both quants are served; returns how many."""
    return KvLoss.objects.filter(pk__in=list(row_ids)).update(
        kl_mean=None, kl_max=None, places=0, same_top=0, problem="", tried_at=None, measured_at=None
    )
