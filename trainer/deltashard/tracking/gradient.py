"""Detects gradients that are used after a snapshot: `.grad` is in no checkpoint, so a resumed run continues without it.

Ordinary loops zero gradients between their last use and the next backward pass, so a snapshot omits nothing that is
used. Exceptions are an optimizer that steps only every n-th time, a gradient applied one step late, or a `.grad` kept
as momentum. The use of a gradient shows only later. After each snapshot, one small parameter of every group is
therefore watched until its optimizer steps again. Its gradient at the snapshot was used if it is then still in place,
as it was or with new gradients added, and was not zero when they were added. A gradient to which others were added and
that was zeroed before the step (as a GAN's generator loss leaves on the discriminator) was not used. The use is logged
once and reported as the event `gradient_alive`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from deltashard.tracking.marks import in_graph

_log = logging.getLogger("deltashard.tracking")

_MARK = "_deltashard_snapshot"
"""Attribute that marks a gradient present at the snapshot; a gradient that replaces it lacks the attribute."""
_MAX_ELEMENTS = 1 << 20
"""Larger gradients are not watched, because checking them for zero would cost too much."""


class _Probe:
    """One parameter with a gradient at the snapshot."""

    def __init__(self, owner: Any, param: Tensor) -> None:
        self.owner = owner
        self.param = param
        self.token = object()
        self.known = False
        """Whether the use of the gradient is decided."""
        self.stepping = False
        """Whether the optimizer steps with a closure, which applies what is added to the gradient."""
        self.added = False
        """Whether the gradient of the snapshot was in place when the latest gradient, about to be added, arrived."""
        self.handles: list[RemovableHandle] = []
        assert param.grad is not None
        self.mark(param.grad)

    def mark(self, grad: Tensor) -> None:
        grad.__dict__[_MARK] = self.token

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()

    def used(self) -> bool:
        """Whether the gradient of the snapshot is still in place and not zero, so that the next operation uses it."""
        grad = self.param.grad
        if grad is None or grad.__dict__.get(_MARK) is not self.token:
            return False
        if in_graph(grad):
            return False
        return bool((grad._values() if grad.is_sparse else grad).count_nonzero())  # noqa: SLF001 - values() rejects uncoalesced gradients


class GradientWatch:
    """Watches the gradients at one snapshot; calls `alive` with a parameter whose gradient was used after it."""

    def __init__(self, optimizers: Iterable[Any], alive: Callable[[Tensor, Any], None]) -> None:
        self._alive = alive
        self._left: list[_Probe] = []
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                held = [
                    p for p in group["params"] if p.requires_grad and p.grad is not None and p.grad.numel()
                ]
                if not held:
                    continue
                param = min(held, key=_size)
                if _size(param) <= _MAX_ELEMENTS:
                    self._watch(_Probe(optimizer, param))

    @property
    def is_finished(self) -> bool:
        return not self._left

    def before(self, optimizer: Any, *, closure: bool) -> None:
        """Check the gradients that `optimizer` is about to apply, unless a `closure` computes them."""
        mine = [probe for probe in self._left if probe.owner is optimizer]
        for probe in mine:
            if closure:
                probe.stepping = True
            elif not probe.known:
                probe.known = True
                if _used(probe):
                    self._alive(probe.param, probe.owner)
            if probe.known:
                probe.close()
                self._left.remove(probe)

    def close(self) -> None:
        for probe in self._left:
            probe.close()
        self._left.clear()

    def _watch(self, probe: _Probe) -> None:
        self._left.append(probe)

        def arrives(_grad: Tensor) -> None:
            if probe.known:
                return
            probe.added = _used(probe)
            probe.known = probe.stepping or not probe.added
            if probe.stepping and probe.added:
                self._alive(probe.param, probe.owner)

        def added(param: Tensor) -> None:
            # A sum that is not computed in place (create_graph, sparse plus dense) is another tensor.
            if probe.added and not probe.known and param.grad is not None:
                probe.mark(param.grad)
            probe.added = False

        probe.handles.append(probe.param.register_hook(arrives))  # type: ignore[no-untyped-call]
        if probe.param.is_leaf:
            probe.handles.append(probe.param.register_post_accumulate_grad_hook(added))  # type: ignore[no-untyped-call]


def _used(probe: _Probe) -> bool:
    try:
        return probe.used()
    except Exception as error:  # noqa: BLE001 - inside the user's backward pass or step, which must not fail
        _log.debug("a gradient could not be checked", exc_info=error)
        return False


def _size(param: Tensor) -> int:
    grad = param.grad
    assert grad is not None
    return grad._values().numel() if grad.is_sparse else grad.numel()  # noqa: SLF001 - values() rejects uncoalesced gradients
