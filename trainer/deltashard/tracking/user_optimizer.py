"""The optimizers that a training script passes, without library wrappers (`extension`).

A script may replace an optimizer while it trains. The new one is found if it is in the list or dict that the script
passed, or in the module attribute that held the old one. An optimizer held only by a variable of the script is not
found: then no known optimizer steps any more, and the blocked saves are reported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from deltashard_checkpoint.errors import UserError
from torch import nn

from deltashard.optimizer.optimizer_state import views_of
from deltashard.tracking.extension import parts


def unwrap_optimizers(optimizers: Iterable[Any]) -> list[Any]:
    """Return the optimizers that step by themselves, in order.

    Raises:
        UserError: An optimizer is of an unsupported kind.
    """
    return [part for optimizer in optimizers for part in _parts(optimizer)]


def _parts(optimizer: Any) -> list[Any]:
    zero = getattr(sys.modules.get("torch.distributed.optim"), "ZeroRedundancyOptimizer", None)
    if zero is not None and isinstance(optimizer, zero):
        raise refusal(
            optimizer, "every rank holds another part of its state", "use the optimizer inside of it"
        )
    return parts(optimizer)


def refusal(optimizer: Any, why: str, remedy: str) -> UserError:
    return UserError(
        f"{type(optimizer).__name__} is not supported: {why}", where="Checkpointer(optimizer=)", remedy=remedy
    )


class UserOptimizers:
    """The optimizers that a script passed, including later replacements."""

    def __init__(self, given: Any, model: nn.Module) -> None:
        """`given` is one optimizer, a list, dict or other iterable of them, or None."""
        live = isinstance(given, list | Mapping) or hasattr(given, "step")
        self._given: Any = given if live else list(given or ())
        held = {
            id(value): (module, name)
            for module in model.modules()
            for name, value in vars(module).items()
            if isinstance(value, torch.optim.Optimizer)
        }
        self._places = {id(each): (each, held[id(each)]) for each in self._listed() if id(each) in held}
        """By id: the optimizer, and the module and attribute that held it."""
        self.now = unwrap_optimizers(self._now())
        """Optimizers that step, as of the last `refresh`."""

    def refresh(self) -> bool:
        """Update `now`; return whether it changed. Containers with non-optimizers, or empty ones, change nothing."""
        listed = self._now()
        if not all(views_of([each], {}, ()) for each in listed):
            return False
        found = unwrap_optimizers(listed)
        if [*map(id, found)] == [*map(id, self.now)] or not found:
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
            found.append(each if place is None else vars(place[0]).get(place[1]))
        return found
