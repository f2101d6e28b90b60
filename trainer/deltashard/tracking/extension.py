"""Interface between tracking and libraries whose modules keep and update tables themselves (TorchRec).

Each library registers a `ModuleExtension`. `deltashard/__init__.py` imports the libraries; tracking imports none.
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
"""Called with the error that kept rows from being marked, instead of raising in a backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleExtension:
    """Support for one library."""

    find: Finder
    parts: Callable[[Any], list[Any] | None]
    """Returns the optimizers inside a wrapper of the library, or None for other optimizers. Raises `UserError`."""
    view: Callable[[Sequence[OptimizerView], Inventory], OptimizerView | None]
    """Returns a view of the model's fused optimizers, if any, given the views of the user's optimizers."""
    tracker: Callable[[FoundTable, Marks, Lost], Tracker | None]
    """Returns the tracker of a table that the library's kernel updates, or None if an optimizer updates it."""


_extensions: list[ModuleExtension] = []


def register(extension: ModuleExtension) -> None:
    _extensions.append(extension)


def find(path: str, module: nn.Module) -> ModuleShards | None:
    return next((found for each in _extensions if (found := each.find(path, module)) is not None), None)


def parts(optimizer: Any) -> list[Any]:
    """Return the optimizers inside a library's wrapper, or `optimizer` itself; raises `UserError`."""
    return next((found for each in _extensions if (found := each.parts(optimizer)) is not None), [optimizer])


def views(others: Sequence[OptimizerView], inventory: Inventory) -> list[OptimizerView]:
    """Return `others` and the views of fused optimizers."""
    found = [*others]
    for each in _extensions:
        if (view := each.view(found, inventory)) is not None:
            found.append(view)
    return found


def tracker_of(found: FoundTable, marks: Marks, lost: Lost) -> Tracker:
    made = (each.tracker(found, marks, lost) for each in _extensions)
    return next((tracker for tracker in made if tracker is not None), SparseGradientTracker(found, marks))
