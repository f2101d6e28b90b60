"""What tracking asks about TorchRec: registered here.

**Optimizers.** A `CombinedOptimizer` is taken apart and a `KeyedOptimizerWrapper` unwrapped: what counts is the torch
optimizer inside, whose steps can be watched. Fused optimizers are left out: they are found in the model itself
(`fused_view`).

**Rows.** A fused kernel reports which rows it changed, right after each update. The update runs within the backward
pass, and so does this: rows are marked when they change, neither when they are looked up (an evaluation, a batch whose
update lies beyond the next cut) nor at a step that comes later.
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
                self._lost(RuntimeError("a CUDA graph updates it, and at a replay nobody is told"))
                return
            self._marks.mark(ids)
        except Exception as error:  # noqa: BLE001 - a moved weight may break anything here, never the backward pass
            self._lost(error)


def _parts(optimizer: Any) -> list[Any] | None:
    """The optimizers inside of TorchRec's; None: `optimizer` is none of them.

    Raises:
        UserError: it keeps state beside that of the optimizers inside.
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
        "it keeps what no torch optimizer can be asked for",
        "give the optimizers inside of it, and do the rest in the loop: a torch.optim.lr_scheduler in state= for "
        "rates, torch.nn.utils.clip_grad_norm_ for clipping",
    )


def _view(others: Sequence[OptimizerView], inventory: Inventory) -> FusedView | None:
    return FusedView(others, inventory) if inventory.sharded else None


def _tracker(found: FoundTable, marks: Marks, lost: Lost) -> LookupTracker | None:
    return None if found.kernel is None else LookupTracker(found.kernel, marks, lost)


register(ModuleExtension(find=find, parts=_parts, view=_view, tracker=_tracker))
