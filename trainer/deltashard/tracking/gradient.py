"""Gradients that live across a cut: `.grad` is in no checkpoint, so a resumed run goes on without them.

Ordinary loops zero gradients between their last use and the next backward pass; wherever the cut lies, what it leaves
out is never used. Others do not: an optimizer that steps every n-th time only, a gradient that is applied one step
late, a `.grad` kept as momentum. What becomes of a gradient shows only later, so after each cut one small parameter of
every group is watched until its optimizer steps again: the gradient it had at the cut was used if it is still in place
then, as it is or with new ones added to it, and was not zero when these came. What is added to it and zeroed before
the step (the gradients that a GAN's generator loss leaves on the discriminator) was not used. That is said once, and
told as the event `gradient_alive`.
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
"""Attribute of a gradient that was there at the cut; one put in its place lacks it."""
_MAX_ELEMENTS = 1 << 20
"""Gradients of more values are not watched: whether they are zero would cost too much to see."""


class _Probe:
    """One parameter with a gradient at the cut."""

    def __init__(self, owner: Any, param: Tensor) -> None:
        self.owner = owner
        self.param = param
        self.token = object()
        self.known = False
        """Whether it is decided what became of the gradient."""
        self.stepping = False
        """Its optimizer steps with a closure: what is added to the gradient is applied."""
        self.added = False
        """The gradient of the cut was in place when the latest one arrived, which is about to be added to it."""
        self.handles: list[RemovableHandle] = []
        assert param.grad is not None
        self.mark(param.grad)

    def mark(self, grad: Tensor) -> None:
        grad.__dict__[_MARK] = self.token

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()

    def used(self) -> bool:
        """Whether the gradient of the cut is still in place, and not zero: what happens next uses it."""
        grad = self.param.grad
        if grad is None or grad.__dict__.get(_MARK) is not self.token:
            return False
        if in_graph(grad):
            return False
        return bool((grad._values() if grad.is_sparse else grad).count_nonzero())  # noqa: SLF001 - values() refuses uncoalesced gradients


class GradientWatch:
    """Of the gradients at one cut; `alive` is called with a parameter whose gradient was used after it."""

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
        """`optimizer` is about to step: a gradient that is still the cut's is applied, unless a `closure` makes it."""
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
            # A sum that is not made in place (create_graph, sparse and dense) is another tensor.
            if probe.added and not probe.known and param.grad is not None:
                probe.mark(param.grad)
            probe.added = False

        probe.handles.append(probe.param.register_hook(arrives))  # type: ignore[no-untyped-call]
        if probe.param.is_leaf:
            probe.handles.append(probe.param.register_post_accumulate_grad_hook(added))  # type: ignore[no-untyped-call]


def _used(probe: _Probe) -> bool:
    try:
        return probe.used()
    except Exception as error:  # noqa: BLE001 - inside the user's backward pass or step: never harm it
        _log.debug("a gradient could not be looked at", exc_info=error)
        return False


def _size(param: Tensor) -> int:
    grad = param.grad
    assert grad is not None
    return grad._values().numel() if grad.is_sparse else grad.numel()  # noqa: SLF001 - values() refuses uncoalesced gradients
