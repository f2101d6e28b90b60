"""`on_event=`: the program's own ears; whatever it raises never harms training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from deltashard.attach.interruption import leaves

log = logging.getLogger("deltashard")

OnEvent = Callable[[str, Mapping[str, Any]], None]


class Listener:
    """Calls `on_event`; on the training thread only."""

    def __init__(self, on_event: OnEvent | None, failed: Callable[[], int]) -> None:
        """`failed` counts what `on_event` raised, and returns the count."""
        self._on_event = on_event
        self._failed = failed

    def emit(self, name: str, **facts: Any) -> None:
        """Tell of an event; only what the user's signal handler raises comes out."""
        if self._on_event is None:
            return
        try:
            self._on_event(name, facts)
        except BaseException as error:
            if leaves(error):
                raise
            if self._failed() == 1:
                log.warning("on_event(%r, ...) raised, training goes on", name, exc_info=error)
