"""What the router must know to let two engines share a request: how their model is served, and what is lost between quants."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping, Sequence

from django.db import Error as DatabaseError

from engines.services import EngineEndpoint
from pools.db import in_db_within
from pools.router_views import RUN_MODES, RunMode
from sessions import kv_losses
from sessions.dialects import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from sessions.engine_call import EngineCall

KNOWN_S = 10.0
PATIENCE_S = 2.0
MAX_KNOWN = 256
# Asked of a chat, these make several answers of it, which need several places at the second engine: it is not split. What only
# looks like one of them costs a split and no answer.
_FIXING = re.compile(rb'"(?:n|best_of)"\s*:(?!\s*(?:1\b|null))')
_MOVABLE = frozenset(dialect.path for dialect in (CHAT, COMPLETIONS, RESPONSES, MESSAGES))

logger = logging.getLogger(__name__)


class KvLosses:
    """The measured losses between variants, asked for now and then; of one event loop."""

    def __init__(self) -> None:
        self._known: dict[frozenset[int], tuple[float, dict[tuple[int, int], float]]] = {}

    async def among(self, endpoints: Sequence[EngineEndpoint]) -> Mapping[tuple[int, int], float]:
        """By variants of who prefills and who decodes; empty where all are of one variant or no family is declared."""
        variants = frozenset(endpoint.variant_id for endpoint in endpoints if endpoint.kv_family)
        if len(variants) < 2:
            return {}
        known = self._known.get(variants)
        if known is not None and time.monotonic() - known[0] < KNOWN_S:
            return known[1]
        try:
            losses = await in_db_within(PATIENCE_S, kv_losses.among, variants)
        except DatabaseError as error:
            logger.warning("what is lost between quants is not known, the database does not answer: %s", error)
            return {} if known is None else known[1]
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        self._known[variants] = (time.monotonic(), losses)
        return losses


def run_mode(endpoints: Sequence[EngineEndpoint]) -> RunMode:
    """As the model says."""
    said = endpoints[0].run_mode
    return next((mode for mode in RUN_MODES if mode == said), "auto")


def is_movable(call: EngineCall, session: str) -> bool:
    """Whether the answer can go on at another engine; the engine itself judges once more."""
    if not session or call.dialect.path not in _MOVABLE or call.hints.needs:
        return False
    return _FIXING.search(call.raw) is None
