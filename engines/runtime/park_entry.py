"""A prompt's beginning out of a store: looked for before the core sees the request, taken in when the core gives it a slot.

For the event loop. Both are bounded in time, and both may fail without harm: the prompt is then computed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Generator, Sequence
from functools import partial

from engines.config import EngineConfig
from engines.errors import (
    EngineError,
    EngineStopping,
    EngineUnreachable,
    NotAuthenticated,
    ProtocolBroken,
    StateError,
    StoreAway,
)
from engines.runtime.cells import common_prefix
from engines.runtime.core import EngineCore
from engines.runtime.generation import Generation
from engines.runtime.host_cache import MIN_TOKENS
from engines.runtime.landing import Incoming
from engines.runtime.park_keeping import Keeping
from engines.runtime.park_metrics import ParkMetrics
from engines.runtime.park_rates import WORTH, ParkRates, prefill_s
from engines.runtime.prefix import PrefixCache
from engines.runtime.state_import import received
from engines.runtime.state_terms import SharingTerms
from engines.runtime.state_transfer import Arrival
from engines.runtime.store_find import FoundPrefix, PlacePieces, PrefixFinder
from engines.runtime.store_keys import KeyChain
from engines.runtime.store_link import StoreLink
from engines.store.client import StoreClient

log = logging.getLogger("hydra.engine.park")

# A transfer takes this many times what it should before it is given up, and no longer than the bound.
PATIENCE, MAX_RESTORE_S = 4.0, 60.0
CLOSE_S = 2.0
# Look-ups at once; who comes on top goes on without.
MAX_LOOKUPS = 32


class PullBroken(StateError):
    """Never seen by a client: another host's store went away while it sent."""

    code = "pull_broken"


