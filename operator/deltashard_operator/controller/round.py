"""Looks that are taken now and then, and the work that each finds: one round at a time, on the controller's loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Rounds:
    """Rounds of one kind of work."""

    def __init__(self, every_s: float, wall: Callable[[], float]) -> None:
        self._every_s = every_s
        self._wall = wall
        self._looked_s = float("-inf")
        self._task: asyncio.Task[None] | None = None

    def is_due(self) -> bool:
        """Whether it is time to look, and no round is under way; then the time is counted from now."""
        now_s = self._wall()
        if abs(now_s - self._looked_s) < self._every_s:
            return False
        if self._task is not None and not self._task.done():
            return False
        self._looked_s = now_s
        return True

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._task = asyncio.create_task(work)

    async def settle(self) -> None:
        if self._task is not None:
            await self._task
