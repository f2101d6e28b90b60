"""Saved states of a stateful loader, captured rarely and never before the first delivery.

torchdata's `state_dict()` creates the iterator if there is none, starts workers and draws seeds. If the state cannot be
captured, the loader's batches are counted instead.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from deltashard.loader import generator
from deltashard.loader.loader_access import LoaderAccess
from deltashard.loader.message import describe_error
from deltashard.loader.position import LoaderPass
from deltashard.state.value import encode_value

_EVERY_S, _EVERY_COSTS = 1.0, 100.0
"""Minimum interval between captures: in seconds, and as a multiple of the cost of one capture."""


class LoaderState:
    """State capture for one loader; no effect unless the loader is stateful."""

    def __init__(self, access: LoaderAccess, report: Callable[..., None]) -> None:
        self._access = access
        self._report = report
        self._due = 0.0
        self.at_end: bytes | None = None

    def anchor(self, loader_pass: LoaderPass, number: int) -> None:
        """Save the state after batch `number` if a capture is due; a pass keeps three states."""
        began = time.perf_counter()
        if self._access.kind != "stateful" or (began < self._due and number > 1):
            return
        try:
            state = encode_value(self._access.loader.state_dict()).to_bytes()
        except Exception as error:  # noqa: BLE001 - user or library code
            if len(loader_pass.anchors) < 2:
                self._access.kind = self._access.fallback
            self._report("no state", error=describe_error(error))
            return
        loader_pass.anchors = [
            loader_pass.anchors[0],
            *loader_pass.anchors[1:][-1:],
            (number, state, generator.capture({})),
        ]
        now = time.perf_counter()
        self._due = now + max(_EVERY_S, _EVERY_COSTS * (now - began))

    def pass_ended(self) -> None:
        if self._access.kind == "stateful":
            with contextlib.suppress(Exception):
                self.at_end = encode_value(self._access.loader.state_dict()).to_bytes()

    def load(self, own: Mapping[str, Any], *, epoch: int) -> None:
        if self._access.kind != "stateful" or self.at_end is None:
            return
        try:
            self._access.load_end_state(self.at_end, own)
        except Exception as error:  # noqa: BLE001 - library code
            self._report("refused", error=describe_error(error), epoch=epoch, batch=0)
