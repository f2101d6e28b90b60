"""Exact row-wise Adagrad with one float32 accumulator per row, as recommendation models use it for embedding tables.

For every row r with a gradient in this step, with G the *sum* of all its gradients and D the number of columns:

    sum[r]    += (1 / D) * sum_d G_d ** 2          one addition per row and step
    weight[r] -= lr / (sqrt(sum[r]) + eps) * G     eps outside of the root

"Exact" means that duplicates of a row are sorted and summed before the accumulator is updated, so that the result does
not depend on their order or on how a batch repeats them (Neo/ZionEX, ISCA 2022; FBGEMM's `EXACT_ROWWISE_ADAGRAD`). Rows
without a gradient change neither weight nor state, which makes cheap row tracking exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from deltashard_checkpoint.errors import UserError
from torch import Tensor


class RowWiseAdagrad(torch.optim.Optimizer):
    """Row-wise Adagrad for 2-D parameters with sparse or dense gradients; state `sum`: float32 [rows]."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        *,
        eps: float = 1e-8,
        initial_accumulator_value: float = 0.0,
    ) -> None:
        """Create the accumulators.

        Args:
            params: Parameters or groups of 2-D parameters, with sparse or dense gradients.
            lr: Learning rate. Default: 0.01.
            eps: Term added outside of the root. Default: 1e-8.
            initial_accumulator_value: Initial value of `sum`. Default: 0.

        Raises:
            UserError: lr < 0, eps <= 0, a negative initial value, or a parameter that is not 2-D.
        """
        if lr < 0 or eps <= 0 or initial_accumulator_value < 0:
            raise UserError(
                f"lr={lr}, eps={eps}, initial_accumulator_value={initial_accumulator_value} is out of range",
                where="RowWiseAdagrad",
                remedy="lr >= 0, eps > 0, initial_accumulator_value >= 0",
            )
        super().__init__(
            params, {"lr": lr, "eps": eps, "initial_accumulator_value": initial_accumulator_value}
        )
        for group in self.param_groups:
            for param in group["params"]:
                self._check(param)
                self.state[param]["sum"] = torch.full(
                    (param.shape[0],),
                    group["initial_accumulator_value"],
                    dtype=torch.float32,
                    device=param.device,
                )

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step every parameter that has a gradient; return the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr, eps = group["lr"], group["eps"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if "sum" not in state:  # a group added later
                    self._check(param)
                    state["sum"] = torch.full(
                        (param.shape[0],),
                        group["initial_accumulator_value"],
                        dtype=torch.float32,
                        device=param.device,
                    )
                if param.grad.is_sparse:
                    _sparse_step(param, param.grad, state["sum"], lr, eps)
                else:
                    _dense_step(param, param.grad, state["sum"], lr, eps)
        return loss

    @staticmethod
    def _check(param: Tensor) -> None:
        if param.dim() != 2:
            raise UserError(
                f"A parameter of shape {tuple(param.shape)} has no rows",
                where="RowWiseAdagrad",
                remedy="pass only tables, and give the dense parameters to another optimizer",
            )


def _sparse_step(param: Tensor, grad: Tensor, total: Tensor, lr: float | Tensor, eps: float) -> None:
    grad = grad.coalesce()  # sorts the rows and sums duplicates
    rows, values = grad._indices()[0], grad._values().float()  # noqa: SLF001 - no checks needed after coalesce
    if rows.numel() == 0:
        return
    sums = total[rows] + values.square().mean(dim=1)
    total[rows] = sums
    update = values * (lr / (sums.sqrt() + eps)).unsqueeze(1)
    param[rows] = (param[rows].float() - update).to(param.dtype)


def _dense_step(param: Tensor, grad: Tensor, total: Tensor, lr: float | Tensor, eps: float) -> None:
    values = grad.float()
    total.add_(values.square().mean(dim=1))
    update = values * (lr / (total.sqrt() + eps)).unsqueeze(1)
    if param.dtype == torch.float32:
        param.sub_(update)
    else:
        param.copy_((param.float() - update).to(param.dtype))
