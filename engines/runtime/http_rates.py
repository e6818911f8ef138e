"""`GET /rates`: what a router must know of this engine, cheap enough to be asked every second."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from types import MappingProxyType

from aiohttp import web

from engines.rates_view import MAX_PENDING, MAX_SESSIONS, EngineRates
from engines.runtime.checkpoint_order import stays
from engines.runtime.core import EngineCore
from engines.runtime.operations import NEEDS_MODEL, Operation
from engines.runtime.prefix import PrefixCache
from engines.runtime.preparation import Preparation
from engines.runtime.rates import pairs_of
from engines.runtime.state_desk import StateDesk


class RatesEndpoint:
    """Answers from the event loop while the core runs: values may be one step apart."""

    def __init__(self, preparation: Preparation, desk: StateDesk) -> None:
        self._preparation = preparation
        self._desk = desk

    def operations(self) -> list[Operation]:
        return [
            Operation(
                "GET",
                "/rates",
                self.rates,
                "Measured speeds, free slots, the line, and the sessions held: what a router goes by.",
                statuses=NEEDS_MODEL,
            )
        ]

    async def rates(self, _request: web.Request) -> web.Response:
        self._preparation.llama  # noqa: B018 -- a model that is being loaded has no speed yet
        config = self._preparation.config
        # What an engine holds that has neither a store nor peers can be shared with nobody: its file is not read for a digest.
        kv_group = self._desk.known_fingerprint() if config.store_port or config.rpc_port else ""
        parking = self._preparation.parking
        restores = parking.rates.restore_bytes_per_s if kv_group and parking is not None else 0.0
        links = parking.rates.links if kv_group and parking is not None else {}
        return web.json_response(asdict(rates_of(self._preparation.core, kv_group, restores, links)))


def rates_of(
    core: EngineCore,
    kv_group: str = "",
    restore_bytes_per_s: float = 0.0,
    links: Mapping[str, float] = MappingProxyType({}),
) -> EngineRates:
    """Of a core that is ready."""
    cache, rates, config = core.cache, core.rates, core.config
    free = cache.free_slots
    idle_tokens, idle_s = next_to_go(cache)
    layout = core.codec.layout if core.codec is not None else None
    return EngineRates(
        model=config.model_name,
        slots=config.slots,
        free_slots=free,
        whole_row_slots=config.whole_row_sequences if config.samples_on_device else config.slots,
        free_whole_row_slots=min(free, sum(slot.idle for slot in cache.slots if slot.has_raw_logits)),
        decoding=sum(slot.decoding for slot in cache.slots),
        pending_tokens=pending_tokens(core),
        queue_length=len(core.waiting),
        queue_limit=config.queue_limit,
        context_tokens=config.context_tokens,
        cells=cache.ledger.count,
        resident_tokens=cache.ledger.count - cache.ledger.free,
        prefill_token_s=rates.prefill.token_s,
        prefill_pair_s=rates.prefill.pair_s,
        prefill_beside_s=rates.prefill.beside_s,
        steps=tuple(rates.decode.steps()),
        resident_token_s=rates.decode.resident_token_s,
        own_token_s=rates.decode.own_token_s,
        own_tokens=sum(len(slot.sequence) for slot in cache.slots if slot.decoding),
        request_s=max(rates.request_s, held_s(cache)),
        chunk_s=chunk_s(core),
        interleaves=core.planner.alternates,
        kv_group=kv_group,
        restore_bytes_per_s=restore_bytes_per_s,
        sessions=sessions_held(cache),
        idle_tokens=idle_tokens,
        idle_s=idle_s,
        links=dict(links),
        streams_kv=layout is not None and bool(config.rpc_port),
        kv_token_bytes=float(layout.block_bytes(2) - layout.block_bytes(1)) if layout is not None else 0.0,
        kv_part_bytes=float(layout.part_bytes(0)) if layout is not None and layout.has_part else 0.0,
    )


def chunk_s(core: EngineCore) -> float:
    """A piece of a prompt between two steps of others, beside what lies in the cache now."""
    tokens, resident_tokens = core.planner.shared_tokens, core.cache.ledger.count - core.cache.ledger.free
    return core.rates.prefill.seconds(tokens, pairs_of(0, tokens), float(tokens) * resident_tokens)


def held_s(cache: PrefixCache) -> float:
    """How long those who run have had their slots, on average: past ones may have been shorter."""
    now = time.monotonic()
    running = [slot.generation for slot in cache.slots if slot.generation is not None]
    return sum(now - (one.started_at or now) for one in running) / max(1, len(running))


def pending_tokens(core: EngineCore) -> tuple[int, ...]:
    """What each prompt that has no answer yet still has to compute; of waiting ones all of it, for nobody has looked yet."""
    filling = [slot.todo_tokens for slot in core.cache.slots if slot.generation is not None and not slot.decoding]
    return tuple((filling + core.waiting.prompt_tokens(MAX_PENDING))[:MAX_PENDING])


def sessions_held(cache: PrefixCache) -> dict[str, int]:
    """Tokens of each conversation with a name that a slot or host memory holds; of those used last MAX_SESSIONS."""
    found: dict[str, int] = {}
    for entry in (entry for entry in cache.host if not entry.is_cut):
        _add(found, entry.origin.session, len(entry.tokens))
    for place in cache.aside:
        _add(found, place.sequence.origin.session, len(place.sequence))
    for slot in sorted(cache.slots, key=lambda slot: slot.used_at):
        _add(found, slot.sequence.origin.session, len(slot.sequence))
    return dict(list(found.items())[-MAX_SESSIONS:])


def _add(found: dict[str, int], session: str, tokens: int) -> None:
    if session and tokens:
        # Taken out first, so that the order is that of use.
        found[session] = max(tokens, found.pop(session, 0))


def next_to_go(cache: PrefixCache) -> tuple[int, float]:
    """The session that a new one would push out: tokens and seconds since it was used; no tokens if there is a slot that is empty
    or holds none, but what hardly anybody goes on with. Of slots for whole rows only where there are no others."""
    usual = [slot for slot in cache.slots if not slot.has_raw_logits] or cache.slots
    idle = [slot for slot in usual if slot.idle]
    if not idle or any(not len(slot.sequence) for slot in idle):
        return 0, 0.0
    first = min(idle, key=stays)
    if not first.sequence.origin.session:
        return 0, 0.0
    return len(first.sequence), round(time.monotonic() - first.used_at, 3)
