"""How much the next token's distribution changes where one engine goes on with KV that another computed.

A text is computed by the first engine up to some place, moves to the second by the handoff that moves conversations, and one
token more is computed there; then the second computes all of it itself. Both tell their likeliest tokens. The divergence is taken
over those of the second's own KV and the rest as one; of what only one side named, the other's share is taken as high as it can
be. So it is an estimate from below, near the truth where the likeliest tokens have nearly all of the mass.
"""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from engines.client import EngineClient
from engines.errors import EngineUnreachable, ProtocolBroken
from engines.rpc_handoff import HandoffClient
from engines.services import EngineEndpoint, EngineRpc
from engines.wire_handoff import HandoffBody
from sessions.errors import EngineRefused
from sessions.kv_losses import Measured, Pair
from sessions.probe_text import PROBE_TEXT

PLACES = 8
MIN_TOKENS, MAX_TOKENS = 48, 768
# The place that a longest prompt must leave for the token that is asked for.
ROOM_TOKENS = 8
LIKELIEST = 20
SILENCE_S = 120.0
MOVE_S = 60.0
LEAST_PROBABILITY = 1e-9
MAX_ANSWER_BYTES = 8 << 20
SESSION_HEADER, TENANT_HEADER = "X-Hydra-Session", "X-Hydra-Tenant"

Likeliest = Mapping[str, float]


async def measured(pair: Pair, prefill_rpc: EngineRpc, decode_rpc: EngineRpc, sessions: list[str]) -> Measured:
    """Names the sessions that it makes in `sessions`, for whoever clears up behind it.

    Raises an EngineError: one of the two is gone or busy, or refuses what the other sends.
    """
    probe = _Probe(pair, prefill_rpc, decode_rpc, sessions)
    tokens = await probe.tokens()
    found = [await probe.at(tokens, place) for place in places(len(tokens))]
    divergences = [divergence(own, over) for own, over in found]
    return Measured(
        kl_mean=sum(divergences) / len(divergences),
        kl_max=max(divergences),
        places=len(found),
        same_top=sum(likeliest(own) == likeliest(over) for own, over in found),
        probe_tokens=len(tokens),
    )


def places(count: int) -> list[int]:
    """Positions of a text of `count` tokens, evenly up to its end."""
    if count < MIN_TOKENS:
        raise ProtocolBroken(f"The probe text has {count} tokens here, too few to tell anything.")
    return sorted({MIN_TOKENS + (count - 1 - MIN_TOKENS) * step // (PLACES - 1) for step in range(PLACES)})


def divergence(own: Likeliest, over: Likeliest) -> float:
    """KL(own ‖ over) in nats, of tokens with their log probabilities: over those that `own` names, all others as one."""
    unnamed = own.keys() - over.keys()
    left = max(0.0, 1.0 - sum(math.exp(logprob) for logprob in over.values()))
    highest = min(math.exp(min(over.values())), left / (len(unnamed) + 1))
    pairs = [(math.exp(own[token]), math.exp(over[token]) if token in over else highest) for token in own]
    pairs.append((1.0 - sum(p for p, _ in pairs), 1.0 - sum(q for _, q in pairs)))
    return max(0.0, sum(p * math.log(p / max(q, LEAST_PROBABILITY)) for p, q in pairs if p > LEAST_PROBABILITY))


def likeliest(tokens: Likeliest) -> str:
    return max(tokens, key=lambda token: tokens[token])


class _Probe:
    """One measurement. Its tenant is nobody's, so that neither finds what others have computed."""

    def __init__(self, pair: Pair, prefill_rpc: EngineRpc, decode_rpc: EngineRpc, sessions: list[str]) -> None:
        self._pair, self._prefill_rpc, self._decode_rpc = pair, prefill_rpc, decode_rpc
        self._sessions, self._tenant = sessions, uuid.uuid4().hex

    async def tokens(self) -> list[int]:
        values = await self._ask(self._pair.decode, "/tokenize", {"content": PROBE_TEXT, "add_special": True})
        room = (
            min(MAX_TOKENS + ROOM_TOKENS, self._pair.prefill.context_tokens, self._pair.decode.context_tokens)
            - ROOM_TOKENS
        )
        return [int(token) for token in values["tokens"]][:room]

    async def at(self, tokens: Sequence[int], place: int) -> tuple[Likeliest, Likeliest]:
        """What the second engine expects behind `place` + 1 tokens: over its own KV, and over the first one's."""
        prefill, decode = self._pair.prefill, self._pair.decode
        # As long as all sessions of the site, so that its sweep knows what is left over of it.
        session = uuid.uuid4().hex * 2
        self._sessions.append(session)
        await self._complete(prefill, tokens[:place], session)
        # A number of its own: no other move knows this session.
        body = HandoffBody(
            handoff=f"probe-{session}",
            fence=time.time_ns() // 1000,
            session=session,
            target_host=self._decode_rpc.address,
            target_port=self._decode_rpc.port,
            target_secret=self._decode_rpc.secret,
            deadline_s=MOVE_S,
        )
        source = self._prefill_rpc
        async with HandoffClient(source.address, source.port, secret=source.secret, name="site") as client:
            await client.handoff(body)
        over = await self._complete(decode, tokens[: place + 1], session)
        if over["usage"]["prompt_tokens_details"]["cached_tokens"] < place:
            raise ProtocolBroken(f"The engine {decode.name} did not go on with what it was given.")
        await self._forget(decode, session)
        own = await self._complete(decode, tokens[: place + 1], session, cache_prompt=False)
        await self._forget(decode, session)
        return _likeliest_of(own), _likeliest_of(over)

    async def _complete(
        self, endpoint: EngineEndpoint, prompt: Sequence[int], session: str, **fields: Any
    ) -> dict[str, Any]:
        body = {"prompt": list(prompt), "max_tokens": 1, "temperature": 0, "logprobs": LIKELIEST, **fields}
        return await self._ask(endpoint, "/v1/completions", body, session)

    async def _forget(self, endpoint: EngineEndpoint, session: str) -> None:
        await self._ask(endpoint, "/sessions/forget", {"session": session})

    async def _ask(
        self, endpoint: EngineEndpoint, path: str, body: dict[str, Any], session: str = ""
    ) -> dict[str, Any]:
        headers = {TENANT_HEADER: self._tenant, **({SESSION_HEADER: session} if session else {})}
        response = await EngineClient(endpoint.base_url, endpoint.secret).call(
            "POST",
            path,
            json.dumps(body).encode(),
            request_id=str(uuid.uuid4()),
            silence_s=SILENCE_S,
            headers=headers,
        )
        try:
            raw = await response.content.readexactly(min(response.content_length or 0, MAX_ANSWER_BYTES))
        except (aiohttp.ClientError, TimeoutError, OSError, EOFError) as error:
            raise EngineUnreachable(f"The engine {endpoint.name} went away before it had answered.") from error
        finally:
            response.release()
        if response.status != 200:
            raise EngineRefused.of(response.status, raw, response.headers.get("Retry-After"))
        values: dict[str, Any] = json.loads(raw)
        return values


def _likeliest_of(answer: dict[str, Any]) -> Likeliest:
    told = answer["choices"][0]["logprobs"]["top_logprobs"]
    if not told or not told[0]:
        raise ProtocolBroken("The engine told no probabilities.")
    return {str(token): float(logprob) for token, logprob in told[0].items()}
