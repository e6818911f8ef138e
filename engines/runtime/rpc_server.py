"""An engine's side of the binary protocol, put together: which operations it serves, and why it does not serve the others."""

from __future__ import annotations

from engines.config import EngineConfig
from engines.rpc_serving import RpcServer, Terms
from engines.runtime.preparation import Preparation
from engines.runtime.rpc_chat import ChatOperations
from engines.runtime.rpc_handoffs import HandoffOperations
from engines.runtime.rpc_operations import EngineOperations
from engines.runtime.state_desk import StateDesk
from engines.wire import Opcode

_NO_PAIRS = "this engine runs alone on its device; there is no combined form to switch to"
REFUSALS: dict[int, str] = {
    Opcode.SET_EXPERT_MODE: _NO_PAIRS,
    Opcode.SWAP_QUANT: "this engine keeps the one file that it was started with",
    Opcode.PIPELINE_ATTACH: _NO_PAIRS,
}


def engine_rpc(
    config: EngineConfig, preparation: Preparation, desk: StateDesk, handoffs: HandoffOperations
) -> RpcServer:
    """The server of `config.rpc_port`, not yet started. Raises ConfigInvalid for a port that is open to strangers."""
    config.refuse_open_rpc()
    operations = EngineOperations(config, preparation, desk)
    chats = ChatOperations(config, preparation, desk, operations)
    terms = Terms(
        host=config.host,
        port=config.rpc_port,
        name=f"engine {config.engine_id}",
        secret=config.rpc_secret,
        connections=config.rpc_connections,
        idle_s=config.rpc_idle_s,
        stall_s=config.rpc_stall_s,
    )
    services = {**operations.services(), **chats.services(), **handoffs.services(config.max_state_bytes)}
    return RpcServer(terms, services, REFUSALS, preparation.core.metrics.registry)
