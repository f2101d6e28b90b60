"""Registers TorchRec support with tracking.

**Optimizers.** A `CombinedOptimizer` is split into its parts and a `KeyedOptimizerWrapper` unwrapped, since only steps
of the torch optimizers inside can be watched. Fused optimizers are left out: they are found in the model itself
(`fused_view`).

**Rows.** A fused kernel reports changed rows right after each update, within the backward pass. Rows are therefore
marked when they change, not when they are looked up (by an evaluation, or by a batch whose update follows the next
snapshot) and not at a later step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from deltashard.optimizer.optimizer_state import OptimizerView
from deltashard.sharded.embedding_module import find
from deltashard.sharded.fused_view import FusedView
from deltashard.state.discovery import FoundTable, Inventory, Kernel
from deltashard.tracking.extension import Lost, ModuleExtension, register
from deltashard.tracking.marks import Marks, in_graph
from deltashard.tracking.tracker import Tracker
from deltashard.tracking.user_optimizer import refusal, unwrap_optimizers


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
                self._lost(RuntimeError("a CUDA graph updates it, and its replays are not reported"))
                return
            self._marks.mark(ids)
        except Exception as error:  # noqa: BLE001 - a moved weight may break anything here, never the backward pass
            self._lost(error)


def _parts(optimizer: Any) -> list[Any] | None:
    """The optimizers inside a TorchRec optimizer; None: `optimizer` is not one.

    Raises:
        UserError: the optimizer keeps state in addition to that of the optimizers inside.
    """
    keyed: Any = sys.modules.get("torchrec.optim.keyed")
    fused: Any = sys.modules.get("torchrec.optim.fused")
    if keyed is None or not isinstance(optimizer, keyed.KeyedOptimizer):
        return None
    if isinstance(optimizer, keyed.CombinedOptimizer):
        return unwrap_optimizers(part for _, part in optimizer.optimizers)
    if isinstance(optimizer, keyed.KeyedOptimizerWrapper):
        return [optimizer._optimizer]  # noqa: SLF001 - TorchRec offers no accessor
    if fused is not None and isinstance(optimizer, fused.FusedOptimizer):
        return []
    raise refusal(
        optimizer,
        "it keeps state that no torch optimizer reports",
        "pass the optimizers inside it, and do the rest in the loop: a torch.optim.lr_scheduler in state= for "
        "rates, torch.nn.utils.clip_grad_norm_ for clipping",
    )


def _view(others: Sequence[OptimizerView], inventory: Inventory) -> FusedView | None:
    return FusedView(others, inventory) if inventory.sharded else None


def _tracker(found: FoundTable, marks: Marks, lost: Lost) -> LookupTracker | None:
    return None if found.kernel is None else LookupTracker(found.kernel, marks, lost)


register(ModuleExtension(find=find, parts=_parts, view=_view, tracker=_tracker))
