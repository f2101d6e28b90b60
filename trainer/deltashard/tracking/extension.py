"""What tracking asks of a library whose modules keep and update tables themselves (TorchRec).

Each registers an `ModuleExtension`. Tracking imports none of them: `deltashard/__init__.py` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from deltashard.optimizer.optimizer_state import OptimizerView
from deltashard.state.discovery import Finder, FoundTable, Inventory, ModuleShards
from deltashard.tracking.marks import Marks
from deltashard.tracking.tracker import SparseGradientTracker, Tracker

Lost = Callable[[Exception], None]
"""Called with what kept rows from being marked, instead of raising into a backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleExtension:
    """Support for one library."""

    find: Finder
    parts: Callable[[Any], list[Any] | None]
    """The optimizers inside of one that the library wraps; None: it is another's. Raises `UserError`."""
    view: Callable[[Sequence[OptimizerView], Inventory], OptimizerView | None]
    """Of the fused optimizers in the model, after the views of those handed over; None: there are none."""
    tracker: Callable[[FoundTable, Marks, Lost], Tracker | None]
    """Of a table that the library's kernel updates; None: an optimizer does."""


_extensions: list[ModuleExtension] = []


def register(extension: ModuleExtension) -> None:
    _extensions.append(extension)


def find(path: str, module: nn.Module) -> ModuleShards | None:
    return next((said for each in _extensions if (said := each.find(path, module)) is not None), None)


def parts(optimizer: Any) -> list[Any]:
    """The optimizers inside of a library's wrapper, or `optimizer` itself; raises `UserError`."""
    return next((found for each in _extensions if (found := each.parts(optimizer)) is not None), [optimizer])


def views(others: Sequence[OptimizerView], inventory: Inventory) -> list[OptimizerView]:
    """`others`, and those of fused optimizers."""
    found = [*others]
    for each in _extensions:
        if (view := each.view(found, inventory)) is not None:
            found.append(view)
    return found


def tracker_of(found: FoundTable, marks: Marks, lost: Lost) -> Tracker:
    made = (each.tracker(found, marks, lost) for each in _extensions)
    return next((tracker for tracker in made if tracker is not None), SparseGradientTracker(found, marks))
