"""A server of the binary protocol: a bounded number of connections, one request at a time on each, any broken exchange ends it.

Knows no operation but HELLO; an engine or a store brings its own as a table of services.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge

from engines.errors import (
    BodyTooLarge,
    DeadlineExceeded,
    EngineError,
    InvalidRequest,
    NotAuthenticated,
    NotServed,
    ProtocolBroken,
    Unavailable,
)
from engines.rpc_exchange import Exchange
from engines.rpc_stream import ByteStream
from engines.wire import (
    MAX_DRAINED_BYTES,
    MAX_HELLO_BYTES,
    NONCE_BYTES,
    PROTOCOL_VERSION,
    Opcode,
    RequestDecoder,
    RequestHead,
    Status,
    hello_proof,
    operation_of,
    proves,
)
from engines.wire_json import HelloAnswer, HelloChallenge, HelloDone, HelloRequest, read_json

log = logging.getLogger("hydra.rpc")

LINGER_S = 1.0
# HELLO takes a peer's two answers. Who has not shown for so long who it is keeps nobody out who comes now.
GREETING_S = 2.0
CLOSE_PATIENCE_S = 1.5
BACKLOG = 128
TOO_MANY_CONNECTIONS = "too_many_connections"


@dataclass(frozen=True)
class Service:
    """One operation as this server offers it. `deadline_s` None: the operation ends by itself.

    With `reads_payload` the handler takes the payload from the exchange while it comes; else it is there already, in `body`.
    """

    handle: Callable[[Exchange, bytes], Awaitable[None]]
    max_payload_bytes: int
    deadline_s: float | None
    reads_payload: bool = False


@dataclass(frozen=True)
class Terms:
    """Where a server listens, whom it lets in and how long it waits. An empty secret lets everybody in."""

    host: str
    port: int
    name: str
    secret: str = field(repr=False)
    connections: int
    idle_s: float
    stall_s: float


class RpcMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.connections = Gauge("hydra_rpc_connections", "Open connections of the binary protocol", registry=registry)
        self.requests = Counter(
            "hydra_rpc_requests",
            "Requests of the binary protocol by operation and status (broken: the exchange did not end)",
            ["operation", "status"],
            registry=registry,
        )
        self.payload_bytes = Counter(
            "hydra_rpc_payload_bytes", "Payload that requests brought", ["operation"], registry=registry
        )


class RpcServer:
    """Accepts connections from `start` to `close`. `refusals` says why a known operation is not served here."""

    def __init__(
        self, terms: Terms, services: Mapping[int, Service], refusals: Mapping[int, str], registry: CollectorRegistry
    ) -> None:
        self._terms = terms
        self._services = services
        self._refusals = refusals
        self._metrics = RpcMetrics(registry)
        self._connections: dict[asyncio.Task[None], _Connection] = {}
        self._turned_away: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Raises OSError when the address cannot be had."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: ByteStream(self._accept), self._terms.host, self._terms.port, backlog=BACKLOG
        )

    async def close(self, patience_s: float = CLOSE_PATIENCE_S) -> None:
        """Idle connections end at once, the others when their request is answered or the patience is at its end."""
        if self._server is not None:
            self._server.close()
        for task, connection in list(self._connections.items()):
            if connection.idle:
                task.cancel()
            connection.closing = True
        tasks = [*self._connections, *self._turned_away]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=patience_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _accept(self, stream: ByteStream) -> None:
        if len(self._connections) >= self._terms.connections and not self._drop_silent():
            if len(self._turned_away) >= self._terms.connections:
                stream.abort()
                return
            task = asyncio.ensure_future(self._turn_away(stream))
            self._turned_away.add(task)
            task.add_done_callback(self._turned_away.discard)
            return
        connection = _Connection(stream, self._terms, self._services, self._refusals, self._metrics)
        task = asyncio.ensure_future(connection.run())
        self._connections[task] = connection
        self._metrics.connections.set(len(self._connections))
        task.add_done_callback(self._ended)

    def _drop_silent(self) -> bool:
        """Ends the oldest connection whose peer has said nothing that proves it for long; False where there is none."""
        before = asyncio.get_running_loop().time() - GREETING_S
        for task, connection in self._connections.items():
            if not connection.is_known and connection.since < before:
                task.cancel()
                self._ended(task)
                return True
        return False

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._connections.pop(task, None)
        self._metrics.connections.set(len(self._connections))

    async def _turn_away(self, stream: ByteStream) -> None:
        """Answers a request that was never read, so that the client learns why it is not served."""
        refusal = Unavailable(f"{self._terms.connections} connections are open; no more are taken.")
        refusal.code = TOO_MANY_CONNECTIONS
        with suppress(OSError):
            await Exchange(stream, RequestHead(Opcode.HELLO), self._terms.stall_s).refuse(refusal)
            await stream.finish(LINGER_S)
        stream.abort()


class _Connection:
    """One client's connection, from HELLO to its end."""

    def __init__(
        self,
        stream: ByteStream,
        terms: Terms,
        services: Mapping[int, Service],
        refusals: Mapping[int, str],
        metrics: RpcMetrics,
    ) -> None:
        self.idle = True
        self.closing = False
        # Whether HELLO is behind it, and since when it is there (the loop's time).
        self.is_known = False
        self.since = asyncio.get_running_loop().time()
        self._stream = stream
        self._terms = terms
        self._services = services
        self._refusals = refusals
        self._metrics = metrics

    async def run(self) -> None:
        try:
            if await self._hello():
                self.is_known = True
                while not self.closing and await self._serve(await self._next_head(self._terms.idle_s)):
                    pass
        except (OSError, TimeoutError, ProtocolBroken) as error:
            log.debug("a connection ended: %s", error)
        finally:
            self._stream.abort()

    async def _next_head(self, first_byte_s: float) -> RequestHead:
        decoder = RequestDecoder()
        self.idle = True
        async with asyncio.timeout(first_byte_s):
            await self._stream.peek()
        self.idle = False
        async with asyncio.timeout(self._terms.stall_s):
            while decoder.head is None:
                self._stream.consume(decoder.feed(await self._stream.peek()))
        return decoder.head

    # --- HELLO ----------------------------------------------------------------------------------

    async def _hello(self) -> bool:
        """Whether the client may go on. Any failure is answered and ends the connection."""
        exchange = await self._hello_exchange()
        try:
            hello = read_json(HelloRequest, await self._hello_body(exchange), "HELLO")
            if hello.version != PROTOCOL_VERSION:
                raise InvalidRequest(
                    f"This side speaks version {PROTOCOL_VERSION}, not {hello.version}.", param="version"
                )
            nonce = _random_bytes(hello.nonce)
            if not self._terms.secret:
                await exchange.answer(Status.OK, HelloChallenge(PROTOCOL_VERSION, "none", "", self._terms.name))
                return True
            challenge = secrets.token_bytes(NONCE_BYTES)
            offer = HelloChallenge(PROTOCOL_VERSION, "hmac-sha256", challenge.hex(), self._terms.name)
            await exchange.answer(Status.PARTIAL, offer)
            exchange = await self._hello_exchange()
            shown = read_json(HelloAnswer, await self._hello_body(exchange), "HELLO").answer
            if not proves(_hex(shown), self._terms.secret, "client", nonce, challenge):
                raise NotAuthenticated("The answer does not prove knowledge of the secret.")
            proof = hello_proof(self._terms.secret, "server", nonce, challenge).hex()
            await exchange.answer(Status.OK, HelloDone(PROTOCOL_VERSION, proof))
            return True
        except EngineError as error:
            await exchange.refuse(error)
            await self._stream.finish(LINGER_S)
            self._metrics.requests.labels("hello", "refused").inc()
            return False

    async def _hello_exchange(self) -> Exchange:
        return Exchange(self._stream, await self._next_head(self._terms.stall_s), self._terms.stall_s)

    async def _hello_body(self, exchange: Exchange) -> bytes:
        if exchange.head.opcode != Opcode.HELLO:
            raise NotAuthenticated("HELLO must come first on every connection.")
        if exchange.head.payload_bytes > MAX_HELLO_BYTES or exchange.head.flags or exchange.head.key:
            raise InvalidRequest(f"HELLO has at most {MAX_HELLO_BYTES} bytes of payload, no key and no flags.")
        return await exchange.body()

    # --- requests -------------------------------------------------------------------------------

    async def _serve(self, head: RequestHead) -> bool:
        """Answers one request. False when the connection must not go on."""
        exchange = Exchange(self._stream, head, self._terms.stall_s)
        operation = operation_of(head.opcode)
        name = operation.opcode.name.lower() if operation else "unknown"
        outcome = "broken"
        try:
            await self._answer(exchange)
            if exchange.status is not None and exchange.complete:
                outcome = exchange.status.name.lower()
        finally:
            self._metrics.requests.labels(name, outcome).inc()
            self._metrics.payload_bytes.labels(name).inc(head.payload_bytes - exchange.unread_bytes)
        if not exchange.complete:
            return False
        if exchange.unread_bytes > MAX_DRAINED_BYTES:
            await self._stream.finish(LINGER_S)
            return False
        await exchange.drop_rest()
        return True

    async def _answer(self, exchange: Exchange) -> None:
        try:
            await self._handle(exchange, self._service(exchange.head))
        except ProtocolBroken:
            raise
        except EngineError as error:
            if exchange.begun:
                raise ProtocolBroken(f"An answer could not be finished: {error}") from error
            await exchange.refuse(error)
        except (OSError, TimeoutError):
            raise
        except Exception:
            log.exception("operation %#x failed", exchange.head.opcode)
            if not exchange.begun:
                await exchange.refuse(EngineError("The operation failed; the log has the cause."))

    def _service(self, head: RequestHead) -> Service:
        """Raises what a head alone makes impossible, before a byte of the payload is read."""
        operation, service = operation_of(head.opcode), self._services.get(head.opcode)
        if operation is None:
            raise NotServed(f"Version {PROTOCOL_VERSION} of the protocol has no operation {head.opcode:#04x}.")
        if service is None:
            reason = self._refusals.get(head.opcode, f"it belongs to a {operation.served_by}")
            raise NotServed(f"{operation.opcode.name} is not served here: {reason}.")
        if head.flags:
            raise InvalidRequest(f"Flags must be 0, not {head.flags:#04x}.", param="flags")
        if operation.key == "none" and head.key:
            raise InvalidRequest(f"{operation.opcode.name} has no key.", param="key")
        limit = min(operation.max_payload_bytes, service.max_payload_bytes)
        if head.payload_bytes > limit:
            raise BodyTooLarge(
                f"{operation.opcode.name} takes at most {limit} bytes of payload, not {head.payload_bytes}.",
                hint="The engine's configuration bounds bodies and states; INFO tells both limits.",
            )
        return service

    async def _handle(self, exchange: Exchange, service: Service) -> None:
        if service.reads_payload:
            await service.handle(exchange, b"")
            return
        body = await exchange.body()
        work = asyncio.ensure_future(service.handle(exchange, body))
        stirred = asyncio.ensure_future(self._stream.stirred())
        try:
            done, _ = await asyncio.wait(
                {work, stirred}, timeout=service.deadline_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                raise DeadlineExceeded(f"The operation took longer than {service.deadline_s:g} s.")
            # A client that has its whole answer may already speak again, or leave.
            if not work.done() and not exchange.complete:
                raise ConnectionResetError("The peer left, or spoke, before its answer was complete.")
            await work
        finally:
            for task in (work, stirred):
                task.cancel()
            await asyncio.gather(work, stirred, return_exceptions=True)


def _hex(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        raise InvalidRequest("HELLO's random bytes and proofs are hexadecimal.") from error


def _random_bytes(text: str) -> bytes:
    nonce = _hex(text)
    if len(nonce) != NONCE_BYTES:
        raise InvalidRequest(f"HELLO's nonce has {NONCE_BYTES} bytes, not {len(nonce)}.", param="nonce")
    return nonce
