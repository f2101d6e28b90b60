"""The optimizers that a training script gave, as the script holds them now.

A script may replace an optimizer while it trains. Where it does so in the list or dict that it gave, or in the attribute
of a module of the model that held the optimizer, the new one is found there. One that is held by a variable of the
script alone is not: then no optimizer that is known steps any more, and the saves that do not happen are reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from deltashard.optimizer.optimizer_state import views_of
from deltashard.sharded.handed_optimizer import parts_of


class HandedOptimizers:
    """See the module."""

    def __init__(self, given: Any, model: nn.Module) -> None:
        """`given`: one optimizer, a list, dict or other iterable of them, or None."""
        live = isinstance(given, list | Mapping) or hasattr(given, "step")
        self._given: Any = given if live else list(given or ())
        held = {
            id(value): (module, name)
            for module in model.modules()
            for name, value in vars(module).items()
            if isinstance(value, torch.optim.Optimizer)
        }
        self._places = {id(each): (each, held[id(each)]) for each in self._listed() if id(each) in held}
        """Optimizer -> itself, and the module and attribute that held it."""
        self.now = parts_of(self._now())
        """Those that step, as of the last look."""

    def look(self) -> bool:
        """Whether they are others than at the last look; what is no optimizer, or empty, changes nothing."""
        found = parts_of(self._now())
        if [*map(id, found)] == [*map(id, self.now)] or not found:
            return False
        if not all(views_of([each], {}, ()) for each in found):
            return False
        self.now = found
        return True

    def _listed(self) -> list[Any]:
        given = self._given
        if hasattr(given, "step"):
            return [given]
        return list(given.values() if isinstance(given, Mapping) else given)

    def _now(self) -> list[Any]:
        found = []
        for each in self._listed():
            _, place = self._places.get(id(each), (each, None))
            live = each if place is None else vars(place[0]).get(place[1])
            found.append(live if isinstance(live, torch.optim.Optimizer) else each)
        return found
