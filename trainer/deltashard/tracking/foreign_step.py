"""Detects optimizers unknown to the Checkpointer that step parameters of its model.

Their state is in no checkpoint, so a resumed run would differ from an uninterrupted one. torch calls a global hook
after each optimizer's step. An optimizer that replaced a known one in the script's container is adopted; any other one
is reported.
"""

from __future__ import annotations

import logging
import weakref
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

from deltashard_checkpoint.errors import UserError
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from deltashard.tracking.user_optimizer import unwrap_optimizers

if TYPE_CHECKING:
    from deltashard.tracking.tracking import Tracking

_log = logging.getLogger("deltashard.tracking")


class ForeignSteps:
    """A global hook on optimizer steps; a step of a known optimizer costs one set lookup."""

    def __init__(self, tracking: Tracking) -> None:
        self._tracking = tracking
        self._seen: weakref.WeakSet[Optimizer] = weakref.WeakSet(tracking.hooked)
        _live.append(weakref.ref(self, _live.remove))
        _hook_once()

    def close(self) -> None:
        _live[:] = [live for live in _live if live() is not self]

    def stepped(self, optimizer: Optimizer) -> None:
        if optimizer in self._seen:
            return
        self._seen.add(optimizer)
        names = {id(parameter): name for name, parameter in self._tracking.model.named_parameters()}
        owned = [names[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in names]
        if not owned or self._is_known(optimizer):
            return
        self._tracking.adopt()
        if not self._is_known(optimizer):
            _log.warning(
                "%s stepped %d parameters of the model (%s%s) and is unknown to the Checkpointer: its state is in no "
                "checkpoint, so a resumed run will differ, and its steps alone do not enable saves. Pass it in "
                "optimizer=; if the script replaces an optimizer, replace it in the list that was passed",
                type(optimizer).__name__,
                len(owned),
                ", ".join(owned[:3]),
                ", ..." if len(owned) > 3 else "",
            )

    def _is_known(self, optimizer: Optimizer) -> bool:
        known = {id(each) for each in self._tracking.hooked}
        with suppress(UserError):
            return all(id(part) in known for part in unwrap_optimizers([optimizer]))
        return False


_live: list[weakref.ref[ForeignSteps]] = []
"""A list, because every optimizer step iterates over it, and iterating a set of weak references takes microseconds."""


@cache
def _hook_once() -> None:
    """Register one permanent hook per process; torch iterates its hooks, so none may be removed during a step."""
    register_optimizer_step_post_hook(after_any_step)


def after_any_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """The registered hook; it writes no rows."""
    for live in tuple(_live):
        each = live()
        if each is not None:
            each.stepped(optimizer)
