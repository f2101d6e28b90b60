"""Hooks around the steps of one optimizer.

Each optimizer handles only its own tables that are tracked by gradients, so a step costs what its own tables cost. The
changed rows are taken from the gradient only if nothing but the optimizer's own step runs between the hooks. Another
hook or a closure may run in between and write or drop gradients; with either, the tables are tracked by hashes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import optimizer as torch_optimizer

from deltashard.optimizer.whitelist import inexact_reason
from deltashard.tracking.foreign_step import after_any_step
from deltashard.tracking.tensor_versions import TensorVersionSet

if TYPE_CHECKING:
    from deltashard.tracking.first_step import FirstStep
    from deltashard.tracking.gradient import GradientWatch
    from deltashard.tracking.tracked_table import TrackedTable
    from deltashard.tracking.tracking import Tracking

_GLOBAL_PRE = torch_optimizer._global_optimizer_pre_hooks  # noqa: SLF001 - torch offers no accessor
_GLOBAL_POST = torch_optimizer._global_optimizer_post_hooks  # noqa: SLF001 - as above


class Steps:
    """State shared by all optimizers of one `Tracking`."""

    __slots__ = (
        "_look", "before_next", "captured", "first", "gradients", "inside", "stepped", "updated", "updating",
    )  # fmt: skip

    def __init__(self) -> None:
        self.captured = False
        """Whether a step was captured into a CUDA graph, whose replays call no hooks."""
        self.stepped = False
        """Whether an optimizer stepped since the last step boundary."""
        self.updated = False
        """Whether a watched fused kernel changed rows since the last step boundary."""
        self.updating = False
        """Whether a fused kernel is updating rows now, or was interrupted by an exception."""
        self.inside: set[Any] = set()
        """Optimizers whose step has started and not ended, including steps interrupted by an exception."""
        self.before_next: list[Callable[[], None]] = []
        """Called once, before the next optimizer step."""
        self._look: Callable[[], None] | None = None
        self.first: FirstStep | None = None
        """Watches the first step after a restore."""
        self.gradients: GradientWatch | None = None
        """Watches the use of gradients that existed at the last snapshot."""

    def end_step(self) -> None:
        self.stepped = self.updated = False

    def update(self, *, begins: bool) -> None:
        self.updating, self.updated = begins, True

    def run_before_next_step(self, call: Callable[[], None]) -> None:
        """Call `call` once, before the next optimizer step."""
        self.before_next.append(call)

    def check_before_next_step(self, look: Callable[[], None] | None) -> None:
        """Call `look` once, before the next optimizer step, in place of an earlier one; None removes it."""
        self.before_next = [call for call in self.before_next if call is not self._look]
        self._look = look
        if look is not None:
            self.before_next.append(look)


class StepHooks:
    """Hooks of one optimizer."""

    __slots__ = ("_handles", "_on_cuda", "_sizes", "_steps", "_tracking", "_versions", "optimizer", "tables")

    def __init__(self, optimizer: Any, tracking: Tracking) -> None:
        self.optimizer = optimizer
        self.tables: list[TrackedTable] = []
        """Tables owned by this optimizer alone and tracked by gradients."""
        self._tracking = tracking
        self._steps = tracking.steps
        self._sizes = _sizes(optimizer)
        """Number of parameters per group at the last check."""
        self._on_cuda = _on_cuda(optimizer)
        self._versions: TensorVersionSet | None = None
        """Versions of `tables` after the last step; None during a step before which they differed."""
        self._handles = [
            optimizer.register_step_pre_hook(self.before),
            optimizer.register_step_post_hook(self.after),
            optimizer.register_load_state_dict_post_hook(tracking.state_loaded),
        ]

    def watch(self, tables: list[TrackedTable]) -> None:
        """Set the tables, and refresh the recorded groups and devices."""
        self.tables, self._versions, self._sizes = tables, None, _sizes(self.optimizer)
        self._on_cuda = _on_cuda(self.optimizer)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._versions = None

    def before(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: C901
        steps = self._steps
        if steps.before_next:
            calls, steps.before_next = steps.before_next, []
            for call in calls:
                call()
        if steps.gradients is not None:
            steps.gradients.before(optimizer, closure=has_closure(args, kwargs))
            if steps.gradients.is_finished:
                steps.gradients = None
        if steps.first is not None:
            steps.first.before(optimizer)
        if optimizer in steps.inside:
            # The last step was interrupted and may have changed rows: a fused one leaves no trace.
            self._rewritten()
        if _sizes(optimizer) != self._sizes:
            self._sizes = _sizes(optimizer)
            self._tracking.regrouped(optimizer)
        if self.tables:
            reason = inexact_reason(optimizer) or foreign_hook_reason(optimizer, args, kwargs)
            if reason is not None or not self._holds(TensorVersionSet.unchanged):
                self._versions = None
            for table in self.tables:
                try:
                    if self._versions is None:
                        table.before_step(reason)
                    else:
                        table.hold_gradient()
                except Exception as error:  # noqa: BLE001 - a moved weight may break tracking, which must not break the step
                    table.on_tracking_error(error)
        steps.inside.add(optimizer)

    def after(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        steps = self._steps
        steps.stepped = True
        if self._on_cuda and torch.cuda.is_current_stream_capturing():
            steps.captured = True
        if optimizer not in steps.inside:
            self._rewritten()  # the pre-hook did not run for this step
        if self.tables:
            self._mark()
        if steps.first is not None:
            steps.first.after(optimizer)
            if steps.first.is_finished:
                steps.first = None
        steps.inside.discard(optimizer)  # last, because a step with missing marks is incomplete, too

    def _rewritten(self) -> None:
        self._versions = None
        for table in self.tables:
            table.rewritten()

    def _holds(self, question: Callable[[TensorVersionSet], bool]) -> bool:
        try:
            return self._versions is not None and question(self._versions)
        except Exception:  # noqa: BLE001 - a moved weight may break this check; then each table is checked
            return False

    def _take_versions(self) -> TensorVersionSet | None:
        if any(table.tracker != "gradients" for table in self.tables):
            return None
        try:
            return TensorVersionSet(self.tables)
        except Exception:  # noqa: BLE001 - as above
            return None

    def _mark(self) -> None:
        for table in self.tables:
            try:
                table.mark_gradient_rows()
            except Exception as error:  # noqa: BLE001 - as above
                table.on_tracking_error(error)
        if self._holds(TensorVersionSet.stepped):
            return
        for table in self.tables:
            try:
                table.after_step()
            except Exception as error:  # noqa: BLE001 - as above
                table.on_tracking_error(error)
        self._versions = self._take_versions()


def _sizes(optimizer: Any) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]


def _on_cuda(optimizer: Any) -> bool:
    return any(param.is_cuda for group in optimizer.param_groups for param in group["params"])


def foreign_hook_reason(
    optimizer: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> str | None:
    """Return which foreign code runs within a step of the optimizer, if any."""
    if has_closure(args, kwargs or {}):
        return "its step evaluates a closure"
    pre, post = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks  # noqa: SLF001 - torch offers no accessor
    for hooks in (pre, post, _GLOBAL_PRE, _GLOBAL_POST):
        for hook in hooks.values():
            if hook is not after_any_step and not isinstance(getattr(hook, "__self__", None), StepHooks):
                return "another step hook of its optimizer may write rows, or drop gradients, unseen"
    return None


def has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return (len(args) > 1 and args[1] is not None) or kwargs.get("closure") is not None
