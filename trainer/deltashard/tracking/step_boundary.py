"""Tracks the position of the program between two `step()` calls: inside an optimizer's step, or past a forward pass.

If a program catches an exception inside `optimizer.step()` (Ctrl-C, out of memory), parameters of two steps are mixed,
and no snapshot may be taken until that optimizer has completed a step. A forward pass in training mode belongs to the
next step: it changes BatchNorm statistics and draws random numbers for dropout. `step_hook` records the start and end
of optimizer steps. The hooks here record when the model, its dropouts and its norms run with gradients enabled;
evaluation does not count. A step costs one short call per such module. If the first step does not call the model itself
(a generator and a critic in one ModuleDict), its parts are watched from then on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.hooks import RemovableHandle

from deltashard.state.transient_hook import TransientHook
from deltashard.tracking.step_clock import StepClock
from deltashard.tracking.tracking import Tracking


class StepBoundaryMonitor:
    """Hooks that record the position of the program."""

    def __init__(self, tracking: Tracking, clock: StepClock) -> None:
        self._called = False
        self._clock = clock
        self._model = tracking.model
        self._steps = tracking.steps
        self._handles: list[RemovableHandle] = []
        self._watched: set[int] = set()
        self._watch(self._model)
        for module in self._model.modules():
            if isinstance(module, (_NormBase, _DropoutNd)):
                self._watch(module)

    @property
    def moved(self) -> bool:
        return self._clock.moved

    @property
    def torn(self) -> bool:
        return bool(self._steps.inside)

    def first_step_done(self) -> None:
        """Watch the parts of a model that is not called itself."""
        if not self._called:
            for part in _parts(self._model):
                self._watch(part)

    def forward(self, *, whole: bool) -> None:
        """Record the start of a training forward pass of the model itself (`whole`) or of a part.

        IMPORTANT: writes constants and reads nothing that changes. `torch.compile` includes this code in the compiled
        frame, where a value that is read can trigger a recompilation.
        """
        self._clock.mark_moved()
        if whole:
            self._called = True

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _watch(self, module: nn.Module) -> None:
        if id(module) not in self._watched and not isinstance(module, torch.jit.ScriptModule):
            self._watched.add(id(module))
            hook = _ForwardHook(self, whole=module is self._model)
            self._handles.append(module.register_forward_pre_hook(hook))


class _ForwardHook(TransientHook):
    """Hook before a forward pass; it does nothing in a copy or pickle of the model."""

    def __init__(self, step_boundary: StepBoundaryMonitor | None = None, *, whole: bool = False) -> None:
        self._step_boundary = step_boundary
        self._whole = whole

    def __call__(self, module: nn.Module, _args: Any) -> None:
        if self._step_boundary is not None and module.training and torch.is_grad_enabled():
            self._step_boundary.forward(whole=self._whole)


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _parts(child)
        else:
            yield child
