"""States of a stateful loader: asked for rarely, never before the first delivery.

torchdata's `state_dict()` makes the iterator where there is none, starts workers and draws seeds. Where the state
cannot be had, the loader's batches are counted instead.
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
"""It is asked once a second, or after so many times what asking costs."""


class LoaderState:
    """Of one loader; does nothing for one of another kind."""

    def __init__(self, access: LoaderAccess, report: Callable[..., None]) -> None:
        self._access = access
        self._report = report
        self._due = 0.0
        self.at_end: bytes | None = None
        """Encoded, when the last pass ended."""

    def anchor(self, loader_pass: LoaderPass, number: int) -> None:
        """The state behind batch `number`, if it is due; three are kept of a pass."""
        began = time.perf_counter()
        if self._access.kind != "stateful" or (began < self._due and number > 1):
            return
        try:
            state = encode_value(self._access.loader.state_dict()).to_bytes()
        except Exception as error:  # noqa: BLE001 - the user's, or a library's that cannot
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
        except Exception as error:  # noqa: BLE001 - the library's
            self._report("refused", error=describe_error(error), epoch=epoch, batch=0)
