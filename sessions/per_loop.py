"""Objects that belong to an event loop: what holds futures, tasks or answers of one must not be seen by another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

Made = TypeVar("Made")


class PerLoop(Generic[Made]):
    """Call it to get the running loop's object, which is made on the first call. A site has one loop for all its life."""

    def __init__(self, make: Callable[[], Made]) -> None:
        self._make = make
        self._made: WeakKeyDictionary[asyncio.AbstractEventLoop, Made] = WeakKeyDictionary()

    def __call__(self) -> Made:
        loop = asyncio.get_running_loop()
        if loop not in self._made:
            self._made[loop] = self._make()
        return self._made[loop]
