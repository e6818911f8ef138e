"""What a head asks of a store: whole exchanges over the binary protocol, for code that waits.

Each call is bounded by the patience below and opens a connection of its own. Knows nothing of the database.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

from engines.errors import EngineError
from engines.rpc_client import Patience
from engines.store.client import StoreClient
from engines.wire_store import SnapshotEntry, SnapshotsBody, StoreInfoAnswer

PATIENCE = Patience(connect_s=1.0, hello_s=2.0, look_s=5.0, stall_s=5.0)
PAGE = 500

T = TypeVar("T")


class StoreCaller:
    """One store, by its address. Raises what StoreClient does: EngineUnreachable, NotAuthenticated, an RpcRefused."""

    def __init__(self, address: str, port: int, secret: str) -> None:
        self._target = (address, port, secret)

    def info(self) -> StoreInfoAnswer:
        return self._with(lambda store: store.store_info())

    def snapshots(self, session: str | None = None) -> Iterator[Sequence[SnapshotEntry]]:
        """All manifests (or those of a session) in the order of their names, page by page; each page is as old as it is."""
        after, more = "", True
        while more:
            page, more = self._page(SnapshotsBody(session=session, after=after, limit=PAGE))
            if not page:
                return
            yield page
            after = page[-1].name

    def _page(self, body: SnapshotsBody) -> tuple[Sequence[SnapshotEntry], bool]:
        return self._with(lambda store: store.snapshots(body))

    def delete(self, names: list[str]) -> int:
        """Drop these manifests and what only they name; returns how many were there."""

        async def dropped(store: StoreClient) -> int:
            return sum([await store.delete(name) for name in names])

        return self._with(dropped)

    def _with(self, call: Callable[[StoreClient], Awaitable[T]]) -> T:
        async def called() -> T:
            address, port, secret = self._target
            store = StoreClient(address, port, secret=secret, name="head", patience=PATIENCE)
            async with store:
                return await call(store)

        return asyncio.run(called())


def look(address: str, port: int, secret: str) -> StoreInfoAnswer | EngineError:
    """What a store says of itself, or why it does not."""
    try:
        return StoreCaller(address, port, secret).info()
    except EngineError as error:
        return error
