"""How a table in a fused kernel learns which of its rows changed: the kernel says, right after each update.

The update runs within the backward pass, and so does this: rows are marked when they change, neither when they are
looked up (an evaluation, a batch whose update lies beyond the next cut) nor at a step that comes later.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from deltashard.state.discovery import Kernel
from deltashard.tracking.marks import Marks, in_graph
from deltashard.tracking.tracker import Tracker


class LookupTracker(Tracker):
    """Marks the rows of one shard that its kernel updates."""

    name = "lookups"

    def __init__(self, kernel: Kernel, marks: Marks, lost: Callable[[Exception], None]) -> None:
        self._marks = marks
        self._lost = lost
        self._end = kernel.listen(self._updated)

    def close(self) -> None:
        self._end()

    def _updated(self, ids: Tensor) -> None:
        try:
            if in_graph(ids):
                self._lost(RuntimeError("a CUDA graph updates it, and at a replay nobody is told"))
                return
            self._marks.mark(ids)
        except Exception as error:  # noqa: BLE001 - a moved weight may break anything here, never the backward pass
            self._lost(error)
