"""A training script that does to its model and optimizers what scripts do, and checkpoints of it without a sidecar.

A checkpoint is what a cut stores: the blobs as bytes, and the tables' rows; a restore goes the way of the trainer's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from deltashard.attach.rank import Rank
from deltashard.loader.registry import LoaderRegistry
from deltashard.program import Program
from deltashard.restore.blob import Blobs
from deltashard.restore.model_target import ModelTargets
from deltashard.save.capture import Capture
from deltashard.state.value import array_of
from deltashard.tracking.tracking import Tracking
from deltashard_checkpoint.format.schema import TableSchema
from torch import Tensor, nn

COLUMNS = 4
KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": lambda params, lr: torch.optim.Adam(params, lr=lr),
    "adamw": lambda params, lr: torch.optim.AdamW(params, lr=lr, weight_decay=0.1),
    "momentum": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9),
    "adagrad": lambda params, lr: torch.optim.Adagrad(params, lr=lr),
}
STRUCTURAL = ("grow", "grow in place", "replace optimizer", "add group")
"""Events that a script must repeat before it restores; others are state."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one script is, and what it does at which step."""

    kind: str = "adam"
    sparse: bool = False
    lr: float = 0.1
    set_to_none: bool = True
    zero_last: bool = False
    """Gradients are zeroed at the end of the loop body, not at its beginning."""
    scheduler: bool = False
    used_every: int = 1
    """The second table is looked up at every n-th step only."""
    events: tuple[tuple[int, str], ...] = ()


@dataclass(kw_only=True)
class Checkpoint:
    """What is stored."""

    blobs: dict[str, memoryview]
    tables: dict[str, tuple[TableSchema, list[np.ndarray[Any, Any]]]] = field(default_factory=dict)


