"""Where a model is loaded on demand, and who makes way: pure arithmetic over devices, what is loaded there, and a wish.

Bytes decide whether, seconds decide which: what must be loaded again later counts with its seconds, a form that runs slower
than a whole card counts with the patience that it takes. Pinned engines never make way, nor do those that came a moment ago.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from pools.ledger import Form, ModelFacts
from pools.placement import Preview, Refusal, Room, as_wished, fit, placed

# Among so few residents every combination is tried; beyond, they go one by one, the least missed first.
EXACT_RESIDENTS = 5
LOAD_BYTES_PER_S = 1 << 30  # until a load has been timed
# What a slower form costs, as seconds that one would rather wait for a better one.
CPU_BESIDE_CARDS_S = 120.0
OFFLOAD_S = 30.0
SMALLER_FORM_S = 60.0


@dataclass(frozen=True)
class Resident:
    """A loaded engine. Bytes as its ledger has them; `reload_s` to bring it back, `idle_s` since its last request.

    `may_go` is False for a pinned engine, one that loads, and one that came a moment ago.
    """

    engine_id: int
    device_id: int
    host_id: int
    card_bytes: int
    kept_bytes: int
    resident_bytes: int
    reload_s: float
    idle_s: float
    streams: int = 0
    may_go: bool = True


@dataclass(frozen=True)
class DeviceState:
    """A device and its host, as free memory stands with everything that is loaded now; margins taken off."""

    room: Room
    host_id: int
    is_busy: bool = False


@dataclass(frozen=True)
class LoadPlan:
    """Where to load, in which form, and which engines go first."""

    device_id: int
    preview: Preview
    stops: tuple[int, ...]
    cost_s: float
    is_smaller: bool


def plan_load(
    facts: ModelFacts,
    wish: Form,
    devices: Sequence[DeviceState],
    residents: Sequence[Resident],
    *,
    may_shrink: bool = True,
    exact: bool = False,
) -> LoadPlan | Refusal:
    """The cheapest way to load the model now; a refusal, by the device that is nearest to holding it, if there is none.

    With `may_shrink` a form with fewer slots, a shorter context or narrower K/V is taken where the wish fits nowhere; with
    `exact` weights are split as the wish says, too.
    """
    has_cards = any(device.room.is_card for device in devices)
    plans = [
        _plan(device, stops, preview, has_cards, is_smaller=False)
        for device in devices
        for stops, preview in _whole(facts, wish, device, residents, exact=exact)
    ]
    refusals = []
    if not plans:
        for device in devices:
            for stops in ((), tuple(_evictable(device, residents))):
                answer = fit(facts, wish, _freed(device, stops))
                if isinstance(answer, Refusal):
                    refusals.append(answer)
                    if answer.nearest is not None and may_shrink:
                        plans.append(_plan(device, stops, answer.nearest, has_cards, is_smaller=True))
    if plans:
        return min(plans, key=lambda plan: (plan.cost_s, len(plan.stops)))
    if not refusals:
        return Refusal(0, "no device of the pool can be used", None)
    return min(refusals, key=lambda refusal: refusal.nearest.cost if refusal.nearest else float("inf"))


def _whole(
    facts: ModelFacts, wish: Form, device: DeviceState, residents: Sequence[Resident], *, exact: bool
) -> list[tuple[tuple[Resident, ...], Preview]]:
    """Sets of engines after whose end the wish fits; no set that holds a smaller one whose form is as good."""
    found: list[tuple[tuple[Resident, ...], Preview]] = []
    for stops in _candidates(_evictable(device, residents)):
        if any(set(fewer) <= set(stops) and preview.cost == 0 for fewer, preview in found):
            continue
        preview = (as_wished if exact else placed)(facts, wish, _freed(device, stops))
        if preview is not None:
            found.append((stops, preview))
    return found


def _plan(
    device: DeviceState, stops: Sequence[Resident], preview: Preview, has_cards: bool, *, is_smaller: bool
) -> LoadPlan:
    cost_s = sum(_missed_s(resident) for resident in stops)
    cost_s += preview.cost * (SMALLER_FORM_S if is_smaller else OFFLOAD_S)
    cost_s += CPU_BESIDE_CARDS_S if has_cards and not device.room.is_card else 0.0
    return LoadPlan(device.room.device_id, preview, tuple(stop.engine_id for stop in stops), cost_s, is_smaller)


def _missed_s(resident: Resident) -> float:
    """Its loading again; more if it works now, less the longer nobody asked for it."""
    return resident.reload_s * (1 + resident.streams) / (1 + resident.idle_s / 300.0)


def _evictable(device: DeviceState, residents: Sequence[Resident]) -> list[Resident]:
    """Who could make way on a device or in its host's memory, the least missed first."""
    near = [one for one in residents if one.may_go and one.host_id == device.host_id]
    useful = [one for one in near if one.device_id == device.room.device_id or one.resident_bytes]
    return sorted(useful, key=_missed_s)


def _candidates(evictable: Sequence[Resident]) -> list[tuple[Resident, ...]]:
    """Sets of engines, nobody first."""
    if len(evictable) <= EXACT_RESIDENTS:
        return [chosen for count in range(len(evictable) + 1) for chosen in combinations(evictable, count)]
    return [tuple(evictable[:count]) for count in range(len(evictable) + 1)] + [(one,) for one in evictable]


def _freed(device: DeviceState, stops: Sequence[Resident]) -> Room:
    """The room with these engines gone."""
    room = device.room
    return dataclasses.replace(
        room,
        card_bytes=room.card_bytes + sum(one.card_bytes for one in stops if one.device_id == room.device_id),
        host_bytes=room.host_bytes + sum(one.kept_bytes for one in stops),
        resident_bytes=room.resident_bytes + sum(one.resident_bytes for one in stops),
    )


def reload_s(load_s: float | None, loaded_bytes: int) -> float:
    """How long an engine would take to come back: as long as last time, else by its size."""
    return load_s if load_s is not None else 1.0 + loaded_bytes / LOAD_BYTES_PER_S
