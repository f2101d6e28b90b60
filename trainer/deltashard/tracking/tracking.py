"""Facade of tracking: the rows that a snapshot must take, and the live tensors that contain them.

There is one `TrackedTable` per table shard of this process (the whole table if it is not sharded).

Call order at a step boundary, on the training thread:

    steps.end_step()                        every step
    refresh() -> DirtyCounts                a snapshot is due: updates schemas, hashes tables and counts rows
    audit_sample()                          draws the next sample
    table.select_rows(mode)                 per table; then the rows are copied
    snapshot_taken(snapshot_id, mode, full=...)     flags become pending
    committed(snapshot_id, ...) | failed(snapshot_id)       when the outcome is reported
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from deltashard.optimizer.optimizer_state import OptimizerView, views_of
from deltashard.optimizer.whitelist import (
    hookable,
    replaced_step_reason,
    wrapped_optimizers,
)
from deltashard.state.discovery import FoundTable, Inventory, discover, overlapping_tables
from deltashard.state.kernel_thread import share
from deltashard.state.replica import owners
from deltashard.state.row_hash import Hashing
from deltashard.tracking.audit import SYNC_CHECK_INTERVAL, AuditFault
from deltashard.tracking.extension import find, views
from deltashard.tracking.first_step import FirstStep, Report
from deltashard.tracking.foreign_step import ForeignSteps
from deltashard.tracking.gradient import GradientWatch
from deltashard.tracking.marks import DirtyCounts, Mode, synchronize
from deltashard.tracking.step_hook import StepHooks, Steps
from deltashard.tracking.tracked_table import TrackedTable, TrackingSettings
from deltashard.tracking.user_optimizer import UserOptimizers

_log = logging.getLogger("deltashard.tracking")

__all__ = ["TrackedTable", "Tracking", "TrackingSettings"]

_JOBS_AT_ONCE = 64
"""Hashing chunks over all tables that run before their results are taken."""


class Tracking:  # noqa: PLR0904
    """All tables of a model and its optimizers."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Any = (),
        *,
        settings: TrackingSettings | None = None,
        report: Report | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Discover tables and install hooks.

        Args:
            model: Module whose tables and dense tensors are tracked, wrapped or not.
            optimizers: One optimizer or an iterable of them; wrappers (Lookahead, ...) are unwrapped. Fused optimizers
                are found in the model.
            settings: See `TrackingSettings`.
            report: Called for events that are also logged: optimizer_state_reset (table, field), gradient_alive
                (parameter, optimizer).
            rank: Rank of this process in a group of `world_size`.
            world_size: Number of ranks. With more than one, each replicated tensor is saved by one rank.

        Raises:
            UserError: See `discovery.discover` and `user_optimizer.unwrap_optimizers`.
        """
        self.settings = settings or TrackingSettings()
        self.model = model
        self._user_optimizers = UserOptimizers(optimizers, model)
        self._hooks: list[StepHooks] = []
        self.steps = Steps()
        self.report: Report = report or (lambda _name, _facts: None)
        self._rank, self._world_size = rank, world_size
        self.inventory = discover(model, self.settings.tables, find)
        self._savers = self._assign_savers()
        self.tables = [self._tracked(found) for found in self.inventory.tables.values()]
        self.by_key = {table.key: table for table in self.tables}
        self.regrown = False
        """Whether tables were added or removed since the last snapshot, so that the next one must be full."""
        self._addresses: list[int] = []
        self._alive_reported = False
        self.optimizers: list[OptimizerView] = self._views(self.inventory)
        self.left_out: frozenset[str] = frozenset()
        for view in self.optimizers:
            view.watch_attributes()
        self.faults = 0
        """Number of audit faults since the start."""
        self._sampling: Future[None] | None = None
        self._grouped: list[list[Tensor]] | None = None
        """Parameters by optimizer, as of the last `_attach`."""
        self._named = self.inventory
        self._install()
        self._foreign = ForeignSteps(self)
        self._attach()
        self.on_cuda = any(device.type == "cuda" for device in self._devices())
        """Whether a tensor of the program is on a GPU, as of the last snapshot."""
        _live.add(self)

    def dense(self, *, look: bool = True) -> dict[str, Tensor]:
        """Return the live dense parameters and persistent buffers to save, by canonical name.

        `look=False`: use the result of the last `refresh` instead of inspecting the model.
        """
        if look:
            self.inventory = discover(self.model, self.settings.tables, find)
        return {name: tensor for name, tensor in self.inventory.dense.items() if name not in self.left_out}

    @property
    def saved(self) -> list[TrackedTable]:
        """Shards that this process saves; one rank saves each replica."""
        return [table for table in self.tables if table.saver is None]

    def saves(self, name: str) -> bool:
        return self._savers.get(name, 0) == self._rank

    @property
    def replicas(self) -> dict[str, Tensor]:
        """Tensors that must be equal on all ranks, by name: replicated parameters and tables."""
        if self._world_size == 1:
            return {}
        dense = {
            name: tensor for name, tensor in self.inventory.dense.items() if isinstance(tensor, nn.Parameter)
        }
        return dense | {table.key: table.param for table in self.tables if table.found.replicated}

    def _assign_savers(self) -> dict[str, int]:
        """Assign a saving rank to each replica; rank 0 saves buffers, which may differ between ranks."""
        if self._world_size == 1:
            return {}
        held = {name: found.param for name, found in self.inventory.tables.items() if found.replicated}
        held |= {name: t for name, t in self.inventory.dense.items() if isinstance(t, nn.Parameter)}
        return owners({name: t.numel() * t.element_size() for name, t in held.items()}, self._world_size)

    def _tracked(self, found: FoundTable) -> TrackedTable:
        saver = self._savers.get(found.key, self._rank) if found.replicated else self._rank
        return TrackedTable(found, self.settings, saver=None if saver == self._rank else saver)

    def leave_out(self, names: frozenset[str]) -> None:
        """Exclude dense tensors from the checkpoint, as requested by a module's contract."""
        self.left_out = names

    @property
    def hooked(self) -> list[Any]:
        """The torch optimizers whose steps can be observed by hooks."""
        return [hooks.optimizer for hooks in self._hooks]

    @property
    def has_gradients(self) -> bool:
        return any(param.grad is not None for params in _by_view(self.optimizers) for param in params)

    def synchronize(self) -> None:
        """Wait for the accelerators that a snapshot reads: copies run on one stream, training may use several."""
        devices = self._devices()
        self.on_cuda = any(device.type == "cuda" for device in devices)
        for device in devices:
            synchronize(device)

    def _devices(self) -> set[torch.device]:
        tensors = [*(table.param for table in self.tables), *self.inventory.dense.values()]
        return {tensor.device for tensor in tensors}

    def refresh(self) -> DirtyCounts:
        """Update marks and schemas for a snapshot, and count the rows that it would take."""
        self.adopt()
        self._rediscover()
        known = self._grouped
        if known is None or _places(_by_view(self.optimizers)) != _places(known):
            self._attach()
        elif [table.param.data_ptr() for table in self.tables] != self._addresses:
            self._share()
        if self.steps.first is not None:
            self.steps.first.finish()
            self.steps.first = None
        why = cache(replaced_step_reason)
        for table in self.tables:
            table.refresh(why)
        self._check_shared_state()
        self._update_hashes()
        self._index()
        marks = [table.marks for table in self.saved]
        return DirtyCounts(
            commit=sum(each.count("since_commit") for each in marks),
            baseline=sum(each.count("since_baseline") for each in marks),
            total=sum(each.rows for each in marks),
        )

    def _check_shared_state(self) -> None:
        """Track two tables by hashes if they share optimizer state in memory, which either may change."""
        held: dict[int, TrackedTable] = {}
        for table in self.tables:
            for tensor in table.signable()[1:]:
                address = tensor.data_ptr() if tensor.layout == torch.strided and tensor.dim() else 0
                other = held.setdefault(address, table)
                if address and other is not table:
                    for each, of in ((table, other), (other, table)):
                        each.shared_with(f"the state of {of.key}")

    def _update_hashes(self) -> None:
        """Hash many small tables together; the memory for results (8 bytes per row) is bounded."""
        looks: list[tuple[TrackedTable, Hashing]] = []
        jobs = 0
        for table in self.tables:
            look = table.begin_hashing()
            if look is not None:
                looks.append((table, look))
                jobs += len(look.jobs)
            if jobs >= _JOBS_AT_ONCE or table is self.tables[-1]:
                share([job for _, each in looks for job in each.jobs])
                for each, done in looks:
                    each.end_hashing(done)
                looks, jobs = [], 0

    def snapshot_taken(self, snapshot_id: int, mode: Mode, *, full: bool = False) -> None:
        """Record that `snapshot_id` copied every table's selection; `full`: all rows of all tables (also by "all")."""
        for table in self.tables:
            table.marks.snapshot_taken(snapshot_id, full=full or mode == "all")
        self.regrown = False
        if self.steps.gradients is not None:
            self.steps.gradients.close()
            self.steps.gradients = None
        if not self._alive_reported:
            watch = GradientWatch([hooks.optimizer for hooks in self._hooks], self._gradient_alive)
            self.steps.gradients = None if watch.is_finished else watch

    def committed(self, snapshot_id: int, *, baseline: bool) -> None:
        """Record the commit of `snapshot_id`; repeated, late and unknown snapshots have no effect."""
        for table in self.tables:
            table.marks.committed(snapshot_id, baseline=baseline)

    def rebase(self) -> None:
        """Make rows changed since the newest commit the rows changed since the baseline."""
        for table in self.tables:
            table.marks.rebase()

    def failed(self, snapshot_id: int) -> None:
        for table in self.tables:
            table.marks.failed(snapshot_id)

    def audit_sample(self, later: Callable[[Callable[[], None]], Future[None]] | None = None) -> None:
        """Draw new samples of rows, at the boundary of a snapshot and after the check of the last samples.

        `later` runs a job on another thread, which then hashes the samples.
        """
        drawn = [table.audit_draw(len(self.tables)) for table in self.tables]
        looks = [look for look in drawn if look is not None]

        def look_all() -> None:
            for look in looks:
                look()

        if later is None or any(table.param.device.type != "cpu" for table in self.tables):
            look_all()
        elif looks:
            self._sampling = later(look_all)

    def audit_ahead(self) -> list[Callable[[], None]]:
        """Return jobs that compare the samples shortly before a snapshot, for the thread that hashed them."""
        return [look for table in self.tables if (look := table.audit_ahead()) is not None]

    def audit_before_commit(self, *, ahead: bool = False) -> list[AuditFault]:
        """Check the samples before the next snapshot, which should be full if there is a fault.

        `ahead`: the jobs of `audit_ahead` ran right before this snapshot; only tables whose turn it is are compared
        again.
        """
        if self._sampling is not None:
            sampling, self._sampling = self._sampling, None
            if (failed := sampling.exception()) is not None:
                _log.debug("the sample of an audit could not be drawn", exc_info=failed)
        faults = []
        for nth, table in enumerate(self.tables):
            fault = table.audit_check(ahead=ahead and (nth + table.samples) % SYNC_CHECK_INTERVAL != 0)
            if fault is not None:
                _log.error("%s", fault)
                faults.append(fault)
        self.faults += len(faults)
        return faults

    def watch_first_step(self) -> None:
        first = FirstStep(self.tables, self.report)
        self.steps.first = None if first.is_finished else first

    def close(self) -> None:
        self._foreign.close()
        if self.steps.gradients is not None:
            self.steps.gradients.close()
            self.steps.gradients = None
        for hooks in self._hooks:
            hooks.close()
        self._hooks.clear()
        for table in self.tables:
            table.close()

    def _views(self, inventory: Inventory) -> list[OptimizerView]:
        return views(
            views_of(self._user_optimizers.now, inventory.names, self.by_key, inventory.fused), inventory
        )

    def _attach(self) -> None:
        self._grouped = _by_view(self.optimizers)
        self._share()
        for table in self.tables:
            owners = [
                o
                for o in self._user_optimizers.now
                if any(_owns(x, table.param) for x in (o, *wrapped_optimizers(o)))
            ]
            table.attach(owners, [v for v in self.optimizers if _owns(v.target, table.param)])
        self._index()

    def _share(self) -> None:
        """Track tables by hashes if they share memory, since another step may write their rows."""
        self._addresses = [table.param.data_ptr() for table in self.tables]
        others = overlapping_tables(self.inventory)
        for table in self.tables:
            table.shared_with(others.get(table.key))

    def _index(self) -> None:
        """Assign the tables to the hooks of their optimizers; not within a step, which iterates over them."""
        by_owner: dict[int, list[TrackedTable]] = {}
        for table in self.tables:
            if table.tracker == "gradients":
                by_owner.setdefault(id(table.sole), []).append(table)
        for hooks in self._hooks:
            hooks.watch(by_owner.get(id(hooks.optimizer), []))

    def adopt(self) -> None:
        """Adopt optimizers that the script replaced in the list it passed, or in an attribute of the model."""
        if not self._user_optimizers.refresh():
            return
        live = {id(optimizer) for handed in self._user_optimizers.now for optimizer in hookable(handed)}
        for hooks in [hooks for hooks in self._hooks if id(hooks.optimizer) not in live]:
            hooks.close()
            self._hooks.remove(hooks)
            self.steps.inside.discard(hooks.optimizer)
        self._install()
        self._rebuild_views()
        kinds = ", ".join(type(view.target).__name__ for view in self.optimizers)
        _log.warning(
            "an optimizer was replaced during training: from now on checkpoints hold the current ones (%s). "
            "To restore such a checkpoint, build the same optimizers before the Checkpointer",
            kinds,
        )

    def _install(self) -> None:
        known = {id(hooks.optimizer) for hooks in self._hooks}
        for handed in self._user_optimizers.now:
            for optimizer in hookable(handed):
                if id(optimizer) not in known:
                    known.add(id(optimizer))
                    self._hooks.append(StepHooks(optimizer, self))

    def state_loaded(self, optimizer: Any) -> None:
        if any(view.restoring for view in self.optimizers):
            return
        for table in self.tables:
            if table.sole is optimizer:
                table.mark_outside()

    def regrouped(self, optimizer: Any) -> None:
        """Handle parameters added to an optimizer that is about to step: it may change tables of another one."""
        for table in self.tables:
            if table.sole is not optimizer and _owns(optimizer, table.param):
                table.rewritten()

    def _gradient_alive(self, param: Tensor, optimizer: Any) -> None:
        if self._alive_reported:
            return
        self._alive_reported = True
        name, kind = self.inventory.names.get(param, "a parameter"), type(optimizer).__name__
        _log.warning(
            "the gradient of %s existed at a snapshot and is used after it (%s steps less often than step() is called, "
            "applies gradients late, or keeps them). Checkpoints do not contain .grad: a resumed run continues "
            "without it and is not bit-identical. Save after gradients were applied and before they are zeroed",
            name,
            kind,
        )
        self.report("gradient_alive", {"parameter": name, "optimizer": kind})

    def _rediscover(self) -> None:
        """Find the tables in the current model by name, since modules may be replaced, added or removed.

        A table with another shape or dtype is a new table of that name.
        """
        before = self._named
        now = discover(self.model, self.settings.tables, find)
        same = {key: table for key, table in self.by_key.items() if key in now.tables}
        same = {key: table for key, table in same.items() if table.matches(now.tables[key])}
        for key, table in same.items():
            found = now.tables[key]
            if found.param is not table.param:
                table.rebind(found)
            else:
                table.update_found(found)
        self.inventory = now
        self._savers = self._assign_savers()
        alike = same.keys() == self.by_key.keys() == now.tables.keys()
        if alike and [*map(id, before.names)] == [*map(id, now.names)]:
            return
        if not alike:
            self.regrown = True
            for table in self.tables:
                if table.key not in same:
                    table.close()
            self.by_key = {key: same.get(key) or self._tracked(found) for key, found in now.tables.items()}
            self.tables = list(self.by_key.values())
        self._rebuild_views()
        self._named = now

    def _rebuild_views(self) -> None:
        earlier = self.optimizers
        self.optimizers = self._views(self.inventory)
        for view in self.optimizers:
            view.watch_attributes(earlier)
        self._grouped = None


def _by_view(views: Iterable[OptimizerView]) -> list[list[Tensor]]:
    return [[param for group in view.target.param_groups for param in group["params"]] for view in views]


def _places(grouped: list[list[Tensor]]) -> list[list[int]]:
    return [[*map(id, params)] for params in grouped]


def _owns(optimizer: Any, param: Tensor) -> bool:
    return any(p is param for group in getattr(optimizer, "param_groups", ()) for p in group["params"])


_live: weakref.WeakSet[Tracking] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    # A forked worker does not train: its use of the model must not be tracked.
    for tracking in list(_live):
        tracking.on_cuda = False  # CUDA must not be used there either
        tracking.close()


os.register_at_fork(after_in_child=_after_fork_in_child)