class Script:
    """Two tables, a dense layer, and one more that no optimizer steps at first."""

    def __init__(self, plan: Plan) -> None:
        torch.manual_seed(3)
        self.plan = plan
        self.model = nn.ModuleDict(
            {
                name: nn.EmbeddingBag(rows, COLUMNS, mode="sum", sparse=plan.sparse)
                for name, rows in (("a", 24), ("b", 16))
            }
        )
        self.model["top"] = nn.Linear(COLUMNS, 1)
        self.model["late"] = nn.Linear(COLUMNS, 1)
        first = [p for name in ("a", "b", "top") for p in self.model[name].parameters()]
        self.optimizers = [KINDS[plan.kind](first, plan.lr)]
        self.scheduler = (
            torch.optim.lr_scheduler.StepLR(self.optimizers[0], 2, 0.5) if plan.scheduler else None
        )

    def begin(self) -> None:
        """Build what a Checkpointer builds."""
        self.tracking = Tracking(self.model, self.optimizers)
        state = {} if self.scheduler is None else {"scheduler": self.scheduler}
        self.program = Program(self.tracking, state)
        self.capture = Capture(self.program, LoaderRegistry(lambda: 0), rank=Rank())

    def rebuilt(self, until: int) -> Script:
        """The script that restores, with the structure that this one has before step `until`."""
        other = Script(self.plan)
        for step, event in self.plan.events:
            if step < until and event in STRUCTURAL:
                other.happen(event)
        return other

    def train(self, steps: Iterable[int]) -> None:
        for n in steps:
            for step, event in self.plan.events:
                if step == n:
                    self.happen(event)
            if not self.plan.zero_last:
                self._zero()
            self._backward(n)
            for optimizer in self.optimizers:
                optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
            if self.plan.zero_last:
                self._zero()
            self.tracking.steps.done()

    def happen(self, event: str) -> None:
        match event:
            case "freeze" | "unfreeze":
                self.model["b"].weight.requires_grad_(event == "unfreeze")
            case "freeze late" | "unfreeze late":
                self.model["late"].requires_grad_(event == "unfreeze late")
            case "drop gradients":
                for param in self.model.parameters():
                    param.grad = None
            case "grow" | "grow in place":
                self._grow(in_place=event == "grow in place")
            case "replace optimizer":
                params = [p for group in self.optimizers[0].param_groups for p in group["params"]]
                kind = "momentum" if self.plan.kind != "momentum" else "adagrad"
                self.optimizers[0] = KINDS[kind](params, self.plan.lr)
            case "add group":
                known = {p for group in self.optimizers[0].param_groups for p in group["params"]}
                if new := [p for p in self.model["late"].parameters() if p not in known]:
                    self.optimizers[0].add_param_group({"params": new, "lr": 0.02})
                    if isinstance(self.optimizers[0], torch.optim.Adagrad):
                        for p in new:
                            self.optimizers[0].state[p] = torch.optim.Adagrad([p]).state[p]
            case _:
                raise AssertionError(event)

    def cut(self) -> Checkpoint:
        self.tracking.adopt()
        self.tracking.refresh()
        blobs = {name: memoryview(bytes(tree.to_bytes())) for name, tree in self.capture.blobs(0, None)}
        found = Checkpoint(blobs=blobs)
        for table in self.tracking.tables:
            parts = [table.param, *table.state_tensors().values()]
            found.tables[table.fqn] = table.schema, [array_of(part).copy() for part in parts]
        self.tracking.cut_taken(1, "all")
        return found

    def restore(self, checkpoint: Checkpoint, *, script: bool = False) -> list[str]:
        """Returns the notes; raises as `restore()` does."""
        targets = ModelTargets(
            self.tracking,
            [schema for schema, _ in checkpoint.tables.values()],
            strict=True,
            weights_only=False,
            renames={},
        )
        blobs = Blobs.decode(checkpoint.blobs)
        notes = blobs.check(self.program, strict=True, weights_only=False)
        targets.place(blobs.strangers(self.tracking))
        for placed in targets.placed:
            schema, (weights, *fields) = checkpoint.tables[placed.table.fqn]
            placed.target.weights[...] = weights
            for spec, values in zip(schema.fields, fields, strict=True):
                live = placed.target.fields[spec.name]
                live[...] = values.reshape(live.shape)
        targets.finish()
        notes += blobs.apply_dense(self.program, strict=True, weights_only=False, script=script)
        for table in self.tracking.tables:
            table.reseed(None)
        return notes + blobs.apply_state(self.program, strict=True, script=script)

    def values(self) -> dict[str, Any]:
        """All that the script trained: weights, gradients' presence aside, and what its optimizers hold."""
        names = {param: name for name, param in self.model.named_parameters()}
        found: dict[str, Any] = dict(self.model.state_dict())
        for n, optimizer in enumerate(self.optimizers):
            for param, held in optimizer.state.items():
                # A parameter that was replaced leaves its state behind.
                found |= {f"{n}.{names[param]}.{key}": v for key, v in held.items() if param in names}
            for g, group in enumerate(optimizer.param_groups):
                found[f"{n}.{g}.lr"] = group["lr"]
        return found

    def _backward(self, n: int) -> None:
        """A graph that outlived it would remember the shape of a table that grows in place."""
        ids = torch.randint(16, (3, 2), generator=torch.Generator().manual_seed(n))
        held = self.model["a"](ids)
        if n % self.plan.used_every == 0:
            held = held + self.model["b"](ids)
        (self.model["top"](held) + self.model["late"](held)).square().mean().backward()

    def _zero(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=self.plan.set_to_none)
        self.model["late"].zero_grad(set_to_none=self.plan.set_to_none)

    def _grow(self, *, in_place: bool) -> None:
        old = self.model["a"].weight
        rows = len(old)

        def longer(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.dim() == 0:
                return value
            return torch.cat([value.detach(), torch.full((8, *value.shape[1:]), 0.5)])

        optimizer = self.optimizers[0]
        state = {key: longer(value) for key, value in optimizer.state.pop(old, {}).items()}
        old.grad = None
        if in_place:
            old.data = longer(old)
            new = old
        else:
            self.model["a"] = nn.EmbeddingBag(rows + 8, COLUMNS, mode="sum", sparse=self.plan.sparse)
            new = self.model["a"].weight
            new.data.copy_(longer(old))
        self.model["a"].num_embeddings = rows + 8
        if state:
            optimizer.state[new] = state
        for group in optimizer.param_groups:
            group["params"] = [new if p is old else p for p in group["params"]]


def same(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Names of what differs; empty: nothing does, bit for bit."""
    differ = [name for name in a.keys() & b.keys() if not _equal(a[name], b[name])]
    return sorted([*differ, *(a.keys() ^ b.keys())])


def _equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
