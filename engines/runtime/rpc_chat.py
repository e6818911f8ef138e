"""PREFILL and DECODE: chats over the binary protocol, prepared and formatted by the very code that HTTP uses."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace

from engines.api_body import validated
from engines.api_schema import ChatRequest, parse_json_object
from engines.config import EngineConfig
from engines.errors import InvalidRequest, NoCellsFree, UnsupportedParameter
from engines.rpc_exchange import Exchange
from engines.rpc_serving import Service
from engines.runtime.answers import ChatAnswer
from engines.runtime.generation import Generation, Piece, Stats
from engines.runtime.http_chat import ChatStream, prepared_chat
from engines.runtime.http_stream import PING_S, collect, in_order
from engines.runtime.prefix import PrefixCache
from engines.runtime.preparation import Preparation
from engines.runtime.request_id import plain_request_id
from engines.runtime.rpc_operations import DEFAULT_FORM, EngineOperations
from engines.runtime.sampler import SamplingParams
from engines.runtime.state_desk import StateDesk
from engines.wire import Opcode, Status
from engines.wire_json import DecodeAnswer, PrefillAnswer

# What the core's own deadline needs to be told.
DEADLINE_MARGIN_S = 5.0
NOTHING_COMPUTED = Stats(0, 0, 0, 0.0, 0.0, 0.0)
PING_FRAME = b'{"object":"hydra.ping"}'


class PrefillRequest(ChatRequest):
    """A chat of which only the prompt is computed. `return_state` asks for the state as the answer's payload."""

    return_state: bool = False
    state_form: str = DEFAULT_FORM
    hydra_config: object = None

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if self.hydra_config is not None:
            raise UnsupportedParameter(
                "A request cannot change the engine's model or context.",
                param="hydra_config",
                hint="Start an engine with that configuration, or send what can change at once to CONFIGURE.",
            )
        if self.n not in (None, 1):
            raise UnsupportedParameter("A prompt is computed once; leave n out.", param="n")


