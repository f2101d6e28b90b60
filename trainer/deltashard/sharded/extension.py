"""Registers what this folder knows of TorchRec."""

from __future__ import annotations

from collections.abc import Sequence

from deltashard.optimizer.optimizer_state import OptimizerView
from deltashard.sharded.embedding_module import find
from deltashard.sharded.fused_view import FusedView
from deltashard.sharded.lookup_tracker import LookupTracker
from deltashard.sharded.optimizer_wrapper import parts
from deltashard.state.discovery import FoundTable, Inventory
from deltashard.tracking.extension import Lost, ModuleExtension, register
from deltashard.tracking.marks import Marks


def _view(others: Sequence[OptimizerView], inventory: Inventory) -> FusedView | None:
    return FusedView(others, inventory) if inventory.sharded else None


def _tracker(found: FoundTable, marks: Marks, lost: Lost) -> LookupTracker | None:
    return None if found.kernel is None else LookupTracker(found.kernel, marks, lost)


register(ModuleExtension(find=find, parts=parts, view=_view, tracker=_tracker))
