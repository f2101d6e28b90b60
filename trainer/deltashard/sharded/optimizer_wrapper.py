"""What TorchRec puts around optimizers.

A `CombinedOptimizer` is taken apart and a `KeyedOptimizerWrapper` unwrapped: what counts is the torch optimizer inside,
whose steps can be watched. Fused optimizers are left out: they are found in the model itself (`fused_view`).
"""

from __future__ import annotations

import sys
from typing import Any

from deltashard.tracking.handed_optimizer import parts_of, refusal


def parts(optimizer: Any) -> list[Any] | None:
    """The optimizers inside of TorchRec's; None: `optimizer` is none of them.

    Raises:
        UserError: it keeps state of its own.
    """
    keyed: Any = sys.modules.get("torchrec.optim.keyed")
    fused: Any = sys.modules.get("torchrec.optim.fused")
    if keyed is None or not isinstance(optimizer, keyed.KeyedOptimizer):
        return None
    if isinstance(optimizer, keyed.CombinedOptimizer):
        return parts_of(part for _, part in optimizer.optimizers)
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