class StoreEntry:
    """One engine's way in. Made once its terms are known."""

    def __init__(
        self,
        config: EngineConfig,
        core: EngineCore,
        terms: SharingTerms,
        link: StoreLink,
        rates: ParkRates,
        metrics: ParkMetrics,
        keeping: Keeping,
    ) -> None:
        self._config = config
        self._core = core
        self._terms = terms
        self._link = link
        self._rates = rates
        self._metrics = metrics
        self._keeping = keeping
        self._finder = PrefixFinder(terms)
        self._loop = asyncio.get_running_loop()
        self._looking = 0
        self._entering: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Waits for what is under way, which the end of the core ends."""
        if self._entering:
            await asyncio.wait(self._entering, timeout=CLOSE_S)

    # --- looking --------------------------------------------------------------------------------

    async def look_up(self, generations: Sequence[Generation], stores: Sequence[tuple[str, int]]) -> None:
        """Gives each generation what the store has of its prompt, if that pays. Raises nothing. Of several prompts those go
        without whose turn comes after a whole wait for a slow store."""
        looked: Generation | None = None
        until = time.monotonic() + self._config.store_wait_s
        for generation in generations:
            if not generation.reuse_prefix or generation.spans or len(generation.prompt) <= MIN_TOKENS:
                continue
            if looked is not None and looked.prompt == generation.prompt:
                generation.incoming = looked.incoming  # several choices of one prompt
                continue
            looked = generation
            if not self._link.may_ask or self._looking >= MAX_LOOKUPS or time.monotonic() > until:
                self._metrics.lookups.labels("away").inc()
                continue
            self._looking += 1
            try:
                self._metrics.lookups.labels(await self._look(generation, stores)).inc()
            except StoreAway:
                self._metrics.lookups.labels("away").inc()
            except (EngineError, OSError) as error:
                self._metrics.lookups.labels("miss").inc()
                self._metrics.failed("lookup", error)
                log.warning("looking for a prompt in the store failed: %s", error)
            finally:
                self._looking -= 1

    async def _look(self, generation: Generation, stores: Sequence[tuple[str, int]]) -> str:
        local = self._at_hand(generation)
        if local >= len(generation.prompt) - MIN_TOKENS:
            return "local"
        chain = await self._terms.dock.in_thread(
            KeyChain, self._terms.fingerprint, generation.tenant, self._terms.block_tokens, generation.prompt
        )
        found = await self._find(chain, generation)
        place = "host"
        if stores and (found is None or found.tokens < len(generation.prompt) - self._terms.block_tokens):
            better = await self._from_elsewhere(chain, generation, stores, found.tokens if found else 0)
            found, place = (better, "elsewhere") if better else (found, place)
        if found is None or found.tokens <= local:
            return "miss"
        if not self._pays(found.size_bytes, found.tokens, local):
            return "slower"
        pays = partial(self._pays, found.size_bytes, found.tokens)
        generation.incoming = Incoming(found.tokens, pays, partial(self._begin, found, place))
        return "hit"

    def _pays(self, size_bytes: int, tokens: int, local_tokens: int) -> bool:
        """Whether to restore so much is faster than to compute what of it is not at hand. On any thread."""
        saved_s = prefill_s(self._core.rates.prefill, tokens, local_tokens)
        return self._rates.restore_s(size_bytes) < WORTH * saved_s

    async def _find(self, chain: KeyChain, generation: Generation) -> FoundPrefix | None:
        async with self._link.client(self._config.store_wait_s) as client:
            return await self._finder.find(client, chain, generation.prompt, generation.origin)

    def _at_hand(self, generation: Generation) -> int:
        """Tokens that the engine most likely has itself: a look from outside, of which the core will know better."""
        cache, prompt, best = self._core.cache, generation.prompt, 0
        for sequence in (lender.sequence for lender in cache.lenders):
            if sequence.origin.tenant == generation.tenant:
                length, held = common_prefix(sequence.tokens, prompt), len(sequence)
                best = max(best, length if cache.cuts_anywhere or length == held else 0)
        return best

    # --- other hosts ----------------------------------------------------------------------------

    async def _from_elsewhere(
        self, chain: KeyChain, generation: Generation, stores: Sequence[tuple[str, int]], least: int
    ) -> FoundPrefix | None:
        """A longer prefix from another host's store, by way of this host's; None where none has one that pays."""
        for host, port in stores:
            try:
                async with self._link.remote(host, port) as remote:
                    if await self._pulled(remote, chain, generation, least):
                        return await self._find(chain, generation)
            except StoreAway:
                raise
            except (EngineError, OSError, TimeoutError) as error:
                self._metrics.failed("pull", error)
                log.warning("nothing could be fetched from the store at %s:%d: %s", host, port, error)
        return None

    async def _pulled(self, remote: StoreClient, chain: KeyChain, generation: Generation, least: int) -> bool:
        prompt = generation.prompt
        async with asyncio.timeout(self._config.store_wait_s):
            blocks = await self._finder.blocks(remote, chain, prompt)
            name = await self._finder.name(remote, chain, prompt, blocks, generation.system_cut)
            sure = max(least, blocks * chain.block_tokens, name.tokens if name is not None else 0)
            session = generation.origin.session
            # What was dropped from the last answer, or reads otherwise now, parts the prompt from it in the middle of a piece.
            name = await self._finder.name_of_session(remote, chain, prompt, session, sure) or name
            manifest = await remote.get_manifest(name.text) if name is not None else None
        if name is None or manifest is None or name.tokens <= least:
            return False
        address = f"{remote.host}:{remote.port}"
        expected_s = self._rates.pull_s(address, manifest.total_size) + self._rates.restore_s(manifest.total_size)
        saved_s = prefill_s(self._core.rates.prefill, min(name.tokens, len(prompt) - 1), least)
        if expected_s > WORTH * saved_s:
            return False
        limit_s = min(max(self._config.store_wait_s, saved_s), MAX_RESTORE_S)
        async with asyncio.timeout(limit_s), self._link.client() as client:
            try:
                travelled = partial(self._rates.pulled, address)
                return (await client.pull(remote, name.text, travelled=travelled)).written
            except (EngineUnreachable, ProtocolBroken, NotAuthenticated) as error:
                # Of two stores one fell away: only where this host's does not answer either, it is that one.
                await client.store_info()
                raise PullBroken(f"{remote.host}:{remote.port} broke off: {error}") from error

    # --- entering -------------------------------------------------------------------------------

    def _begin(self, found: FoundPrefix, place: str, generation: Generation, arrival: Arrival) -> None:
        """On the core's thread, which has taken a slot for it."""
        self._loop.call_soon_threadsafe(self._enter_soon, found, place, generation, arrival)

    def _enter_soon(self, found: FoundPrefix, place: str, generation: Generation, arrival: Arrival) -> None:
        entering = asyncio.ensure_future(self._enter(found, place, generation, arrival))
        self._entering.add(entering)
        entering.add_done_callback(self._entering.discard)

    async def _enter(self, found: FoundPrefix, place: str, generation: Generation, arrival: Arrival) -> None:
        """Ends with the generation back in the line, whatever happened."""
        began_at = time.monotonic()
        limit_s = min(max(self._config.store_wait_s, PATIENCE * self._rates.restore_s(found.size_bytes)), MAX_RESTORE_S)
        landed = stopping = False
        try:
            async with asyncio.timeout(limit_s):
                await self._take_in(found, arrival)
            await self._terms.dock.perform(partial(self._finish, generation, arrival))
            landed = True
        except EngineStopping:
            stopping = True  # the core's end has ended the generation too
        except (EngineError, OSError, TimeoutError, ValueError) as error:
            self._metrics.failed("restore", error)
            log.warning("%d tokens did not come back from the store: %s", found.tokens, error or type(error).__name__)
        finally:
            if not landed and not stopping:
                await self._give_up(generation, arrival)
            generation.restore_s = time.monotonic() - began_at
        if landed:
            self._note(found, place, generation, time.monotonic() - began_at)

    async def _take_in(self, found: FoundPrefix, arrival: Arrival) -> None:
        async with self._link.client() as client, client.held(hashes=found.hashes) as held:
            if held.missing:
                raise StateError("The store has given up a part of it.")
            await received(self._terms.dock, arrival, found.pieces, PlacePieces(client, held, found, self._terms.dock))

    def _finish(self, generation: Generation, arrival: Arrival, _cache: PrefixCache) -> Generator[None, None, None]:
        yield from arrival.finish(self._terms.dock.codec)
        arrival.slot.sequence.origin = generation.origin
        self._core.landing.landed(generation)

    async def _give_up(self, generation: Generation, arrival: Arrival) -> None:
        def abort(_cache: PrefixCache) -> Generator[None, None, None]:
            try:
                yield from arrival.abort(self._terms.dock.codec)
            finally:
                self._core.landing.landed(generation)

        try:
            await self._terms.dock.perform(abort)
        except EngineError as error:
            log.warning("a slot could not be emptied after a failed restore: %s", error)

    def _note(self, found: FoundPrefix, place: str, generation: Generation, seconds: float) -> None:
        self._rates.restored(found.size_bytes, seconds)
        log.info("%d tokens came from the store in %.0f ms, %d bytes", found.tokens, 1e3 * seconds, found.size_bytes)
        self._metrics.resumed.labels(place).inc()
        self._metrics.resumed_tokens.inc(found.tokens)
        self._metrics.bytes.labels("restored").inc(found.size_bytes)
        if found.name is not None and found.manifest is not None and found.tokens == generation.system_cut:
            pinning = asyncio.ensure_future(self._keeping.used(found.name, found.manifest))
            self._entering.add(pinning)
            pinning.add_done_callback(self._entering.discard)
