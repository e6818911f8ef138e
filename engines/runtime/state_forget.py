"""What an engine lets go of when a conversation has gone to another one: or both would be said to hold it."""

from __future__ import annotations

from engines.runtime.cells import common_prefix
from engines.runtime.origin import Origin
from engines.runtime.prefix import PrefixCache


def forget_moved(cache: PrefixCache, tokens: list[int], origin: Origin) -> None:
    """Empties what is held of `origin`'s session and begins as the `tokens` that moved: other slots, checkpoints, host memory.

    A beginning that the tenant's others share, its system prompt, stays; so does what is in use. Forms of the conversation that
    end otherwise (a rewritten answer) go too, unless another request of the session runs here. On the core's thread.
    """
    if not origin.session:
        return
    runs = any(slot.generation is not None and slot.generation.session == origin.session for slot in cache.slots)

    def goes(held: list[int], owner: Origin) -> bool:
        if (owner.tenant, owner.session) != (origin.tenant, origin.session) or len(held) == owner.system_cut:
            return False
        shared = common_prefix(held, tokens)
        return shared == len(held) > 0 or (not runs and shared > owner.system_cut)

    for slot in cache.slots:
        if slot.idle and goes(slot.sequence.tokens, slot.sequence.origin):
            slot.sequence.clear()
            cache.host.unlink(slot.index)
    for checkpoint in cache.checkpoints:
        if not checkpoint.leaving and goes(checkpoint.sequence.tokens, checkpoint.sequence.origin):
            checkpoint.sequence.clear()
    for place in cache.aside:
        # Then it does not get to host memory.
        if goes(place.sequence.tokens, place.sequence.origin):
            place.sequence.clear()
    for entry in cache.host:
        if goes(entry.tokens, entry.origin):
            cache.host.forget(entry)
