"""Checks that `step()` is the last statement of the loop body.

A scheduler stepped, or a dense parameter written, after `step()` belongs to that step in the program but not in its
checkpoint, so a resumed run would miss it. The check runs once per snapshot, from a hook that removes itself at the
next optimizer step; ordinary steps pay nothing. It reports nothing if another `step()` came in between (gradient
accumulation), since the change may belong to that step, or after the end of a loader's pass, since a resumed run
reaches that end again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from deltashard.tracking.step_clock import StepClock
from deltashard.tracking.tracking import Tracking

log = logging.getLogger("deltashard")


class StepOrderCheck:
    """Warns once about a loop body that continues after `step()`."""

    def __init__(
        self,
        tracking: Tracking,
        state: Mapping[str, Any],
        clock: StepClock,
        *,
        pass_ended: Callable[[], bool] = lambda: False,
    ) -> None:
        """`pass_ended` returns whether a loader reached the end of its pass since the last step."""
        self._pass_ended = pass_ended
        self._tracking = tracking
        self._clock = clock
        self._step = 0
        self._schedulers = {
            name: value
            for name, value in state.items()
            if isinstance(value, torch.optim.lr_scheduler.LRScheduler)
        }
        self._epochs: dict[str, int] = {}
        self._versions: list[tuple[str, torch.Tensor, int]] = []
        self._reported = False

    def arm(self) -> None:
        self.close()
        if self._reported:
            return
        self._step = self._clock.step
        self._epochs = {name: scheduler.last_epoch for name, scheduler in self._schedulers.items()}
        self._versions = [
            (name, tensor, tensor._version)  # noqa: SLF001 - torch offers no accessor
            for name, tensor in self._tracking.inventory.dense.items()
            if isinstance(tensor, torch.nn.Parameter)
        ]
        self._tracking.steps.check_before_next_step(self._check)

    def close(self) -> None:
        self._tracking.steps.check_before_next_step(None)

    def _check(self) -> None:
        if self._clock.step != self._step or self._pass_ended():
            return
        moved = [
            f"scheduler {name}" for name, s in self._schedulers.items() if s.last_epoch != self._epochs[name]
        ]
        moved += [name for name, tensor, version in self._versions if tensor._version != version]  # noqa: SLF001
        if moved and not self._reported:
            self._reported = True
            log.warning(
                "%s changed between step() and the next optimizer step: a resumed run would miss the change. "
                "step() must be the last statement of the loop body",
                ", ".join(moved[:4]),
            )
