"""The saved parts of a program: tables, dense tensors, optimizers, extra state of modules, and entries of `state=`.

All of them are inspected, encoded and decoded once when the Checkpointer is built, to find state that cannot be saved
before the first save.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from deltashard_checkpoint.format.schema import Box, TableSchema
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from deltashard.loader.registry import LoaderRegistry
from deltashard.optimizer import hyperparameter
from deltashard.optimizer.whitelist import wrapped_optimizers
from deltashard.state import managed_collision, trained_parameter
from deltashard.state.contract import Contract, contracts_of, refuse_model
from deltashard.state.fingerprint import fingerprint, library_version
from deltashard.state.origin import Origin
from deltashard.state.value import ValueSource, check_value, sources
from deltashard.tracking.step_boundary import StepBoundaryMonitor
from deltashard.tracking.step_clock import StepClock
from deltashard.tracking.tracking import Tracking


class Program:
    """The parts of a training program that a checkpoint contains."""

    def __init__(self, tracking: Tracking, state: Mapping[str, Any]) -> None:
        """Inspect the program; `state` is the user's further state by name.

        Raises:
            StateError: An entry of `state`, a module or an optimizer cannot be saved.
        """
        self.tracking = tracking
        self.state = dict(state)
        self._origin = Origin(
            {table.key: table.param for table in tracking.tables} | dict(tracking.inventory.dense)
        )
        self.contracts: list[Contract] = contracts_of(tracking.model, lambda: tracking.inventory)
        """Modules with a custom state_dict."""
        tracking.leave_out(frozenset().union(*(contract.left_out for contract in self.contracts)))
        self.sources: list[ValueSource] = sources(
            self.state, refuse=lambda name, held: refuse_model(name, held, tracking.inventory)
        )
        """Entries of `state=`, then extra state of modules, then histories of managed collisions."""
        self.sources += [contract.source for contract in self.contracts]
        self.sources += managed_collision.histories(tracking.model)
        self.fingerprint = fingerprint()
        """Versions and settings that determine results bit for bit."""
        self.given: dict[str, dict[str, Any]] = {}
        """Values from before training changed them: trainable parameters, and hyperparameters of schedulers by name."""
        self.record_given()
        for view in tracking.optimizers:
            check_value(view.capture(), where=f"optimizer {view.index}")

    def record_given(self) -> None:
        """Record the current values as the script's own, before training."""
        schedulers = {s.name: s for s in self.sources if isinstance(s.subject, LRScheduler)}
        self.given = {"trained": trained_parameter.trained(self.parameters)} | {
            f"state/{name}": hyperparameter.given(source.get()) for name, source in schedulers.items()
        }
        for view in self.tracking.optimizers:
            view.record_given()

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Saved parameters of the model, and of optimizers outside of it, by canonical name."""
        orphans = {tensor: n for view in self.tracking.optimizers for n, tensor in view.orphans.items()}
        found = trained_parameter.parameters_of(self.tracking.inventory.names | orphans)
        return {name: param for name, param in found.items() if name not in self.tracking.left_out}

    @property
    def schemas(self) -> tuple[TableSchema, ...]:
        """Schemas of the tables of which this process holds a shard, each once, as of the last refresh."""
        return tuple({table.fqn: table.schema for table in self.tracking.tables}.values())

    @property
    def boxes(self) -> tuple[Box, ...]:
        return tuple(table.box for table in self.tracking.saved)

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """(rows, columns) of every table of the model, including tables on other ranks."""
        held = self.tracking.inventory.elsewhere | {schema.fqn: schema for schema in self.schemas}
        return {fqn: (schema.rows, schema.columns) for fqn, schema in held.items()}

    @property
    def dense_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tracking.inventory.dense.values())

    def meta(
        self,
        dense: Mapping[str, Tensor],
        *,
        step: int,
        content: Mapping[str, str] | None,
        world_size: int = 1,
    ) -> dict[str, Any]:
        """Return the `meta` blob of a snapshot at `step`; `dense` as saved, `content`: hashes by table if recorded."""
        many = {} if world_size == 1 else {"world_size": world_size}
        self._origin.warn_changes(dict(dense) | {table.key: table.param for table in self.tracking.tables})
        return {
            "library": library_version(),
            "step": step,
            "fingerprint": self.fingerprint,
            "content": dict(content) if content is not None else None,
            "grown": self._origin.grown(dense),
            "modules": [contract.path for contract in self.contracts],
            "parameters": trained_parameter.capture(self.parameters),
            "given": self.given,
            **many,
        }

    def unsaved_scheduler(self) -> str | None:
        """Return the class of an optimizer with a scheduler, if no entry of `state=` can be that scheduler."""
        if any(_may_hold_scheduler(value) for value in self.state.values()):
            return None
        for view in self.tracking.optimizers:
            for optimizer in (view.target, *wrapped_optimizers(view.target)):
                if any("initial_lr" in group for group in optimizer.param_groups):
                    return type(optimizer).__name__
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLoop:
    """The program in its loop: model, loaders and step clock."""

    program: Program
    loaders: LoaderRegistry
    clock: StepClock
    step_boundary: StepBoundaryMonitor


def _may_hold_scheduler(value: Any) -> bool:
    plain = isinstance(value, Tensor | torch.Generator | torch.amp.GradScaler | nn.Module)
    if isinstance(value, Mapping):
        return any(_may_hold_scheduler(each) for each in value.values())
    if isinstance(value, list):
        return any(_may_hold_scheduler(each) for each in value)
    return not plain and (isinstance(value, tuple) or hasattr(value, "state_dict"))