class ChatOperations:
    def __init__(
        self, config: EngineConfig, preparation: Preparation, desk: StateDesk, operations: EngineOperations
    ) -> None:
        self._config = config
        self._preparation = preparation
        self._desk = desk
        self._operations = operations

    def services(self) -> dict[int, Service]:
        largest, deadline_s = self._config.max_body_bytes, self._config.request_deadline_s + DEADLINE_MARGIN_S
        return {
            # A state may be behind the answer, so this ends by the prompt's own deadline and the peer's stalls.
            Opcode.PREFILL: Service(self.prefill, largest, None),
            Opcode.DECODE: Service(self.decode, largest, deadline_s),
        }

    # --- PREFILL --------------------------------------------------------------------------------

    async def prefill(self, exchange: Exchange, body: bytes) -> None:
        identity = plain_request_id(exchange.head.trace_id)
        request, generation, prompt_tokens = await self._preparation.run_in_turn(self._prepare_prefill, body, identity)
        n_past, stats = len(generation.prompt), NOTHING_COMPUTED
        # A state without a suffix to drop cannot give its last token back, so what is there is not computed again.
        slot_id = await self._slot_of(generation.prompt) if generation.reuse_prefix else None
        if slot_id is None:
            stats = await self._compute(generation)
            slot_id = await self._slot_of(generation.prompt)
        if slot_id is None:
            raise NoCellsFree("The prompt was computed, but other requests have taken its slot since.")
        answer = PrefillAnswer(
            id_slot=slot_id,
            n_past=n_past,
            prompt_tokens=prompt_tokens,
            tokens_processed=stats.prompt_tokens - stats.cached_tokens,
            cached_tokens=n_past - (stats.prompt_tokens - stats.cached_tokens),
            prefill_ms=round(stats.prompt_s * 1000, 3),
            queue_ms=round(stats.queue_s * 1000, 3),
            state_size=0,
            logits_size=0,
            model_alias=self._config.model_name,
            model_fallback=request.model not in (None, self._config.model_name),
        )
        if request.return_state:
            await self._answer_with_state(exchange, answer, request.state_form)
        else:
            await exchange.answer(Status.OK, answer)

    async def _compute(self, generation: Generation) -> Stats:
        async with self._preparation.running([generation]):
            pieces = await collect([generation])
        stats = pieces[generation.choice][-1].stats
        assert stats is not None  # of every last piece
        return stats

    def _prepare_prefill(self, body: bytes, identity: str) -> tuple[PrefillRequest, Generation, int]:
        """All of the prompt but its last token: that one is left to decode, for a state carries no logits."""
        request = validated(PrefillRequest, parse_json_object(body))
        request.refuse_unsupported()
        rendered = self._preparation.chat_prompt(request)
        (whole,) = self._preparation.generations(
            request, [rendered.tokens], identity, cuts=rendered.cuts, param="messages"
        )
        prompt = whole.prompt[:-1]
        if not prompt:
            raise InvalidRequest("The prompt has a single token, so there is nothing to compute.", param="messages")
        # The engine draws a token behind every prompt; this one is thrown away, so it may cost nothing.
        generation = replace(
            whole,
            prompt=prompt,
            params=SamplingParams(temperature=0),
            stops=(),
            max_new_tokens=1,
            cuts=[cut for cut in whole.cuts if cut < len(prompt)],
        )
        return request, generation, len(whole.prompt)

    async def _slot_of(self, prompt: list[int]) -> int | None:
        """The idle slot that holds just this prompt now, asked of the core itself; None if none does."""

        def look(cache: PrefixCache) -> Generator[None, None, int | None]:
            yield
            return next((slot.index for slot in cache.slots if slot.idle and slot.sequence.tokens == prompt), None)

        slot_id: int | None = await self._preparation.core.perform(look)
        return slot_id

    async def _answer_with_state(self, exchange: Exchange, answer: PrefillAnswer, form: str) -> None:
        async with await self._desk.export(answer.id_slot, form) as state:
            if state.meta.n_past != answer.n_past:
                raise NoCellsFree("The prompt was computed, but another request has taken its slot since.")
            answer = replace(
                answer,
                state_size=state.total_bytes,
                model_hash=state.meta.model_sha256,
                fingerprint=state.meta.fingerprint,
                form=state.meta.form,
            )
            await exchange.begin(Status.OK, answer, state.total_bytes)
            await self._operations.send_state(exchange, state)

    # --- DECODE ---------------------------------------------------------------------------------

    async def decode(self, exchange: Exchange, body: bytes) -> None:
        identity = plain_request_id(exchange.head.trace_id)
        ready = await prepared_chat(self._preparation, lambda: _decode_request(body), identity, "messages")
        model_name = self._config.model_name
        answer = ChatAnswer(identity, model_name, self._preparation.llama.vocabulary, ready.form)
        frames = TokenFrames(ChatStream(answer, ready.body), ready.generations)
        async with self._preparation.running(ready.generations):
            await exchange.begin_frames(DecodeAnswer(identity, model_name, len(ready.generations)))
            await exchange.send_frames(frames.opening())
            await self._send_pieces(exchange, frames, ready.generations)
        await exchange.end_frames()

    async def _send_pieces(self, exchange: Exchange, frames: TokenFrames, generations: Sequence[Generation]) -> None:
        loop = asyncio.get_running_loop()
        sent_at = loop.time()
        last: dict[int, Piece] = {}
        while len(last) < len(generations):
            ready: list[bytes] = []
            for piece in await generations[0].mailbox.take(PING_S):
                ready += frames.of(piece)
                if piece.error is not None:
                    # As over HTTP: an error's frame is the last one, and the other choices are cancelled.
                    await exchange.send_frames(ready)
                    return
                if piece.is_last:
                    last[piece.choice] = piece
            if not ready and loop.time() - sent_at >= PING_S:
                ready = [PING_FRAME]
            if ready:
                await exchange.send_frames(ready)
                sent_at = loop.time()
        closing = frames.closing(last)
        if closing:
            await exchange.send_frames(closing)


class TokenFrames:
    """The chunks of the HTTP stream as bare JSON objects; a choice's first one after some tokens tells their ids.

    Ids of tokens whose text is still held back wait for the chunk that comes next, so that none is lost or told twice.
    """

    def __init__(self, answer: ChatStream, generations: Sequence[Generation]) -> None:
        self._answer = answer
        self._generations = generations
        self._untold: dict[int, list[int]] = {generation.choice: [] for generation in generations}

    def opening(self) -> list[bytes]:
        return list(_objects(self._answer.opening(self._generations)))

    def of(self, piece: Piece) -> list[bytes]:
        untold = self._untold[piece.choice]
        untold += piece.token_ids
        events = self._answer.frames(piece, self._generations[piece.choice])
        chunks = [chunk for event in events for chunk in _objects(event)]
        if chunks and untold:
            told = b'{"token_ids":[%s],' % ",".join(map(str, untold)).encode()
            chunks[0] = told + chunks[0][1:]
            untold.clear()
        return chunks

    def closing(self, last: dict[int, Piece]) -> list[bytes]:
        return list(_objects(self._answer.closing(in_order(last))))


def _decode_request(body: bytes) -> ChatRequest:
    request = validated(ChatRequest, parse_json_object(body))
    request.refuse_unsupported()
    return request.model_copy(update={"stream": True})


def _objects(events: bytes) -> Iterator[bytes]:
    """The JSON objects of server-sent events; comments and [DONE] are HTTP's own."""
    for event in events.split(b"\n\n"):
        if event.startswith(b"data: {"):
            yield event[6:]
