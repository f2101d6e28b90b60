"""Whitelist of optimizers whose steps change only the rows in the sparse gradient, bit for bit.

Only the exact type counts (a subclass may do anything), with the parameter groups at the step, since a scheduler may
enable momentum or weight decay. `inexact_reason` is called before every step of every optimizer, so it only compares a
few values per group.

    SGD             without momentum and weight decay
    Adagrad         without weight decay; `lr_decay` scales
    SparseAdam      always: it rejects dense gradients
    RowWiseAdagrad  always (part of deltashard; it has no weight decay)

Not on the list: dense Adam, AdamW, RMSprop and Adafactor decay the state of rows without a gradient; momentum,
Lookahead, weight decay and max_norm change rows without a gradient. `differentiable` rebinds tensors and is too rare to
justify a proof.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from deltashard_checkpoint.errors import UserError

from deltashard.optim import RowWiseAdagrad

Group = Mapping[str, Any]


def _sgd(group: Group) -> str | None:
    return "momentum" if group["momentum"] != 0 else _adagrad(group)


def _adagrad(group: Group) -> str | None:
    if group["weight_decay"] != 0:
        return "weight_decay"
    return "differentiable" if group["differentiable"] else None


def _always(_group: Group) -> str | None:
    return None


WHITELIST: dict[type, Callable[[Group], str | None]] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adagrad: _adagrad,
    torch.optim.SparseAdam: _always,
    RowWiseAdagrad: _always,
}


def inexact_reason(optimizer: Any) -> str | None:
    """Return why rows without a gradient may change at this optimizer's next step; None: they cannot."""
    rule = WHITELIST.get(type(optimizer))
    if rule is None:
        return f"{type(optimizer).__name__} is not known to leave rows without a gradient unchanged"
    # LR schedulers wrap `step` on the instance and mark the wrapper; any other replacement is the user's.
    step = optimizer.__dict__.get("step")
    if step is not None and not getattr(step, "_wrapped_by_lr_sched", False):
        return f"{type(optimizer).__name__}.step was replaced on the instance"
    for group in optimizer.param_groups:
        reason = rule(group)
        if reason is not None:
            return f"{type(optimizer).__name__} with {reason}"
    return None


def replaced_step_reason(optimizer: Any) -> str | None:
    """Return whether `step` was replaced on the class, which the instance does not show, as text; None: no."""
    kind = type(optimizer)
    if getattr(inspect.unwrap(kind.step), "__module__", None) == kind.__module__:
        return None
    return f"{kind.__name__}.step was replaced on the class"


def hookable(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return the `wrapped_optimizers` that take hooks; a wrapper that never called torch's constructor does not.

    Raises:
        UserError: There are torch optimizers but none takes hooks, so their steps could not be observed.
    """
    inner = wrapped_optimizers(optimizer)
    found = [each for each in inner if hasattr(each, "_optimizer_step_pre_hooks")]
    if inner and not found:
        raise UserError(
            f"{type(inner[0]).__name__} never called super().__init__(): torch cannot install hooks in it",
            where="Checkpointer(optimizer=)",
            remedy="call super().__init__(params, defaults) in its constructor",
        )
    return found


def wrapped_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return `optimizer` and every torch optimizer it wraps, outermost first; the wrapper may be any object."""
    found: list[torch.optim.Optimizer] = []
    seen: set[int] = set()

    def visit(candidate: Any, depth: int) -> None:
        if id(candidate) in seen or depth > 4:
            return
        seen.add(id(candidate))
        if isinstance(candidate, torch.optim.Optimizer):
            found.append(candidate)
        elif depth > 0 and not hasattr(candidate, "param_groups"):
            return
        for value in vars(candidate).values() if hasattr(candidate, "__dict__") else ():
            if isinstance(value, list | tuple):
                for item in value:
                    if isinstance(item, torch.optim.Optimizer):
                        visit(item, depth + 1)
            elif isinstance(value, torch.optim.Optimizer):
                visit(value, depth + 1)

    visit(optimizer, 0)
    return found
