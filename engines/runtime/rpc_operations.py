"""What an engine answers about itself and its slots over the binary protocol: INFO, CONFIGURE and the state operations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engines.api_schema import parse_json_object
from engines.config import EngineConfig
from engines.errors import InvalidRequest
from engines.rpc_exchange import DEFAULT_CHUNK_BYTES, Exchange
from engines.rpc_serving import Service
from engines.runtime.preparation import Preparation
from engines.runtime.state_desk import ExportedState, RestoreTerms, StateDesk, StateMeta
from engines.wire import MAX_CONFIGURE_BYTES, PROTOCOL_VERSION, Opcode, SlotKey, Status
from engines.wire_json import ConfigureAnswer, InfoAnswer, StateMetaAnswer, StatePutAnswer

# The generation of the engine protocol that this one continues.
ENGINE_VERSION = "E1"
CAPABILITIES = ("prefill", "decode", "state_transfer", "configure", "model_hash", "token_ids")
LOOK_DEADLINE_S = 10.0
MIN_CHUNK_BYTES = 1 << 16
MAX_CHUNK_BYTES = 1 << 26
DEFAULT_FORM = "stream"


def meta_answer(meta: StateMeta) -> StateMetaAnswer:
    return StateMetaAnswer(
        slot_id=meta.slot_id,
        n_past=meta.n_past,
        state_size=meta.state_bytes,
        is_processing=meta.is_processing,
        is_transferring=meta.is_transferring,
        operation=meta.operation,
        model_alias=meta.model_name,
        model_hash=meta.model_sha256,
        fingerprint=meta.fingerprint,
        form=meta.form,
    )


class EngineOperations:
    """`chunk_bytes` is how much of a state is handed to a connection at once; CONFIGURE's `state_chunk_size` sets it."""

    def __init__(self, config: EngineConfig, preparation: Preparation, desk: StateDesk) -> None:
        self.chunk_bytes = DEFAULT_CHUNK_BYTES
        self._config = config
        self._preparation = preparation
        self._desk = desk

    def services(self) -> dict[int, Service]:
        return {
            Opcode.INFO: Service(self.info, 0, LOOK_DEADLINE_S),
            Opcode.CONFIGURE: Service(self.configure, MAX_CONFIGURE_BYTES, LOOK_DEADLINE_S),
            Opcode.STATE_META: Service(self.state_meta, 0, LOOK_DEADLINE_S),
            Opcode.STATE_GET: Service(self.state_get, 0, None),
            Opcode.STATE_PUT: Service(self.state_put, self._config.max_state_bytes, None, reads_payload=True),
        }

    async def info(self, exchange: Exchange, _body: bytes) -> None:
        config, core = self._config, self._preparation.core
        answer = InfoAnswer(
            engine="hydra",
            version=ENGINE_VERSION,
            protocol=PROTOCOL_VERSION,
            state=core.state,
            capabilities=CAPABILITIES,
            model_alias=config.model_name,
            slots=config.decoding_sequences,
            context_tokens=config.context_tokens,
            mode="solo",
            split_mode=config.split_mode,
            solo_active=True,
            rpc_backend_active=False,
            combined_head_attached=False,
            pipeline_capable=False,
            peer_reachable=False,
            max_body_bytes=config.max_body_bytes,
            max_state_bytes=config.max_state_bytes,
            state_chunk_size=self.chunk_bytes,
            params=self._preparation.defaults.in_force(config),
        )
        await exchange.answer(Status.OK, answer)

    async def configure(self, exchange: Exchange, body: bytes) -> None:
        params = parse_json_object(body)
        chunk_refusal = self._take_chunk_size(params)
        self._preparation.defaults, change = self._preparation.defaults.changed(params_without_chunk(params))
        applied, rejected = change.applied, dict(change.rejected)
        if "state_chunk_size" in params:
            if chunk_refusal:
                rejected["state_chunk_size"] = chunk_refusal
            else:
                applied = (*applied, "state_chunk_size")
        answer = ConfigureAnswer(
            applied=bool(applied) or not params,
            tier=change.tier,
            params=self._preparation.defaults.in_force(self._config),
            params_applied=applied,
            deferred_keys=(),
            rejected=rejected,
            unrecognised=change.unrecognised,
            state_chunk_size_applied=self.chunk_bytes,
        )
        whole = not rejected and not change.unrecognised
        await exchange.answer(Status.OK if whole else Status.PARTIAL if applied else Status.BAD_REQUEST, answer)

    def _take_chunk_size(self, params: dict[str, Any]) -> str:
        """Sets the chunk size within its bounds; returns why it could not."""
        value = params.get("state_chunk_size", self.chunk_bytes)
        if isinstance(value, bool) or not isinstance(value, int):
            return "it must be a whole number of bytes"
        self.chunk_bytes = min(max(value, MIN_CHUNK_BYTES), MAX_CHUNK_BYTES)
        return ""

    # --- states ---------------------------------------------------------------------------------

    async def state_meta(self, exchange: Exchange, _body: bytes) -> None:
        key = SlotKey.parse(exchange.head.key_text)
        await exchange.answer(Status.OK, meta_answer(await self._desk.meta(key.slot_id, key.form or DEFAULT_FORM)))

    async def state_get(self, exchange: Exchange, _body: bytes) -> None:
        key = SlotKey.parse(exchange.head.key_text)
        async with await self._desk.export(key.slot_id, key.form or DEFAULT_FORM) as state:
            await exchange.begin(Status.OK, exported_meta(state), state.total_bytes)
            await self.send_state(exchange, state)

    async def send_state(self, exchange: Exchange, state: ExportedState) -> None:
        exchange.chunk_bytes = self.chunk_bytes
        async for buffer in state:
            await exchange.send(buffer)

    async def state_put(self, exchange: Exchange, _body: bytes) -> None:
        key = SlotKey.parse(exchange.head.key_text)
        if key.form is not None:
            raise InvalidRequest("STATE_PUT tells a state's form by its bytes; leave the option out.", param="key")
        terms = RestoreTerms(exchange.head.payload_bytes, key.fingerprint, key.erase_existing)
        restored = await self._desk.restore(key.slot_id, terms, exchange.chunks())
        answer = StatePutAnswer(
            restored=True,
            slot_id=restored.slot_id,
            bytes=restored.state_bytes,
            n_past=restored.n_past,
            form=restored.form,
            model_match=restored.model_match,
        )
        await exchange.answer(Status.OK, answer)


def exported_meta(state: ExportedState) -> StateMetaAnswer:
    """A state's meta with the length that is really sent, whatever was said of it before."""
    return replace(meta_answer(state.meta), state_size=state.total_bytes)


def params_without_chunk(params: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in params.items() if key != "state_chunk_size"}
