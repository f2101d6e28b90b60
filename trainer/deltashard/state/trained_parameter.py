"""What a parameter has beside its values: whether it is trained (`requires_grad`), and whether `.grad` is there.

Gradients are in no checkpoint: an ordinary loop zeroes them before the next backward pass adds to them. But whether a
gradient is *there* decides what the next step does. An optimizer passes over a parameter whose `.grad` is None; one
whose `.grad` is zero it moves by momentum and weight decay. So a cut records one word per gradient, and a restore puts
a gradient of zeros where one was:

    zeros     it was zero at the cut (`zero_grad(set_to_none=False)` before `step()`), and is zero again
    values    the loop was to zero it, to zeros or to None: that is seen at the next optimizer step. Zeros that were
              neither zeroed nor added to by then are taken away, as `zero_grad()` in the same place would have done

A gradient with values that is used after the cut is reported by `tracking.gradient`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_CHUNK = 1 << 20
"""Values of a gradient that are looked at together: most gradients are not zero within the first ones."""
_SPARSE = "sparse "


def parameters_of(tensors: Mapping[Tensor, str]) -> dict[str, nn.Parameter]:
    """Name -> parameter; without buffers, and without the shards of fused kernels."""
    return {name: tensor for tensor, name in tensors.items() if isinstance(tensor, nn.Parameter)}


def trained(params: Mapping[str, nn.Parameter]) -> dict[str, bool]:
    return {name: param.requires_grad for name, param in params.items()}


def capture(params: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    """`trained`: `requires_grad` by name, and `gradients`: a word for each name that has one."""
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
    """Put back what `capture` gave, for the parameters that it names.

    `before_next_step` has a function called once, before the next step of any optimizer.
    """
    placed: list[tuple[nn.Parameter, Tensor, int]] = []
    for name, param in params.items():
        if name not in saved["trained"]:
            continue
        param.requires_grad_(saved["trained"][name])
        word = saved["gradients"].get(name, "")
        if not word:
            param.grad = None
            continue
        grad = param.grad = _zeros(param, sparse=word.startswith(_SPARSE))
        if word.endswith("values"):
            placed.append((param, grad, grad._version))  # noqa: SLF001 - torch offers no accessor

    def take_away() -> None:
        for param, grad, version in placed:
            if param.grad is grad and grad._version == version:  # noqa: SLF001 - as above
                param.grad = None

    if placed:
        before_next_step(take_away)


def _is_zero(grad: Tensor) -> bool:
    if grad.is_sparse:
        return grad._nnz() == 0  # noqa: SLF001 - what zero_() makes of a sparse gradient
    return not any(bool(chunk.count_nonzero()) for chunk in _chunks(grad.detach()))


def _chunks(grad: Tensor) -> Iterator[Tensor]:
    # On an accelerator every look waits for the device: one look.
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
