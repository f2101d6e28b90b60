"""State of a parameter in addition to its values: `requires_grad`, and whether `.grad` exists.

Checkpoints contain no gradients: an ordinary loop zeroes them before the next backward pass adds to them. But the
existence of a gradient affects the next step: an optimizer skips a parameter whose `.grad` is None, but applies
momentum and weight decay to one whose `.grad` is zero. Therefore a snapshot records the kind of each gradient, and a
restore creates a gradient of zeros where one existed:

    zeros     it was zero at the snapshot (`zero_grad(set_to_none=False)` before `step()`), and is zero again
    values    the loop had yet to clear it, to zeros or to None. The next optimizer step decides: zeros that were
              neither zeroed nor added to by then are removed, as `zero_grad()` at the same place would do

A gradient whose values are used after the snapshot is reported by `tracking.gradient`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_CHUNK = 1 << 20
"""Values of a gradient that are checked at once: most gradients have a nonzero value among the first ones."""
_SPARSE = "sparse "


def parameters_of(tensors: Mapping[Tensor, str]) -> dict[str, nn.Parameter]:
    """Name -> parameter, without buffers and shards of fused kernels."""
    return {name: tensor for tensor, name in tensors.items() if isinstance(tensor, nn.Parameter)}


def trained(params: Mapping[str, nn.Parameter]) -> dict[str, bool]:
    return {name: param.requires_grad for name, param in params.items()}


def capture(params: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    """Return `trained`: `requires_grad` by name, and `gradients`: the kind of each existing gradient by name."""
    return {
        "trained": trained(params),
        "gradients": {
            name: (_SPARSE if param.grad.is_sparse else "") + ("zeros" if _is_zero(param.grad) else "values")
            for name, param in params.items()
            if param.grad is not None
        },
    }


def restore(
    saved: Mapping[str, Any],
    params: Mapping[str, nn.Parameter],
    before_next_step: Callable[[Callable[[], None]], None],
) -> None:
    """Restore the result of `capture` for the parameters in it.

    `before_next_step` calls a function once, before the next step of any optimizer.
    """
    placed: list[tuple[nn.Parameter, Tensor, int]] = []
    for name, param in params.items():
        if name not in saved["trained"]:
            continue
        param.requires_grad_(saved["trained"][name])
        kind = saved["gradients"].get(name, "")
        if not kind:
            param.grad = None
            continue
        grad = param.grad = _zeros(param, sparse=kind.startswith(_SPARSE))
        if kind.endswith("values"):
            placed.append((param, grad, grad._version))  # noqa: SLF001 - torch offers no accessor

    def take_away() -> None:
        for param, grad, version in placed:
            if param.grad is grad and grad._version == version:  # noqa: SLF001 - as above
                param.grad = None

    if placed:
        before_next_step(take_away)


def _is_zero(grad: Tensor) -> bool:
    if grad.is_sparse:
        return grad._nnz() == 0  # noqa: SLF001 - the result of zero_() on a sparse gradient
    return not any(bool(chunk.count_nonzero()) for chunk in _chunks(grad.detach()))


def _chunks(grad: Tensor) -> Iterator[Tensor]:
    # On an accelerator every check waits for the device, so check everything at once.
    if grad.device.type != "cpu" or not grad.is_contiguous():
        yield grad
        return
    flat = grad.view(-1)
    for start in range(0, len(flat), _CHUNK):
        yield flat[start : start + _CHUNK]


def _zeros(param: nn.Parameter, *, sparse: bool) -> Tensor:
    if not sparse:
        return torch.zeros_like(param, requires_grad=False)
    return torch.sparse_coo_tensor(
        torch.empty((1, 0), dtype=torch.int64, device=param.device),
        torch.empty((0, *param.shape[1:]), dtype=param.dtype, device=param.device),
        param.shape,
        device=param.device,
        is_coalesced=True,
        check_invariants=False,
    )
