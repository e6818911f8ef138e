"""Which engine answers: what the router is told, and what its answer means for a request.

`pools.router` decides, as a pure function. Here its views are filled in: the engines that serve, their rates and the sessions
they hold (`rates_board`), what this process has seen (`prefix_hints`, `estimates`, `session_places`), and, for a conversation
that no engine is known to hold, one question to the database.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engines.arrival_order import ArrivalOrder
from engines.errors import EngineError, NoEngineReady
from engines.services import EngineEndpoint
from pools.router import Routed, route
from pools.router_plan import Reason
from pools.router_views import Mode, RequestView, RunMode, SnapshotView
from sessions.engine_call import EngineCall
from sessions.errors import PoolBusy
from sessions.estimates import Estimates
from sessions.identity import Identity
from sessions.known_engines import ReadyEngines
from sessions.move_speeds import MoveSpeeds
from sessions.pool_watch import PoolWatch
from sessions.prefix_hints import PrefixHints
from sessions.rates_board import RatesBoard
from sessions.services import SessionPlace
from sessions.session_places import SessionPlaces
from sessions.split_terms import KvLosses, is_movable, run_mode

# What an engine gives a request by itself; waiting, failing over and answering share it.
REQUEST_BUDGET_S = 1800.0
# An engine is left out for want of room only where a guess is that much too long; else it judges itself.
SURE_SHARE = 0.7
# Engines whose line a request may join, beside its slots, where an engine has not told its bound.
USUAL_QUEUE_LIMIT = 64

_NO_SPLIT = frozenset(
    {
        Reason.GROUP,
        Reason.STREAMS,
        Reason.LINK,
        Reason.PEER,
        Reason.SLOT,
        Reason.FIXED,
        Reason.UNMEASURED,
        Reason.LOSSY,
    }
)
# What may keep a request from the form that an operator asked for, and has nothing to do with its length.
_FORMS = _NO_SPLIT | {Reason.FORCED, Reason.MODE}


@dataclass(frozen=True)
class Wishes:
    """What an operator, or a client's own header, asks of the way a request goes. All of it may take `budget_s`. With
    `ends_session` nobody will go on with its conversation."""

    engine_name: str = ""
    mode: Mode | None = None
    background: bool = False
    budget_s: float = REQUEST_BUDGET_S
    run_mode: RunMode | None = None
    ends_session: bool = False


NO_WISHES = Wishes()


@dataclass(frozen=True)
class Dispatched:
    """Where a request goes. `ranked` are all engines that can take it, the chosen one first, and `limits` how many each may have.

    `session` is "" for a request that is kept off conversations. `stores` are addresses of other hosts' stores that the engine
    may read the conversation from. `decode` is the engine that takes the request over once its prompt is computed, of
    `decode_limit` requests at most; None where one engine does all of it. `seen_wanted_engine_id` is the engine that a person
    wanted the conversation on, whatever came of that.
    """

    endpoint: EngineEndpoint
    ranked: tuple[EngineEndpoint, ...]
    limits: tuple[int, ...]
    routed: Routed
    session: str
    missing_tokens: int
    stores: tuple[str, ...] = ()
    decode: EngineEndpoint | None = None
    decode_limit: int = 0
    seen_wanted_engine_id: int | None = None

    @property
    def mode(self) -> Mode:
        if self.routed.plan is None or (self.routed.plan.mode == "pd" and self.decode is None):
            return "solo"
        return self.routed.plan.mode

    @property
    def kv_loss(self) -> float | None:
        """KL divergence (nats) that was measured for the two quants of an answer over two engines; None where they are one."""
        return self.routed.plan.kv_loss if self.routed.plan is not None else None

    def on(self, engine_id: int) -> Dispatched:
        """The same with another of the ranked engines chosen."""
        if engine_id == self.endpoint.engine_id:
            return self
        chosen = next(endpoint for endpoint in self.ranked if endpoint.engine_id == engine_id)
        return replace(self, endpoint=chosen, decode=None)


class Dispatcher:
    """Used on one event loop only. What it remembers are hints; losing them costs a question or a worse guess."""

    def __init__(self) -> None:
        self.ready = ReadyEngines()
        self.board = RatesBoard()
        self.hints = PrefixHints()
        self.estimates = Estimates()
        self.places = SessionPlaces()
        self.order = ArrivalOrder()
        self.kv_losses = KvLosses()
        self.move_speeds = MoveSpeeds()
        self.watch = PoolWatch(self._look)

    async def _look(self, model_name: str | None) -> None:
        await self.board.look(await self.ready.refresh(model_name))

    async def choose(
        self,
        call: EngineCall,
        identity: Identity,
        wishes: Wishes = NO_WISHES,
        without: Sequence[EngineEndpoint] = (),
        wanted_engine_id: int | None = None,
    ) -> Dispatched:
        """The engine for a request; `without` those that have failed it already. `wanted_engine_id` is where a person wants it,
        as far as the caller knows.

        Raises ModelNotFound, NoEngineReady, and PoolBusy when all waiting lines are full.
        """
        endpoints = [endpoint for endpoint in await self.ready.of(call.model) if endpoint not in without]
        if not endpoints:
            raise NoEngineReady("No other engine serves the model right now.")
        await self.board.look(endpoints)
        self.watch.used(call.model)
        is_background = wishes.background or call.hints.background
        session = identity.key_hash if call.is_conversation and not is_background else ""
        request, held, place = await self._request(call, identity, session, endpoints)
        if wanted_engine_id is not None:
            place = replace(place, wanted_engine_id=wanted_engine_id)
        request = replace(request, force_engine=_wanted_of(place, endpoints))
        request = replace(request, background=is_background, **self._forced(wishes, endpoints))
        if without:
            # What has failed once is not shared again, whoever asked for that.
            request = replace(
                request, movable=False, force_mode=None if request.force_mode == "pd" else request.force_mode
            )
        prefixes = self.hints.tokens(identity.owner.scope, call.hints.chain)
        losses = await self.kv_losses.among(endpoints)
        speeds = await self.move_speeds.lately() if len({one.host_name for one in endpoints}) > 1 else {}
        pool = self.board.view(
            endpoints,
            held=held,
            session=session,
            prefixes=prefixes,
            snapshots=place.snapshots,
            kv_losses=losses,
            move_speeds=speeds,
        )
        routed = route(request, pool)
        if routed.plan is None and request.force_engine is not None and not wishes.engine_name:
            # Where a person moved the session to cannot take it now.
            request = replace(request, force_engine=None)
            routed = route(request, pool)
        sent = self._dispatched(routed, request, endpoints, session, place.snapshots, wishes)
        return replace(sent, seen_wanted_engine_id=place.wanted_engine_id)

    async def _request(
        self, call: EngineCall, identity: Identity, session: str, endpoints: Sequence[EngineEndpoint]
    ) -> tuple[RequestView, dict[int, int], SessionPlace]:
        """The request as the router takes it, what this process knows its engine to hold, and what the rows say of it."""
        hints, model = call.hints, endpoints[0].model_name
        prompt_tokens, sure_tokens = self._prompt_tokens(identity.owner.scope, call, model)
        request = RequestView(
            model,
            prompt_tokens,
            self.estimates.output_tokens(model, hints.most_output_tokens),
            hints.most_output_tokens or 0,
            sure_tokens,
            session=session,
            prefix_keys=("chain",),
            needs=hints.needs,
            run_mode=run_mode(endpoints),
            movable=is_movable(call, session),
            whole_rows=hints.whole_rows,
        )
        if not session:
            return request, {}, SessionPlace()
        recent = self.places.recent(session)
        if recent is not None and any(endpoint.engine_id == recent.engine_id for endpoint in endpoints):
            endpoint = next(endpoint for endpoint in endpoints if endpoint.engine_id == recent.engine_id)
            held = self.board.holds(endpoint, session, since_s=recent.used_s)
            # One that was pushed out meanwhile stands in a store, as the rows tell; where its engine has no place for it, others
            # may read it there.
            if held != 0:
                tokens = {recent.engine_id: recent.tokens if held is None else held}
                # Where it is wanted, its lease will tell.
                roomy = self.board.has_room(endpoint)
                place = SessionPlace() if roomy else await self.places.look_up(session)
                return replace(request, home=recent.engine_id), tokens, place
        told = {endpoint.engine_id: self.board.holds(endpoint, session) for endpoint in endpoints}
        warm = [(tokens, engine_id) for engine_id, tokens in told.items() if tokens]
        if len(hints.chain) <= 1 and not warm:
            return request, {}, SessionPlace()
        place = await self.places.look_up(session)
        home = max(warm)[1] if warm else place.engine_id
        return replace(request, home=home), {}, place

    def _prompt_tokens(self, scope: str, call: EngineCall, model: str) -> tuple[int, int]:
        """From the longest beginning whose tokens an answer has told, and a guess for the rest; and how many it has at least."""
        known_tokens, known_bytes = self.hints.longest(scope, call.hints.chain)
        rest = self.estimates.prompt_tokens(model, call.hints.prompt_bytes - known_bytes)
        return known_tokens + rest, max(1, int(SURE_SHARE * (known_tokens + rest)))

    def _forced(self, wishes: Wishes, endpoints: Sequence[EngineEndpoint]) -> dict[str, object]:
        forced: dict[str, object] = {}
        if wishes.engine_name:
            named = next((one.engine_id for one in endpoints if one.name == wishes.engine_name), None)
            if named is None:
                raise NoEngineReady(f"No engine {wishes.engine_name[:63]!r} serves this model right now.")
            forced["force_engine"] = named
        if wishes.mode is not None:
            forced["force_mode"] = wishes.mode
        if wishes.run_mode is not None:
            forced["run_mode"] = wishes.run_mode
        return forced

    def _dispatched(
        self,
        routed: Routed,
        request: RequestView,
        endpoints: Sequence[EngineEndpoint],
        session: str,
        snapshots: Sequence[SnapshotView],
        wishes: Wishes,
    ) -> Dispatched:
        by_id = {endpoint.engine_id: endpoint for endpoint in endpoints}
        if routed.plan is None:
            self._refuse(routed, request, wishes)
            # The guess at the prompt's length may be wrong: the engine with the most room judges, and says why.
            endpoint = max(endpoints, key=lambda one: (one.context_tokens, one.engine_id == request.home))
            return Dispatched(endpoint, (endpoint,), (self._limit(endpoint),), routed, session, request.prompt_tokens)
        splits = routed.plan.mode == "pd"
        chosen = by_id[routed.plan.prefill_engine_id if splits else routed.plan.engine_id]
        decode = by_id[routed.plan.engine_id] if splits else None
        ranked = [chosen]
        for candidate in routed.explanation.candidates:
            endpoint = by_id[candidate.engine_id]
            if candidate.mode == "solo" and endpoint not in ranked and request.force_engine is None:
                ranked.append(endpoint)
        return Dispatched(
            chosen,
            tuple(ranked),
            tuple(self._limit(endpoint) for endpoint in ranked),
            routed,
            session,
            max(1, request.prompt_tokens - routed.plan.cached_tokens),
            _stores(chosen, routed, snapshots),
            decode,
            0 if decode is None else self._limit(decode),
        )

    def _refuse(self, routed: Routed, request: RequestView, wishes: Wishes) -> None:
        """Raises where no engine can take the request whatever its real length."""
        reasons = {refusal.reason for refusal in routed.explanation.refusals}
        if reasons and reasons <= {Reason.QUEUE, *_FORMS}:
            why = "; ".join(sorted({reason.value for reason in reasons & _NO_SPLIT}))
            error: EngineError = (
                self.busy(request.model)
                if Reason.QUEUE in reasons
                else NoEngineReady(
                    f"No engine can answer in the form that was asked for{': ' if why else ''}{why}.",
                    hint="Leave the form open.",
                )
            )
            error.explanation = routed.explanation.to_dict()
            raise error

    def busy(self, model: str) -> PoolBusy:
        """All lines are full: until the first place is free."""
        error = PoolBusy(f"All engines of {model} have as many requests as they may.")
        error.retry_after_s = self.board.next_place_s(model)
        return error

    def _limit(self, endpoint: EngineEndpoint) -> int:
        return self.board.limit(endpoint, USUAL_QUEUE_LIMIT)

    def learn(
        self, identity: Identity, call: EngineCall, sent: Dispatched, prompt_tokens: int, completion_tokens: int
    ) -> None:
        """An answer ended and told its tokens; 0 where it did not."""
        if not prompt_tokens:
            return
        engine_id = sent.endpoint.engine_id
        self.estimates.learn(sent.endpoint.model_name, call.hints.prompt_bytes, prompt_tokens, completion_tokens)
        self.hints.note(identity.owner.scope, call.hints.chain, engine_id, prompt_tokens)
        self.places.note(sent.session, engine_id, prompt_tokens + completion_tokens)

    def lost(self, endpoint: EngineEndpoint) -> None:
        """The engine does not answer: nothing that it held counts any more."""
        self.ready.forget(endpoint)
        self.board.forget(endpoint)
        self.hints.forget(endpoint.engine_id)


def _wanted_of(place: SessionPlace, endpoints: Sequence[EngineEndpoint]) -> int | None:
    """The engine that a person wants the conversation on, where it is one of these."""
    wanted = place.wanted_engine_id
    return wanted if any(endpoint.engine_id == wanted for endpoint in endpoints) else None


def _stores(chosen: EngineEndpoint, routed: Routed, snapshots: Sequence[SnapshotView]) -> tuple[str, ...]:
    """Other hosts' stores that hold the conversation, the one that the plan counts on first."""
    planned = routed.plan.resume_from if routed.plan is not None else ""
    found = [planned] if planned else []
    found += [snapshot.address for snapshot in snapshots if snapshot.host != chosen.host_name]
    own = {snapshot.address for snapshot in snapshots if snapshot.host == chosen.host_name}
    return tuple(address for address in dict.fromkeys(found) if address and address not in own)
