"""Where a model fits and in which forms: pure arithmetic over its facts and a device's free memory.

`fit` answers for one device: the wished form if its weights find room there (all on the card, or experts or layers left to
the host), else a refusal that names what is missing and the nearest form that does fit. `previews` lists every valid
placement with the memory that it leaves.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

from pools.ledger import ALL_LAYERS, USUAL_MICRO_BATCH_TOKENS, Form, Ledger, ModelFacts, Prediction
from pools.ledger_predict import predict
from pools.micro_batch import with_micro_batch

# Beside what llama.cpp plans: a driver's scratch memory; the interpreter, the vocabulary and what requests hold.
CARD_MARGIN_BYTES = 512 << 20
HOST_MARGIN_BYTES = 256 << 20
SHORTEST_CONTEXT_TOKENS = 2048
CHECKPOINTS_COST = 0.3
COMPACT_KV = ("q8_0", "q4_0")
_WIDTHS = {"f32": 32.0, "f16": 16.0, "bf16": 16.0, "q8_0": 8.5, "q5_1": 6.0, "q5_0": 5.5, "q4_1": 5.0, "q4_0": 4.5}
PREVIEW_STEPS = 4


@dataclass(frozen=True)
class Room:
    """A device as a model may use it; bytes are free for engines, margins taken off already.

    A CPU is no card and has no `card_bytes`; those of a card that others fill may be negative. `whole_card_bytes` are those of
    the card when it is empty; 0: not known, and then nobody gets a larger micro-batch. `host_bytes` bounds what is
    kept in host memory, `resident_bytes` that and the mapped weights together: weights beyond it would be read from disk again
    and again.
    """

    device_id: int
    name: str
    card_bytes: int
    host_bytes: int
    resident_bytes: int
    is_card: bool = False
    whole_card_bytes: int = 0


@dataclass(frozen=True)
class Preview:
    """A form that fits on a device, what it takes, and what it leaves. `cost` ranks forms: 0 is what was wished for."""

    device_id: int
    form: Form
    prediction: Prediction
    card_left_bytes: int
    host_left_bytes: int
    cost: float

    @property
    def label(self) -> str:
        """The form in a few words."""
        return describe(self.form)


@dataclass(frozen=True)
class Refusal:
    """Why the wished form does not fit on a device, and the nearest one that does (None: none does)."""

    device_id: int
    reason: str
    nearest: Preview | None

    def __str__(self) -> str:
        if self.nearest is None:
            return f"{self.reason}; no smaller form fits either"
        return f"{self.reason}; nearest form that fits: {self.nearest.label}"


def describe(form: Form) -> str:
    """A form in a few words, weights first."""
    if form.gpu_layers == 0:
        weights = "on the CPU"
    elif form.gpu_layers < 0:
        weights = "all layers on the card"
    else:
        weights = f"{form.gpu_layers} layers on the card"
    if form.cpu_moe_layers:
        weights += f", experts of {form.cpu_moe_layers} layers on the host"
    kv = form.kv_type_k if form.kv_type_k == form.kv_type_v else f"{form.kv_type_k}/{form.kv_type_v}"
    slots = f"{form.slots} slot{'s' if form.slots > 1 else ''}"
    steps = f", {form.micro_batch:,} tokens at once" if form.micro_batch > USUAL_MICRO_BATCH_TOKENS else ""
    return f"{weights}; {slots} of {form.context_tokens:,} tokens, {kv} KV{steps}"


def fit(facts: ModelFacts, wish: Form, room: Room) -> Preview | Refusal:
    """The best placement for the wished slots, context and K/V types; a refusal if none fits."""
    found = placed(facts, wish, room)
    if found is not None:
        return found
    return Refusal(room.device_id, _shortage(facts, wish, room), nearest(facts, wish, room))


def nearest(facts: ModelFacts, wish: Form, room: Room) -> Preview | None:
    """The cheapest form with fewer slots, a shorter context or narrower K/V that fits, whatever happens to the weights."""
    best: Preview | None = None
    for form, cost in sorted(_variants(wish), key=lambda variant: variant[1]):
        if best is not None and cost >= best.cost:
            break
        found = placed(facts, form, room)
        if found is not None and (best is None or cost + found.cost < best.cost):
            best = dataclasses.replace(found, cost=cost + found.cost)
    return best


def previews(facts: ModelFacts, wish: Form, room: Room) -> list[Preview]:
    """Every kind of placement that fits, cheapest first: weights in steps for what was wished, variants at their best."""
    found = {}
    for form, cost in _weight_steps(facts, wish, room):
        if (preview := _preview(facts, form, room, cost)) is not None:
            found[preview.form] = preview
    for variant, cost in _variants(wish):
        best = placed(facts, variant, room)
        if best is not None and best.form not in found:
            found[best.form] = dataclasses.replace(best, cost=cost + best.cost)
    return sorted(found.values(), key=lambda preview: preview.cost)


def placed(facts: ModelFacts, wish: Form, room: Room) -> Preview | None:
    """The wish with as much on the card as fits. Checkpoints, which only save time, go before weights do."""
    best, all_of_them = _with_weights(facts, wish, room), wish.kept_checkpoints
    for left, cost in ((all_of_them // 2, CHECKPOINTS_COST / 2), (0, CHECKPOINTS_COST)):
        if left == all_of_them or (best is not None and best.cost <= cost):
            continue
        bare = _with_weights(facts, dataclasses.replace(wish, checkpoints=left), room)
        if bare is not None and (best is None or bare.cost + cost < best.cost):
            best = dataclasses.replace(bare, cost=bare.cost + cost)
    return best


def as_wished(facts: ModelFacts, wish: Form, room: Room) -> Preview | None:
    """Exactly the wish, weights split as it says; None if that does not fit."""
    return _preview(facts, wish, room, 0.0)


def _with_weights(facts: ModelFacts, wish: Form, room: Room) -> Preview | None:
    """All layers on the card if they fit, else all but some experts, else some layers. None if nothing fits."""
    if not room.is_card or wish.gpu_layers == 0:
        return _preview(facts, dataclasses.replace(wish, gpu_layers=0, cpu_moe_layers=0), room, 0.0)
    whole = dataclasses.replace(wish, gpu_layers=ALL_LAYERS, cpu_moe_layers=0)
    found = _preview(facts, whole, room, 0.0)
    if found is None and facts.experts:
        found = _fewest(
            facts,
            room,
            [(dataclasses.replace(whole, cpu_moe_layers=n), _moe_cost(facts, n)) for n in range(1, facts.layers + 1)],
        )
    if found is None:
        layers = range(facts.placed_layers - 1, 0, -1)
        found = _fewest(
            facts, room, [(dataclasses.replace(whole, gpu_layers=n), _layer_cost(facts, n)) for n in layers]
        )
    return found


def _fewest(facts: ModelFacts, room: Room, steps: list[tuple[Form, float]]) -> Preview | None:
    """The first step that fits. What the card holds only falls along them, what the host holds only rises."""
    low, high = 0, len(steps)
    while low < high:
        middle = (low + high) // 2
        if _card_left(predict(facts, steps[middle][0]), room) >= 0:
            high = middle
        else:
            low = middle + 1
    if low == len(steps):
        return None
    form, cost = steps[low]
    return _preview(facts, form, room, cost)


def _weight_steps(facts: ModelFacts, wish: Form, room: Room) -> Iterator[tuple[Form, float]]:
    """The wished form with its weights split in every way worth showing."""
    whole = dataclasses.replace(wish, gpu_layers=ALL_LAYERS, cpu_moe_layers=0)
    if room.is_card:
        yield whole, 0.0
        if (best := placed(facts, wish, room)) is not None:
            yield best.form, best.cost
        for quarter in range(1, PREVIEW_STEPS + 1):
            if facts.experts:
                moved = max(1, facts.layers * quarter // PREVIEW_STEPS)
                yield dataclasses.replace(whole, cpu_moe_layers=moved), _moe_cost(facts, moved)
            kept = facts.placed_layers * (PREVIEW_STEPS - quarter) // PREVIEW_STEPS
            if kept:
                yield dataclasses.replace(whole, gpu_layers=kept), _layer_cost(facts, kept)
    yield dataclasses.replace(whole, gpu_layers=0), 3.0 if room.is_card else 0.0


def _moe_cost(facts: ModelFacts, moved: int) -> float:
    return 0.4 + moved / max(facts.layers, 1)


def _layer_cost(facts: ModelFacts, kept: int) -> float:
    return 0.5 + 2 * (facts.placed_layers - kept) / facts.placed_layers


def _variants(wish: Form) -> Iterator[tuple[Form, float]]:
    """The wish with fewer slots, shorter contexts and narrower K/V, each with its cost (1: half the slots or context)."""
    kinds = [((wish.kv_type_k, wish.kv_type_v), 0.0)]
    widest = max(_WIDTHS[wish.kv_type_k], _WIDTHS[wish.kv_type_v])
    kinds += [((name, name), 0.5 + rank) for rank, name in enumerate(COMPACT_KV) if _WIDTHS[name] < widest]
    contexts = [(wish.context_tokens, 0.0)]
    while contexts[-1][0] // 2 >= SHORTEST_CONTEXT_TOKENS:
        contexts.append((contexts[-1][0] // 2, contexts[-1][1] + 1.0))
    slots = [wish.slots]
    while slots[-1] > 1:
        slots.append(slots[-1] // 2)
    for (type_k, type_v), kv_cost in kinds:
        for tokens, context_cost in contexts:
            for count in slots:
                form = dataclasses.replace(wish, kv_type_k=type_k, kv_type_v=type_v, context_tokens=tokens, slots=count)
                yield form, kv_cost + context_cost + math.log2(wish.slots / count)


def _preview(facts: ModelFacts, form: Form, room: Room, cost: float) -> Preview | None:
    """The form, with as large a micro-batch as there is room for where it names none."""
    chosen = with_micro_batch(facts, form, room.whole_card_bytes, lambda needed: min(_left(needed, room)) >= 0)
    if chosen is None:
        return None
    form, prediction = chosen
    return Preview(room.device_id, form, prediction, *_left(prediction, room), cost)


def _left(prediction: Prediction, room: Room) -> tuple[int, int]:
    return _card_left(prediction, room), _host_left(prediction.host, room)


def _card_left(prediction: Prediction, room: Room) -> int:
    return room.card_bytes - prediction.device.total_bytes


def _host_left(host: Ledger, room: Room) -> int:
    return min(room.host_bytes - host.kept_bytes, room.resident_bytes - host.total_bytes)


def _shortage(facts: ModelFacts, wish: Form, room: Room) -> str:
    """What is missing for the wish, in its smallest split where a card is short."""
    whole = predict(facts, dataclasses.replace(wish, gpu_layers=ALL_LAYERS if room.is_card else 0, cpu_moe_layers=0))
    if room.is_card and whole.device.total_bytes > room.card_bytes:
        parts = ", ".join(f"{kind} {sized(size)}" for kind, size in whole.device.by_kind().items())
        return (
            f"{room.name} has {sized(room.card_bytes)} for it and {sized(whole.device.total_bytes)} is needed ({parts})"
        )
    host = whole.host
    parts = ", ".join(f"{kind} {sized(size)}" for kind, size in host.by_kind().items())
    left = max(min(room.host_bytes, room.resident_bytes), 0)
    return f"the host of {room.name} has {sized(left)} for it and {sized(host.total_bytes)} is needed ({parts})"


def sized(size_bytes: int) -> str:
    """A size for people: MiB below one GiB, else GiB with one decimal."""
    return f"{size_bytes / 2**30:.1f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:.0f} MiB"
