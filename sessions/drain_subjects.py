"""What can get empty: an engine, a card or a host, with its engines as they are now, and what is around it."""

from __future__ import annotations

from dataclasses import dataclass

from engines import services as engines
from engines.choices import MAY_HOLD, EngineState, Wanted
from engines.services import EngineView
from pools import services as pools
from pools.choices import HostDuty
from sessions.choices import DrainKind
from sessions.errors import DrainUnknown

# Names told where one is not known, and drains listed.
SHOWN = 20


@dataclass(frozen=True)
class Subject:
    """What gets empty, at this moment. `own` are all its engines; `around` are the kinds and keys of the card and host that it
    belongs to, `parts` of what belongs to it. `host_id` is 0, and `duty` "", but for hosts."""

    kind: str
    id: int
    name: str
    own: tuple[EngineView, ...]
    host_id: int = 0
    duty: str = ""
    around: tuple[tuple[str, int], ...] = ()
    parts: tuple[tuple[str, int], ...] = ()

    @property
    def engines(self) -> tuple[EngineView, ...]:
        """Those with a process that may hold conversations."""
        return tuple(one for one in self.own if one.state in MAY_HOLD and one.base_url is not None)

    @property
    def engine_ids(self) -> list[int]:
        return [engine.id for engine in self.engines]

    @property
    def closed_ids(self) -> list[int]:
        """Those that are to take nothing new: also who is on its way up, or would come up again by itself."""
        return [
            one.id
            for one in self.own
            if one in self.engines or one.wanted == Wanted.RUNNING or one.state == EngineState.STARTING
        ]

    @property
    def serves(self) -> bool:
        """Whether anything of it takes requests, or nothing is in the way of one that came up."""
        if self.kind == DrainKind.ENGINE:
            return self.own[0].takes_new
        running = self.engines
        return self.duty in ("", HostDuty.ACTIVE) and (not running or any(one.takes_new for one in running))


def subject_of(kind: str, subject_id: int) -> Subject:
    """The engine, card or host of this key, as it is now. Raises DrainUnknown."""
    views = engines.engine_views()
    if kind == DrainKind.ENGINE:
        for one in views:
            if one.id == subject_id:
                card = () if one.gpu_id is None else ((str(DrainKind.CARD), one.gpu_id),)
                return Subject(kind, subject_id, one.name, (one,), around=(*card, (DrainKind.HOST, one.host_id)))
    for host in pools.host_views():
        for gpu in host.gpus:
            if kind == DrainKind.CARD and gpu.id == subject_id:
                own = tuple(one for one in views if one.gpu_id == gpu.id)
                name, around = f"{host.name}/{gpu.kind}{gpu.index}", ((DrainKind.HOST, host.id),)
                return Subject(kind, subject_id, name, own, around=around, parts=_keys_of(own))
        if kind == DrainKind.HOST and host.id == subject_id:
            own = tuple(one for one in views if one.host_id == subject_id)
            cards = [(DrainKind.CARD, gpu.id) for gpu in host.gpus]
            return Subject(
                kind, subject_id, host.name, own, host_id=host.id, duty=host.duty, parts=(*cards, *_keys_of(own))
            )
    raise DrainUnknown(f"There is no {kind} {subject_id}.")


def named(kind: str, name: str) -> Subject:
    """The same by its name: an engine's, a host's, a card's as HOST/cuda0 or its uuid. Raises DrainUnknown."""
    names: dict[str, int] = {}
    if kind == DrainKind.ENGINE:
        names = {engine.name: engine.id for engine in engines.engine_views()}
    for host in pools.host_views():
        if kind == DrainKind.HOST:
            names[host.name] = host.id
        if kind == DrainKind.CARD:
            names |= {f"{host.name}/{gpu.kind}{gpu.index}": gpu.id for gpu in host.gpus}
    if kind == DrainKind.CARD:
        names |= pools.card_keys()
    if name not in names:
        known = ", ".join(sorted(names)[:SHOWN]) or "none"
        raise DrainUnknown(f"There is no {kind} {name[:63]!r}; there are: {known}.")
    return subject_of(kind, names[name])


def _keys_of(own: tuple[EngineView, ...]) -> tuple[tuple[str, int], ...]:
    return tuple((DrainKind.ENGINE, one.id) for one in own)
