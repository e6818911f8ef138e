"""The engine's HTTP server: all operations together.

Runs on the process's event loop; never touches the context. A client that goes away has its handler cancelled, which
cancels its generations at the core's next step.
"""

from __future__ import annotations

from aiohttp import web

from engines.config import EngineConfig
from engines.runtime.core import EngineCore
from engines.runtime.handoff_in import ArrivingHandoffs
from engines.runtime.handoff_out import LeavingHandoffs
from engines.runtime.http_chat import ChatEndpoint
from engines.runtime.http_completions import CompletionEndpoint
from engines.runtime.http_continue import ContinueEndpoint
from engines.runtime.http_embeddings import refusing_operations
from engines.runtime.http_errors import CONFIG, errors_as_json, refuse_foreign_pages, refuse_strangers
from engines.runtime.http_forget import ForgetEndpoint
from engines.runtime.http_handoff import HandoffEndpoint
from engines.runtime.http_infill import InfillEndpoint
from engines.runtime.http_messages import MessagesEndpoint
from engines.runtime.http_park import ParkEndpoint
from engines.runtime.http_rates import RatesEndpoint
from engines.runtime.http_responses import ResponsesEndpoint
from engines.runtime.http_slots import SlotEndpoint
from engines.runtime.http_state import StateEndpoint
from engines.runtime.http_text import TextEndpoints
from engines.runtime.http_views import Views
from engines.runtime.openapi import DescriptionEndpoint
from engines.runtime.operations import Operation, routes
from engines.runtime.parking import Parking
from engines.runtime.preparation import Preparation
from engines.runtime.state_desk import StateDesk


class EngineServer:
    """The operations of one engine. `core` may still be loading: /health says so and whatever needs the model answers 503."""

    def __init__(self, config: EngineConfig, core: EngineCore) -> None:
        self.config = config
        self.core = core
        self.preparation = Preparation(config, core)
        self.desk = StateDesk(core)
        self.parking = Parking(config, core, self.desk)
        self.arriving = ArrivingHandoffs(self.preparation, self.desk)
        self.leaving = LeavingHandoffs(core, self.desk)
        self.preparation.parking = self.parking if self.parking.is_on else None

    def operations(self) -> list[Operation]:
        preparation = self.preparation
        served = [
            *Views(preparation).operations(),
            *ChatEndpoint(preparation).operations(),
            *CompletionEndpoint(preparation).operations(),
            *InfillEndpoint(preparation).operations(),
            *ResponsesEndpoint(preparation).operations(),
            *MessagesEndpoint(preparation).operations(),
            *TextEndpoints(preparation).operations(),
            *SlotEndpoint(preparation, self.desk, self.parking).operations(),
            *ParkEndpoint(self.parking).operations(),
            *StateEndpoint(self.desk).operations(),
            *RatesEndpoint(preparation, self.desk).operations(),
            *ForgetEndpoint(preparation).operations(),
            *refusing_operations(),
        ]
        served += [
            *HandoffEndpoint(self.arriving, served).operations(),
            *ContinueEndpoint(preparation, served).operations(),
        ]
        return [*served, *DescriptionEndpoint(served).operations()]

    def app(self) -> web.Application:
        app = web.Application(
            client_max_size=self.config.max_body_bytes,
            middlewares=[errors_as_json, refuse_foreign_pages, refuse_strangers],
        )
        app[CONFIG] = self.config
        app.add_routes(routes(self.operations()))
        app.on_startup.append(self._begin)
        app.on_cleanup.append(self._end)
        return app

    async def _begin(self, _app: web.Application) -> None:
        self.parking.begin()

    async def _end(self, _app: web.Application) -> None:
        await self.parking.close()
        await self.leaving.close()

    def close(self) -> None:
        self.preparation.close()
        self.desk.close()
