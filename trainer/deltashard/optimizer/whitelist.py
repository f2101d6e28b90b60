"""The whitelist: under which optimizers a row without a gradient keeps its weight and its state, bit for bit.

Only the exact type counts (a subclass may do anything) and the parameter groups as they stand at the step, since a
scheduler may switch momentum or weight decay on. `why_inexact` is called before every step of every optimizer, so it
compares a few values per group and nothing else.

    SGD             momentum = 0, weight_decay = 0, 0 <= lr < inf: what is subtracted from a weight is +0, or nothing
    Adagrad         likewise, weight_decay = 0; a zero gradient adds zero to `sum`, and 0 / (sqrt(sum) + eps) moves
                    nothing as long as the divisor is not zero: eps is a number of float32 (`why_inexact_in` has what
                    that asks of the table). `lr_decay` scales.
    SparseAdam      always: it touches the rows of its sparse gradient and refuses dense ones
    RowWiseAdagrad  always (ours; no weight decay exists)

Not on the list, with reasons: dense Adam, AdamW, RMSprop and Adafactor decay the state of rows without a gradient;
momentum and Lookahead move rows without a gradient; weight decay and max_norm as well. `maximize` may turn the sign of
a zero, and `differentiable` rebinds tensors: both are rare, and so not worth a proof.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from deltashard_checkpoint.errors import UserError

from deltashard.optim import RowWiseAdagrad

Group = Mapping[str, Any]


_SMALLEST = torch.finfo(torch.float32).tiny


def _rate(group: Group) -> str | None:
    """Why lr * 0 may be anything but 0: -0 turns a weight of -0 into 0."""
    rate = group["lr"]
    if isinstance(rate, torch.Tensor) and rate.device.type != "cpu":
        return "a learning rate on an accelerator"
    return None if 0 <= rate < math.inf else "a learning rate that is negative or infinite"


def _sgd(group: Group) -> str | None:
    if group["momentum"] != 0:
        return "momentum"
    if group["weight_decay"] != 0:
        return "weight_decay"
    if (reason := _rate(group)) is not None:
        return reason
    return "maximize or differentiable" if group["maximize"] or group["differentiable"] else None


def _adagrad(group: Group) -> str | None:
    if group["weight_decay"] != 0:
        return "weight_decay"
    if not group["eps"] >= _SMALLEST:
        return "eps = 0"
    if (reason := _rate(group)) is not None:
        return reason
    return "maximize or differentiable" if group["maximize"] or group["differentiable"] else None


def _always(_group: Group) -> str | None:
    return None


WHITELIST: dict[type, Callable[[Group], str | None]] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adagrad: _adagrad,
    torch.optim.SparseAdam: _always,
    RowWiseAdagrad: _always,
}


def why_inexact(optimizer: Any) -> str | None:
    """Why rows without a gradient may change at this optimizer's next step; None: they cannot."""
    rule = WHITELIST.get(type(optimizer))
    if rule is None:
        return f"{type(optimizer).__name__} is not an optimizer known to leave rows without a gradient alone"
    # LR schedulers wrap `step` on the instance and mark the wrapper; any other replacement is the user's.
    step = optimizer.__dict__.get("step")
    if step is not None and not getattr(step, "_wrapped_by_lr_sched", False):
        return f"{type(optimizer).__name__}.step was replaced on the instance"
    for group in optimizer.param_groups:
        reason = rule(group)
        if reason is not None:
            return f"{type(optimizer).__name__} with {reason}"
    return None


def why_inexact_in(optimizer: Any, dtype: torch.dtype) -> str | None:
    """Why a dense gradient may change rows without one, of a table of `dtype`; None: it cannot."""
    if torch.finfo(dtype).tiny > _SMALLEST and type(optimizer) is torch.optim.Adagrad:
        return f"{type(optimizer).__name__}'s eps may be 0 in {str(dtype).removeprefix('torch.')}"
    # Flushing is a mode of the thread: arithmetic alone tells.
    if float(torch.full((), 1e-40).mul_(1)) == 0:
        return "denormals are flushed (torch.set_flush_denormal), in rows without a gradient too"
    return None


def why_replaced(optimizer: Any) -> str | None:
    """Whether `step` was replaced on the class, where no look at the instance tells."""
    kind = type(optimizer)
    if getattr(inspect.unwrap(kind.step), "__module__", None) == kind.__module__:
        return None
    return f"{kind.__name__}.step was replaced on the class"


def hookable(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Those of `innermost` that take hooks: a wrapper that never called torch's constructor does not.

    Raises:
        UserError: there are torch optimizers, and none takes hooks: nothing would tell of its steps.
    """
    inner = innermost(optimizer)
    found = [each for each in inner if hasattr(each, "_optimizer_step_pre_hooks")]
    if inner and not found:
        raise UserError(
            f"{type(inner[0]).__name__} never called super().__init__(): torch has no place for hooks in it",
            where="Checkpointer(optimizer=)",
            remedy="call super().__init__(params, defaults) in its constructor",
        )
    return found


def innermost(optimizer: Any) -> list[torch.optim.Optimizer]:
    """`optimizer` and every torch optimizer it wraps, outermost first; also for wrappers that are no Optimizer."""
    found: list[torch.optim.Optimizer] = []
    seen: set[int] = set()

    def visit(thing: Any, depth: int) -> None:
        if id(thing) in seen or depth > 4:
            return
        seen.add(id(thing))
        if isinstance(thing, torch.optim.Optimizer):
            found.append(thing)
        elif depth > 0 and not hasattr(thing, "param_groups"):
            return
        for value in vars(thing).values() if hasattr(thing, "__dict__") else ():
            if isinstance(value, list | tuple):
                for item in value:
                    if isinstance(item, torch.optim.Optimizer):
                        visit(item, depth + 1)
            elif isinstance(value, torch.optim.Optimizer):
                visit(value, depth + 1)

    visit(optimizer, 0)
    return found
