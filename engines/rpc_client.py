"""How a process speaks the binary protocol to an engine: one connection, one request at a time on it.

A connection that was left in the middle of an exchange (cancelled, timed out, broken) is dropped, never used again; the next
request makes a new one. Large payloads pass through in pieces.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from engines.errors import (
    EngineUnreachable,
    InvalidRequest,
    NotAuthenticated,
    ProtocolBroken,
)
from engines.rpc_answer import Answer, IncomingState, refusal_of, within
from engines.rpc_stream import Buffer, ByteStream
from engines.wire import (
    NONCE_BYTES,
    PROTOCOL_VERSION,
    Opcode,
    RequestHead,
    ResponseHead,
    SlotKey,
    Status,
    hello_proof,
    proves,
)
from engines.wire_json import (
    ConfigureAnswer,
    HelloAnswer,
    HelloChallenge,
    HelloDone,
    HelloRequest,
    InfoAnswer,
    PrefillAnswer,
    StateMetaAnswer,
    StatePutAnswer,
    read_json,
    write_json,
)

CONNECT_PAUSES_S = (0.1, 0.5)


@dataclass(frozen=True)
class Patience:
    """How long a client waits, in seconds: to connect, for HELLO, for what needs no computing, for a whole PREFILL (the engine
    ends one at its own deadline, before this), for the next frame of a DECODE (the engine says something every 10 s, so three
    missed pings mean that it is gone), and for the next piece of a state (an engine that decodes gives them a tenth of its time).
    """

    connect_s: float = 2.0
    hello_s: float = 5.0
    look_s: float = 10.0
    prefill_s: float = 1860.0
    silence_s: float = 45.0
    stall_s: float = 60.0


T = TypeVar("T")


class RpcClient:
    """Calls one engine. Raises EngineUnreachable (no connection, or it broke), RpcTimeout, ProtocolBroken, NotAuthenticated,
    and an RpcRefused by the status that the engine answered with. Belongs to one event loop."""

    def __init__(
        self, host: str, port: int, *, secret: str = "", name: str = "", patience: Patience | None = None
    ) -> None:
        self.host, self.port = host, port
        self._patience = patience or Patience()
        self._secret = secret
        self._name = name
        self._one_at_a_time = asyncio.Lock()
        self._stream: ByteStream | None = None
        self._inside: asyncio.Task[Any] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        self._drop()

    # --- operations -----------------------------------------------------------------------------

    async def info(self) -> InfoAnswer:
        return await self._ask(Opcode.INFO, InfoAnswer)

    async def configure(self, params: dict[str, Any]) -> ConfigureAnswer:
        """Also where some keys were refused; RpcBadRequest only for a body that is none. `params` {} changes nothing."""
        async with self._exchange(RequestHead(Opcode.CONFIGURE), _json(params)) as answer:
            head = await answer.head(self._patience.look_s)
            if head.status == Status.BAD_REQUEST and b'"params_applied"' not in head.meta:
                raise refusal_of(head)
            return _read(ConfigureAnswer, head)

    async def state_meta(self, key: SlotKey) -> StateMetaAnswer:
        return await self._ask(Opcode.STATE_META, StateMetaAnswer, key.encode())

    @asynccontextmanager
    async def state_get(self, key: SlotKey) -> AsyncIterator[tuple[StateMetaAnswer, IncomingState]]:
        """A slot's state, to be read wholly inside the block; leaving it earlier drops the connection."""
        async with self._exchange(RequestHead(Opcode.STATE_GET, key=key.encode())) as answer:
            head = await answer.accepted(self._patience.stall_s)
            yield _read(StateMetaAnswer, head), IncomingState(answer, self._patience.stall_s)

    async def state_put(self, key: SlotKey, state: Buffer | AsyncIterable[Buffer], total_bytes: int) -> StatePutAnswer:
        """Replaces a slot's content. An engine that refuses early is heard at once, not after the last byte."""
        head = RequestHead(Opcode.STATE_PUT, key=key.encode(), payload_bytes=total_bytes)
        async with self._exchange(head, state) as answer:
            return _read(StatePutAnswer, await answer.accepted(self._patience.stall_s))

    async def prefill(self, body: dict[str, Any], *, trace_id: str = "") -> PrefillAnswer:
        """Computes a chat's prompt and leaves it in a slot."""
        async with self.prefill_state({**body, "return_state": False}, trace_id=trace_id) as (answer, _):
            return answer

    @asynccontextmanager
    async def prefill_state(
        self, body: dict[str, Any], *, trace_id: str = ""
    ) -> AsyncIterator[tuple[PrefillAnswer, IncomingState]]:
        """As `prefill`; with `return_state` in the body the state follows, to be read wholly inside the block."""
        async with self._exchange(RequestHead(Opcode.PREFILL, trace=trace_id.encode()), _json(body)) as answer:
            head = await answer.accepted(self._patience.prefill_s)
            yield _read(PrefillAnswer, head), IncomingState(answer, self._patience.stall_s)

    async def decode(self, body: dict[str, Any], *, trace_id: str = "") -> AsyncIterator[dict[str, Any]]:
        """The chunks of a chat's answer, with `token_ids`; pings are left out. Closing the iterator ends the generation.

        A failure after the first chunk comes as a chunk with `error`, as over HTTP.
        """
        async with self._exchange(RequestHead(Opcode.DECODE, trace=trace_id.encode()), _json(body)) as answer:
            await answer.accepted(self._patience.silence_s)
            async for frame in answer.frames(self._patience.silence_s):
                chunk = _chunk(frame)
                if chunk.get("object") != "hydra.ping":
                    yield chunk

    async def _ask(self, opcode: Opcode, kind: type[T], key: bytes = b"") -> T:
        async with self._exchange(RequestHead(opcode, key=key)) as answer:
            return _read(kind, await answer.accepted(self._patience.look_s))

    # --- one exchange ---------------------------------------------------------------------------

    @asynccontextmanager
    async def _exchange(
        self, head: RequestHead, payload: Buffer | AsyncIterable[Buffer] = b""
    ) -> AsyncIterator[Answer]:
        """Sends a request and lends its answer. Any way out but a wholly read answer drops the connection."""
        if self._inside is not None and self._inside is asyncio.current_task():
            raise RuntimeError("this task still reads another answer of the same client and would wait for itself")
        async with self._one_at_a_time:
            whole, self._inside = False, asyncio.current_task()
            try:
                stream = await self._connected()
                sent = await self._send(stream, head, payload)
                answer = Answer(stream)
                yield answer
                whole = sent and answer.complete
            finally:
                self._inside = None
                if not whole:
                    self._drop()

    async def _send(self, stream: ByteStream, head: RequestHead, payload: Buffer | AsyncIterable[Buffer]) -> bool:
        """False when an answer came before everything was sent."""
        if not isinstance(payload, AsyncIterable):
            head = RequestHead(head.opcode, head.flags, head.key, head.trace, len(payload))
            payload = _pieces(payload)
        left = head.payload_bytes
        try:
            await _write(stream, head.encode(), self._patience.stall_s)
            async for piece in payload:
                # An answer before the end is a refusal; what is left would only be thrown away.
                if stream.waiting_bytes:
                    return False
                left -= len(piece)
                if left < 0:
                    raise ProtocolBroken("The payload is longer than was announced.")
                await _write(stream, piece, self._patience.stall_s)
        except EngineUnreachable:
            if not stream.waiting_bytes:
                raise
            return False
        if left:
            raise ProtocolBroken(f"The payload is {left} bytes shorter than was announced.")
        return True

    def _drop(self) -> None:
        if self._stream is not None:
            self._stream.abort()
            self._stream = None

    @property
    def _place(self) -> str:
        return f"{self.host}:{self.port}"

    # --- connecting -----------------------------------------------------------------------------

    async def _connected(self) -> ByteStream:
        """The open connection, or a new one; a few attempts, since an engine may just be starting."""
        if self._stream is not None and not self._stream.gone.is_set() and not self._stream.waiting_bytes:
            return self._stream
        self._drop()
        for pause_s in (*CONNECT_PAUSES_S, None):
            try:
                async with asyncio.timeout(self._patience.connect_s):
                    loop = asyncio.get_running_loop()
                    _, self._stream = await loop.create_connection(ByteStream, self.host, self.port)
                break
            except OSError as error:
                if pause_s is None:
                    raise EngineUnreachable(f"Nobody answers at {self._place}: {error}") from error
                await asyncio.sleep(pause_s)
        assert self._stream is not None
        await self._hello(self._stream)
        return self._stream

    async def _hello(self, stream: ByteStream) -> None:
        nonce = secrets.token_bytes(NONCE_BYTES)
        head = await self._say(stream, HelloRequest(PROTOCOL_VERSION, nonce.hex(), self._name))
        challenge = _read(HelloChallenge, head)
        if head.status == Status.OK:
            if self._secret:
                # Whoever asks for no proof may be anybody who took the engine's place.
                raise NotAuthenticated(f"{self._place} asks for no proof, but a secret is set for it.")
            return
        if challenge.auth != "hmac-sha256" or not self._secret:
            raise NotAuthenticated(
                f"{self._place} wants a proof by {challenge.auth}, for which there is no secret here."
            )
        drawn = _hex(challenge.challenge)
        proof = hello_proof(self._secret, "client", nonce, drawn)
        done = _read(HelloDone, await self._say(stream, HelloAnswer(proof.hex())))
        if not proves(_hex(done.proof), self._secret, "server", nonce, drawn):
            raise NotAuthenticated(f"{self._place} does not know the secret.")

    async def _say(self, stream: ByteStream, message: HelloRequest | HelloAnswer) -> ResponseHead:
        body = write_json(message)
        request = RequestHead(Opcode.HELLO, payload_bytes=len(body)).encode() + body
        await _write(stream, request, self._patience.hello_s)
        answer = Answer(stream)
        head = await answer.accepted(self._patience.hello_s)
        if not answer.complete:
            raise ProtocolBroken("HELLO was answered with a payload.")
        return head


async def _write(stream: ByteStream, data: Buffer, stall_s: float) -> None:
    async with within(stall_s):
        await stream.write(data)


async def _pieces(payload: Buffer) -> AsyncIterator[memoryview]:
    view = memoryview(payload)
    for start in range(0, len(view), 1 << 20):
        yield view[start : start + (1 << 20)]


def _chunk(frame: bytes) -> dict[str, Any]:
    try:
        chunk = json.loads(frame)
    except (ValueError, RecursionError) as error:
        raise ProtocolBroken(f"A frame is not JSON: {error}") from error
    if not isinstance(chunk, dict):
        raise ProtocolBroken("A frame is no JSON object.")
    return chunk


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def _read(kind: type[T], head: ResponseHead) -> T:
    try:
        return read_json(kind, head.meta, "an answer's meta")
    except InvalidRequest as error:
        raise ProtocolBroken(str(error)) from error


def _hex(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        raise ProtocolBroken("The peer's proof is not hexadecimal.") from error
