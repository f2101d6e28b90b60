"""The optimizers that a training script hands over, without what TorchRec puts around them.

A `CombinedOptimizer` is taken apart and a `KeyedOptimizerWrapper` unwrapped: what counts is the torch optimizer inside,
whose steps can be watched. Fused optimizers are left out: they are found in the model itself (`fused_view`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from deltashard_checkpoint.errors import UserError


def parts_of(optimizers: Iterable[Any]) -> list[Any]:
    """The optimizers that step by themselves, in order.

    Raises:
        UserError: a kind of optimizer that is not supported.
    """
    return [part for optimizer in optimizers for part in _parts(optimizer)]


def _parts(optimizer: Any) -> Iterator[Any]:
    zero = getattr(sys.modules.get("torch.distributed.optim"), "ZeroRedundancyOptimizer", None)
    if zero is not None and isinstance(optimizer, zero):
        raise _refusal(
            optimizer, "every rank holds another part of its state", "use the optimizer inside of it"
        )
    keyed: Any = sys.modules.get("torchrec.optim.keyed")
    fused: Any = sys.modules.get("torchrec.optim.fused")
    if keyed is None or not isinstance(optimizer, keyed.KeyedOptimizer):
        yield optimizer
    elif isinstance(optimizer, keyed.CombinedOptimizer):
        for _, part in optimizer.optimizers:
            yield from _parts(part)
    elif isinstance(optimizer, keyed.KeyedOptimizerWrapper):
        yield optimizer._optimizer  # noqa: SLF001 - TorchRec offers no accessor
    elif fused is None or not isinstance(optimizer, fused.FusedOptimizer):
        raise _refusal(
            optimizer,
            "it keeps what no torch optimizer can be asked for",
            "give the optimizers inside of it, and do the rest in the loop: a torch.optim.lr_scheduler in state= for "
            "rates, torch.nn.utils.clip_grad_norm_ for clipping",
        )


def _refusal(optimizer: Any, why: str, remedy: str) -> UserError:
    return UserError(
        f"{type(optimizer).__name__} is not supported: {why}", where="Checkpointer(optimizer=)", remedy=remedy
    )
