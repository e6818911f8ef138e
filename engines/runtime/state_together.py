"""The choices of one request move together: they stop in one step, are tried, go on and end together.

Where one of them cannot, none does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any

from engines.errors import EngineStopping, SessionNotHeld, StateError
from engines.runtime.generation import Generation
from engines.runtime.prefix import PrefixCache
from engines.runtime.state_adopt import Adopting
from engines.runtime.state_follow import Leaving
from engines.runtime.state_rehearsal import calls_of, can_rehearse, rehearsed, tokens_until_tried
from engines.runtime.state_snapshot import Manifest, ended_choices


async def stop_together(leavings: Sequence[Leaving]) -> dict[Leaving, Manifest]:
    """Takes the choices of one request out of their slots between two steps; those that have ended meanwhile are not in what is
    returned. What `rest` gives is all that is still missing then.

    Raises SlotBusy while a prompt is being computed or one of them waits, StateError for what cannot travel, and then none is
    stopped; SessionNotHeld when all have ended.
    """
    dock = leavings[0].terms.dock

    def stopped(cache: PrefixCache) -> Generator[None, None, dict[Leaving, Manifest]]:
        running = [one for one in leavings if one.generation.outcome is None]
        try:
            manifests = {}
            for one in running:
                manifests[one] = yield from one.stopped(cache)
            return _as_group(manifests)
        except BaseException:
            for one in running:
                yield from one.resumed(cache)
            raise

    def back(stopped: dict[Leaving, Manifest]) -> Callable[[PrefixCache], Generator[None, None, None]]:
        def work(cache: PrefixCache) -> Generator[None, None, None]:
            for one in stopped:
                yield from one.resumed(cache)

        return work

    manifests: dict[Leaving, Manifest] = await dock.take(stopped, back)
    for one, manifest in manifests.items():
        one.watched(manifest)
    return manifests


def _as_group(manifests: dict[Leaving, Manifest]) -> dict[Leaving, Manifest]:
    """Each says which choices go on together, the first also what became of the others."""
    if not manifests:
        raise SessionNotHeld("The request ended before it could move.")
    choices = tuple(one.generation.choice for one in manifests)
    ended = ended_choices(next(iter(manifests)).generation.siblings)
    grouped: dict[Leaving, Manifest] = {}
    for one, manifest in manifests.items():
        assert manifest.generation is not None
        state = replace(manifest.generation, moves_with=choices, ended=() if grouped else ended)
        grouped[one] = replace(manifest, generation=state)
    return grouped


class LastWord:
    """Awaited before the last piece leaves: the answer's reader has all that was made here, and no stop that is `held` ends by
    itself any more."""

    def __init__(self, telling: asyncio.Future[None], held: Sequence[Leaving]) -> None:
        self._telling, self._held = telling, held

    def __await__(self) -> Generator[Any, None, None]:
        yield from self._telling.__await__()
        for leaving in self._held:
            leaving.hold()


async def commit_together(leavings: Sequence[Leaving], fence: int) -> None:
    """The other engine has all of them: they end here as moved, and their slots are free; also where this engine ends meanwhile.
    Raises StateError when one goes on here already, or for another's fence; then none ends."""
    for one in leavings:
        if one.fence != fence:
            raise StateError(f"The move was granted as number {one.fence}, not {fence}.")

    def ended(cache: PrefixCache) -> Generator[None, None, None]:
        for one in leavings:
            one.require_stopped()
        for one in leavings:
            yield from one.ended(cache)

    for one in leavings:
        if one.is_there:
            one.tell_moved()
    try:
        await leavings[0].terms.dock.perform(ended)
    except EngineStopping as error:
        for one in leavings:
            one.end_with_engine(error)
    for one in leavings:
        one.unwatch()


async def rehearse_together(arriving: Sequence[Adopting], rows: int) -> int:
    """The slots that generations will go on in together compute what their first step there will be like (state_rehearsal.py): of
    `rows` rows each, or as many as there may be here. Returns how many tokens more of all of them must come before that is to be
    asked for again; 0: not. Raises what went wrong with a piece, and StateError when a slot could not be left as it was."""
    for adopting in arriving:
        await adopting.settled()
    first = arriving[0]
    core, codec = first.core, first.terms.dock.codec

    def work(cache: PrefixCache) -> Generator[None, None, int]:
        yield from ()
        for adopting in arriving:
            adopting.require_open()
        slots = [adopting.arrival.slot for adopting in arriving]
        each = min(max(rows, 1), 1 + core.config.longest_draft)
        if can_rehearse(cache, core.loaded, slots) and (later := tokens_until_tried(cache, each * len(slots))):
            return later
        calls = calls_of(core.loaded, on_card=core.config.gpu_layers != 0)
        rehearsed(cache, codec, core.loaded, slots, first.tokens[-1] if first.tokens else 0, each, calls)
        return 0

    return await first.terms.dock.perform(work)


async def begin_together(arrived: Sequence[Adopting], going: Sequence[Generation]) -> None:
    """Generations go on in the slots that have their states, all in one slice: nobody who waits can come in between. Where that
    fails none does. Raises StateInvalid when not everything came in."""
    for adopting in arrived:
        await adopting.require_all()
    first = arrived[0]

    def work(cache: PrefixCache) -> Generator[None, None, None]:
        yield from ()
        for adopting in arrived:
            adopting.require_whole()
        for adopting, generation in zip(arrived, going, strict=True):
            adopting.arrival.slot.sequence.origin = generation.origin
            yield from adopting.take_over(cache)
        for count, (adopting, generation) in enumerate(zip(arrived, going, strict=True), 1):
            try:
                adopting.core.begin_moved(adopting.arrival.slot, generation)
            except BaseException:
                # What stands in a slot ends there; only of others the samplers are anybody else's to close.
                for begun in going[:count]:
                    first.core.cancel(begun)
                raise

    def ended(_: None) -> Callable[[PrefixCache], Generator[None, None, None]]:
        for generation in going:
            first.core.cancel(generation)
        return _at_once

    await first.terms.dock.take(work, ended)


def _at_once(_cache: PrefixCache) -> Generator[None, None, None]:
    yield from ()
